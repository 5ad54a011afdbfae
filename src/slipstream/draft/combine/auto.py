"""Several drafters of which the engine's controller chooses one for each request and step, or none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

from slipstream.config import SpeculativeConfig, check_types
from slipstream.core import EMPTY_PROPOSAL, Proposal, Sequence
from slipstream.draft.base import DraftContext, Drafter, Fit, Observation
from slipstream.draft.combine.group import DrafterGroup
from slipstream.draft.combine.merging import share_of
from slipstream.draft.registry import validate
from slipstream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Keys of `speculative_config` for `auto`."""

    drafters: list[Any] | None = None
    """What may be chosen from, each a `speculative_config` of its own; the verifier is theirs together. Chains are
    chosen in depth too, trees and lookups are taken or left. None is `suffix` and, on a CPU with a target that is not
    quantised, `layer_skip` in int8."""

    def __post_init__(self) -> None:
        check_types(self, "auto")
        if self.drafters is not None and not self.drafters:
            raise ConfigError('auto drafters is empty; list drafters such as {"method": "suffix"}')
        for config in self.configs():
            if config.method in ("off", "auto"):
                raise ConfigError(
                    f"auto drafters has {config.method!r}; not drafting is always a choice of its own"
                )
            validate(config)

    def configs(self) -> list[SpeculativeConfig]:
        """The drafters' configurations; raises `ConfigError` where one is none."""
        for drafter in self.drafters or ():
            if isinstance(drafter, Mapping) and "verifier" in drafter:
                raise ConfigError("the drafters of auto share its verifier; set it beside drafters")
        return [SpeculativeConfig.from_mapping(drafter) for drafter in self.drafters or ()]


class Selection(NamedTuple):
    """Whom to ask for a sequence."""

    member: int | None
    """A drafter; None is nobody."""
    budget: int | None = None
    """The most nodes that are asked of it, where that is less than the sequence's own budget."""
    lookup: int | None = None
    """A drafter that is asked before, with all of the sequence's budget."""
    min_tokens: int = 1
    """The shortest guess of the lookup that makes asking the other one needless."""


FIRST = Selection(0)
Wish = tuple[Sequence, int, Selection]
"""A sequence, its budget, and whom to ask."""


class Asking(NamedTuple):
    """One drafter's turn in a step."""

    member: int
    sequences: Seq[Sequence]
    budgets: Seq[int]
    seconds: float


class AutoDrafter(DrafterGroup):
    """Asks for each sequence the drafter that was chosen for it, with `ask_chosen`; the first one, where nobody chose.

    Drafters that learn from others' text observe all that is committed, so that one that was not asked for a while is
    not behind the times.
    """

    summary = "chooses for each request and step among drafters, or none, by what they gain"

    Options = AutoOptions

    @classmethod
    def fit(cls, context: DraftContext) -> Fit:
        """What the drafters hold together from which it chooses when none are named."""
        target = context.target
        copies = any(config.options.get("quantization") for config in _usual(context))
        parts = [validate(config)[0].fit(context) for config in _usual(context)]
        return Fit(
            weight_bytes=None
            if copies and target is None
            else target.num_parameters
            if copies and target
            else 0,
            grows_with="; ".join(part.grows_with for part in parts if part.grows_with),
        )

    def __init__(self, options: AutoOptions, context: DraftContext) -> None:
        super().__init__(options, context, options.configs() or _usual(context))
        self.asked: list[Asking] = []
        """What the last proposals took, drafter by drafter."""
        self.found: dict[int, Proposal] = {}
        """Sequence id to what a lookup that was asked first guessed the last time, taken or not."""
        self._most = [member.drafter.max_nodes() for member in self.members]
        self._learns = [type(member.drafter).observe is not Drafter.observe for member in self.members]
        self._listens = any(
            learns and member.drafter.observes_all
            for learns, member in zip(self._learns, self.members, strict=True)
        )
        """Whether some drafter learns from the text though it was not asked."""
        self._open: dict[int, tuple[int, Proposal, int]] = {}
        """The member that was asked for a sequence, what it proposed, and the text's length then."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        answers = self.ask_chosen(
            [(sequence, budget, FIRST) for sequence, budget in zip(sequences, budgets, strict=True)]
        )
        return [answers.get(sequence.id, EMPTY_PROPOSAL) for sequence in sequences]

    def ask_chosen(self, wishes: Seq[Wish]) -> dict[int, Proposal]:
        """Sequence id to proposal; absent where nobody was asked. Raises nothing: each drafter is guarded."""
        self.asked, self.found = [], {}
        proposals: dict[int, Proposal] = {}
        first: dict[int, list[Wish]] = {}
        then: dict[int, list[Wish]] = {}
        for wish in wishes:
            selection = wish[2]
            if selection.lookup is not None:
                first.setdefault(selection.lookup, []).append(wish)
            elif selection.member is not None:
                then.setdefault(selection.member, []).append(wish)
        for number, asking in sorted(first.items()):
            answers = self._ask(number, asking, [budget for _, budget, _ in asking])
            for wish in asking:
                sequence, _, selection = wish
                proposal = self.found[sequence.id] = answers.get(sequence.id, EMPTY_PROPOSAL)
                if len(proposal) >= selection.min_tokens:
                    proposals[sequence.id] = proposal
                    continue
                self._open.pop(sequence.id, None)
                if selection.member is not None:
                    then.setdefault(selection.member, []).append(wish)
        for number, asking in sorted(then.items()):
            budgets = [
                budget if selection.budget is None else min(selection.budget, budget)
                for _, budget, selection in asking
            ]
            proposals |= self._ask(number, asking, budgets)
        return proposals

    def _ask(self, number: int, wishes: Seq[Wish], limits: Seq[int]) -> dict[int, Proposal]:
        """One drafter's proposals, by sequence id, for those whom it serves."""
        member, most = self.members[number], self._most[number]
        sequences, budgets = [wish[0] for wish in wishes], [min(limit, most) for limit in limits]
        if member.num_failures:
            served = [member.serves(sequence) for sequence in sequences]
            sequences, budgets = list(compress(sequences, served)), list(compress(budgets, served))
            if not sequences:
                return {}
        started_s = time.perf_counter()
        answers = member.ask(sequences, budgets)
        self.asked.append(Asking(number, sequences, budgets, time.perf_counter() - started_s))
        proposals: dict[int, Proposal] = {}
        for sequence, proposal in zip(sequences, answers, strict=True):
            self._open[sequence.id] = number, proposal, len(sequence.token_ids)
            proposals[sequence.id] = proposal
        return proposals

    def drafted_by(self, sequence: Sequence) -> int | None:
        """Who was asked for the sequence's last proposal, until it is observed; None where nobody was."""
        made = self._open.get(sequence.id) if self._open else None
        return None if made is None else made[0]

    def observe(self, observations: Seq[Observation]) -> None:
        if not self._open and not self._listens:
            return
        opened = [self._open.pop(seen.sequence.id, None) for seen in observations]
        for number, member in enumerate(self.members):
            if not self._learns[number]:
                continue
            everyone = member.drafter.observes_all
            shares = [
                _share(number, seen, made)
                for seen, made in zip(observations, opened, strict=True)
                if everyone or (made is not None and made[0] == number)
            ]
            member.observe(shares)

    def release(self, sequence: Sequence) -> None:
        self._open.pop(sequence.id, None)
        self.found.pop(sequence.id, None)
        self.asked = []
        super().release(sequence)

    def num_held(self) -> int:
        return max(super().num_held(), len(self._open))


def _usual(context: DraftContext) -> list[SpeculativeConfig]:
    """What needs no draft model."""
    found = [SpeculativeConfig("suffix")]
    if context.device.type == "cpu" and context.engine_config.quantization is None:
        found.append(SpeculativeConfig("layer_skip", options={"quantization": "int8"}))
    return found


def _share(number: int, seen: Observation, made: tuple[int, Proposal, int] | None) -> Observation:
    """What one drafter is to learn: of its own guesses, or of the text alone."""
    if made is not None and made[0] == number:
        return seen if seen.proposal is made[1] else share_of(seen, made[1], made[2])
    return Observation(seen.sequence, EMPTY_PROPOSAL, 0, seen.logits[:1], seen.num_before)
