"""What is decided for the requests of a step, and kept until it is decided anew."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.control.acceptance import length_class
from slipstream.control.fixed import FixedPlan
from slipstream.control.types import MAX_TASKS, NO_DRAFTER, NOTHING, Choice, StepRequest
from slipstream.core.bounded import BoundedDict

MAX_AGE = 384
"""Steps after which a plan is searched anew, whatever the time that searches took."""


@dataclass(slots=True)
class Plan:
    """What is done at one load, for the requests that it was made for and for those that come after them."""

    usual: Choice = NOTHING
    """For a task that is unknown: as most are drafted for."""
    by_sequence: dict[int, Choice] = field(default_factory=dict)
    by_task: BoundedDict[str, Choice] = field(default_factory=lambda: BoundedDict(MAX_TASKS))
    by_length: BoundedDict[tuple[str, int], Choice] = field(default_factory=lambda: BoundedDict(MAX_TASKS))
    """By task and class of the text's length."""
    gains: BoundedDict[str, float] = field(default_factory=lambda: BoundedDict(MAX_TASKS))
    """Task to estimated speedup."""
    gain: float | None = None
    """Estimated speedup."""
    searched_at: int = -MAX_AGE
    """Step."""
    undrafted_rate: float = 0.0
    """Estimated tokens a second with its lookups alone."""
    drafts_gain: float = 1.0
    """The part of the estimated speedup that is not the lookups'."""
    drafts: bool = False
    """Some request of the step is drafted for, unless withheld."""
    withheld: bool = False
    """Nothing is drafted, because drafts measurably lose at this load."""

    def choice(self, request: StepRequest) -> Choice:
        """By request, then by task and length, then by task, then as usual; what a request was given it keeps as long
        as the plan holds."""
        found = self.by_sequence.get(request.sequence_id)
        if found is None:
            found = self.by_sequence[request.sequence_id] = self.for_task(request.task, request.length)
        return found

    def choices(self, requests: Seq[StepRequest]) -> list[Choice]:
        """The choice for each request, cut to what the request may have."""
        return [bounded(self.choice(request), request) for request in requests]

    def at(self, num_requests: int) -> Plan:
        """What holds for a step of so many requests."""
        return self

    def for_task(self, task: str, length: int = 0) -> Choice:
        """For a request that the plan was not made for, whose text has `length` tokens."""
        of_length = self.by_length.get((task, length_class(length)))
        return self.by_task.get(task, self.usual) if of_length is None else of_length


class PlanByRules(Plan):
    """What given rules say; nothing is learned."""

    __slots__ = ("_num_requests", "_rules")

    def __init__(self, rules: FixedPlan) -> None:
        super().__init__(drafts=True)
        self._rules, self._num_requests = rules, 1

    def at(self, num_requests: int) -> Plan:
        self._num_requests = num_requests
        return self

    def choice(self, request: StepRequest) -> Choice:
        return self.for_task(request.task)

    def for_task(self, task: str, length: int = 0) -> Choice:
        return self._rules.choice(task, self._num_requests)


def load_bucket(num_requests: int) -> int:
    """Loads that share a plan differ by less than a fifth."""
    return int(4 * math.log2(num_requests))


def plan_key(num_requests: int, num_prompt_rows: int) -> tuple[int, bool]:
    """Under which a plan is kept: steps that compute prompts too have plans of their own."""
    return load_bucket(max(num_requests, 1)), num_prompt_rows > 0


def bounded(choice: Choice, request: StepRequest) -> Choice:
    """What of a choice the request may have."""
    drafter, depth, lookup, min_tokens = choice
    limit, allowed = request.limit, request.allowed
    if (allowed is None and limit >= depth and limit >= min_tokens) or not choice.drafts:
        return choice if limit > 0 else NOTHING
    if limit < 1 or (drafter != NO_DRAFTER and allowed is not None and drafter not in allowed):
        drafter = NO_DRAFTER
    if limit < min_tokens or (lookup != NO_DRAFTER and allowed is not None and lookup not in allowed):
        lookup, min_tokens = NO_DRAFTER, 0
    if limit < 1 or drafter == lookup == NO_DRAFTER:
        return NOTHING
    return Choice(drafter, min(depth, limit) if drafter != NO_DRAFTER else 0, lookup, min_tokens)


def most_common(choices: Seq[Choice]) -> Choice:
    """The one that was made most often; of several the first."""
    return Counter(choices).most_common(1)[0][0]
