"""What was decided, and for how long."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.control.choice import MAX_TASKS, Asked
from slipstream.draft.choice import NOTHING, Choice

SAME_LOAD = 0.2
"""A plan is for as many requests as it was made for, and for others by no more than this part."""


@dataclass(slots=True)
class Standing:
    """A plan that holds, for the requests it was made for and for those that come after them."""

    usual: Choice
    """For a request of a task that was in no plan yet: as most are drafted for."""
    held_s: float
    """How long it must still hold."""
    until_s: float = math.inf
    """When it is too old to hold again, on the clock of all steps."""
    num_requests: int = 0
    """Of the step that it was made for."""
    beside_prompts: bool = False
    """Made for steps that compute prompts too, where a pass is full and each draft token costs more."""
    is_nothing: bool = False
    """Nobody is drafted for."""
    gain: float | None = None
    """Estimated speedup."""
    undrafted_rate: float = 0.0
    """Tokens a second with lookups alone, by estimate."""
    drafts_gain: float = 1.0
    """The part of the estimated speedup that is not the lookups'."""
    withheld: Standing | None = None
    """What would be done, where nothing is because drafts measurably lose."""
    of_task: dict[str, Choice] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)
    """The estimated speedup by task: of its requests, in the plan that had some of them."""
    chosen: dict[int, Choice] = field(default_factory=dict)
    """By sequence."""

    def choice(self, sequence_id: int, task: str) -> Choice:
        return self.chosen.get(sequence_id) or self.of_task.get(task, self.usual)

    def is_for(self, num_requests: int, beside_prompts: bool) -> bool:
        """False where it was made for another load."""
        if beside_prompts != self.beside_prompts:
            return False
        return abs(num_requests - self.num_requests) <= SAME_LOAD * max(num_requests, self.num_requests)

    def take_over(self, other: Standing) -> None:
        """Where this one has no word on a task, let the other's hold."""
        older = {task: choice for task, choice in self.of_task.items() if task not in other.of_task}
        newer = {task: self.of_task.get(task, choice) for task, choice in other.of_task.items()}
        gains = other.gains | self.gains
        self.of_task = _last_ones(older | newer)
        self.gains = {task: gains[task] for task in self.of_task}

    def withhold(self, asked: Seq[Asked]) -> Standing:
        """A plan for the same steps that does nothing, and keeps this one."""
        rest = Standing(
            NOTHING, 0.0, math.inf, self.num_requests, self.beside_prompts, gain=1.0, withheld=self
        )
        rest.undrafted_rate = self.undrafted_rate
        rest.decide(asked, [NOTHING] * len(asked), [1.0] * len(asked))
        return rest

    def decide(self, asked: Seq[Asked], choices: Seq[Choice], gains: Seq[float]) -> None:
        """Keep the choices and the estimated speedups of requests."""
        self.chosen = {request.sequence_id: choice for request, choice in zip(asked, choices, strict=True)}
        self.usual = _most_common(choices)
        votes: dict[str, list[Choice]] = {}
        by_task: dict[str, list[float]] = {}
        for request, choice, gain in zip(asked, choices, gains, strict=True):
            votes.setdefault(request.task, []).append(choice)
            by_task.setdefault(request.task, []).append(gain)
        for task, given in votes.items():
            self.of_task.pop(task, None)
            self.of_task[task] = _most_common(given)
            self.gains[task] = sum(by_task[task]) / len(by_task[task])
        self.of_task = _last_ones(self.of_task)
        self.gains = {task: self.gains[task] for task in self.of_task}


def load_level(num_requests: int) -> int:
    """Loads of one level differ by no more than a tenth or so."""
    return int(8 * math.log2(num_requests))


def _last_ones(of_task: dict[str, Choice]) -> dict[str, Choice]:
    return of_task if len(of_task) <= MAX_TASKS else dict(list(of_task.items())[-MAX_TASKS:])


def _most_common(choices: Seq[Choice]) -> Choice:
    """The one that was made most often; of several the first."""
    return Counter(choices).most_common(1)[0][0]
