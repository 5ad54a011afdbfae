"""The rules of a fixed plan: which drafter drafts how deep, by task and by load. `slipstream advise` writes such plans.

A rule says up to how many requests at once it holds; a task with rules of its own takes no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.config import check_at_least, check_types, options_from
from slipstream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanRule:
    """What is done for one kind of request at some loads."""

    drafter: int | None = None
    """Place in the list of drafters, from 0; None does not speculate."""
    num_speculative_tokens: int | None = None
    """Levels of a chain; None is as many as the drafter is configured for. Trees and lookups are as configured."""
    max_requests: int | None = None
    """The most requests in a step for which the rule holds; None holds for any number."""
    task: str | None = None
    """None holds for every task without rules of its own."""

    def __post_init__(self) -> None:
        check_types(self, "plan rule")
        if self.drafter is not None:
            check_at_least("plan rule", 0, drafter=self.drafter)
        for name in ("num_speculative_tokens", "max_requests"):
            if getattr(self, name) is not None:
                check_at_least("plan rule", 1, **{name: getattr(self, name)})
        if self.drafter is None and self.num_speculative_tokens is not None:
            raise ConfigError(
                f"plan rule has num_speculative_tokens {self.num_speculative_tokens} and no drafter; "
                "name one, or omit both"
            )


def read_rules(plan: Seq[Any], num_drafters: int) -> tuple[PlanRule, ...]:
    """The rules of a `plan` as users write it; raises `ConfigError` for what is none."""
    rules: dict[tuple[str | None, int | None], PlanRule] = {}
    for rule in plan:
        if not isinstance(rule, Mapping):
            raise ConfigError(
                f'a plan is a list of rules such as {{"drafter": 0, "max_requests": 4}}, got {rule!r}'
            )
        made = options_from(PlanRule, rule, "plan rule")
        if made.drafter is not None and made.drafter >= num_drafters:
            raise ConfigError(
                f"plan rule has drafter {made.drafter}, but there are {num_drafters}, counted from 0"
            )
        key = made.task, made.max_requests
        if key in rules:
            what = (
                "any number of requests"
                if made.max_requests is None
                else f"up to {made.max_requests} requests"
            )
            raise ConfigError(
                f"two plan rules are for {what} of {made.task or 'every other task'}; keep one of them"
            )
        rules[key] = made
    if not rules:
        raise ConfigError("auto plan is empty; omit it to have the engine choose")
    return tuple(rules.values())
