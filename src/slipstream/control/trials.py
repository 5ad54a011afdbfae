"""Trials: one request gets a drafter that the plan does not give it, for a few steps, which keeps its acceptance and
costs known.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.control.types import MAX_TASKS, Choice, StepRequest
from slipstream.core.bounded import BoundedDict

NUM_TRIAL_STEPS = 3
"""Steps of a trial, each of one level: the first token says the most for its price."""
MAX_TRIAL_STEPS = 12
"""Steps of a trial that goes on."""
SURPRISE = 0.3
"""By how much more must be accepted than expected for a trial to go on."""


class Trials:
    """One request at a time is given a drafter that the plan does not give it. A trial in which much more is accepted
    than expected goes on: a change is then found within one trial instead of several."""

    def __init__(self) -> None:
        self._sequence_id: int | None = None
        self._choices: list[Choice] = []
        """Choices for the steps to come, the last one first."""
        self._given: Choice | None = None
        """In this step."""
        self._num_drafts = self._num_accepted = 0
        """Drafts of the trial, and those of which a token was accepted."""
        self._last = BoundedDict[tuple[str, int], int](MAX_TASKS)
        """Task and drafter to the step of the last trial."""

    @property
    def under_way(self) -> bool:
        return bool(self._choices)

    def age(self, task: str, drafter: int, step: int) -> int:
        """Steps since the drafter was tried for the task."""
        return step - self._last.get((task, drafter), -1000)

    def begin(self, request: StepRequest, choices: Seq[Choice], step: int) -> None:
        """Let a request have a choice a step."""
        self._sequence_id, self._choices = request.sequence_id, list(choices)[::-1]
        self._num_drafts = self._num_accepted = 0
        self._last[request.task, choices[0].drafter] = step

    def choice(self, requests: Seq[StepRequest]) -> tuple[int, Choice] | None:
        """In a step while one is under way: the place of its request, and its choice."""
        self._given = None
        if not self._choices:
            return None
        place = next((i for i, each in enumerate(requests) if each.sequence_id == self._sequence_id), None)
        if place is None:
            self._choices = []
            return None
        self._given = self._choices.pop()
        return place, self._given

    def outcome(self, outcomes: Seq[StepRequest]) -> StepRequest | None:
        """What this step's trial came to, if there was one."""
        given = self._given
        if given is None:
            return None
        found = (o for o in outcomes if o.sequence_id == self._sequence_id and o.drafter == given.drafter)
        return next(found, None)

    def goes_on(self, outcome: StepRequest, expected: float) -> bool:
        """After a step: whether a trial that was over goes on. `expected` is the chance that a first token is accepted
        by what is known."""
        self._num_drafts += 1
        self._num_accepted += outcome.num_accepted > 0
        share = self._num_accepted / self._num_drafts
        if self._choices or self._given is None or self._num_drafts >= MAX_TRIAL_STEPS:
            return False
        if share < expected + SURPRISE:
            return False
        self._choices = [self._given] * NUM_TRIAL_STEPS
        return True
