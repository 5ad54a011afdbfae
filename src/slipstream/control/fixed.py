"""A plan that is given instead of learned: which drafter drafts how deep, by task and by load."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

from slipstream.control.types import NOTHING, Choice, PolicyDrafter
from slipstream.draft.combine.rules import PlanRule


class FixedPlan:
    """Looks up the rule for a task and a load; without a rule nothing is drafted."""

    def __init__(self, rules: Seq[PlanRule], drafters: Seq[PolicyDrafter]) -> None:
        self._drafters = tuple(drafters)
        self._by_task: dict[str | None, list[PlanRule]] = {}
        for rule in rules:
            self._by_task.setdefault(rule.task, []).append(rule)
        for own in self._by_task.values():
            own.sort(key=lambda rule: math.inf if rule.max_requests is None else rule.max_requests)
        self._known: dict[tuple[str | None, int], Choice] = {}
        self.client_task: Callable[[str], str] = str
        """From the name that statistics keep a task under to the client's own, which rules go by."""

    def choice(self, name: str, num_requests: int) -> Choice:
        """For a request whose task goes by `name`, in a step of `num_requests` that decode."""
        task = self.client_task(name)
        own = task if task in self._by_task else None
        key = own, num_requests
        if key not in self._known:
            self._known[key] = self._find(self._by_task.get(own, []), num_requests)
        return self._known[key]

    def _find(self, rules: Seq[PlanRule], num_requests: int) -> Choice:
        for rule in rules:
            if rule.max_requests is None or num_requests <= rule.max_requests:
                return self._of(rule)
        return NOTHING

    def _of(self, rule: PlanRule) -> Choice:
        if rule.drafter is None:
            return NOTHING
        traits = self._drafters[rule.drafter]
        if traits.looks_up:
            return Choice(lookup=rule.drafter, min_tokens=1)
        wanted = rule.num_speculative_tokens
        if wanted is None or not traits.is_chain:
            return Choice(rule.drafter, traits.max_depth)
        return Choice(rule.drafter, min(wanted, traits.max_depth))
