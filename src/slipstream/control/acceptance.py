"""How many draft tokens are accepted: by drafter, task, length of the text and request, each the prior of the next.

Nothing here looks at the tokens of the draft at hand: what is decided from it never depends on what was drawn, which
the classical verifiers demand (the non-anticipation rule).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from slipstream.control.types import MAX_TASKS
from slipstream.core.bounded import BoundedDict

PRIOR = 0.75
"""Conditional acceptance of a drafter of which nothing is known."""
DRAFTER_PRIOR, TASK_PRIOR, LENGTH_PRIOR, REQUEST_PRIOR = 12.0, 12.0, 12.0, 8.0
"""How many drafts the level above is worth."""
DRAFTER_MEMORY, TASK_MEMORY, REQUEST_MEMORY = 600.0, 400.0, 60.0
"""Drafts after which an old one weighs 1/e."""
EVIDENCE = 6.0
"""Logarithm of a likelihood ratio from which on acceptance is taken to have changed: what was learned before is then
dropped, because where little is drafted it would take long to outweigh it."""
SHIFT = 7.0
"""By what factor the odds of the first token must have changed for a change to be worth noticing."""
LENGTHS = (1024, 4096, 16384)
"""Tokens of a text from which on it is among the longer ones: heads that were trained on short texts draft poorly
behind long ones."""
MIN_DRAFTS = 10.0
"""Drafts without which there is nothing to compare with."""
KEPT = 2.0
"""Drafts that the dropped ones then weigh together."""


@dataclass(slots=True)
class Drafts:
    """What became of some drafts, added up."""

    number: int = 0
    checked: int = 0
    accepted: int = 0
    reached_at: list[int] = field(default_factory=list)
    """Entry i: drafts that had a token at position i + 1 below an accepted path."""
    accepted_at: list[int] = field(default_factory=list)

    def add(self, num_checked: int, num_reached: int, num_accepted: int) -> None:
        """One draft of `num_checked` tokens, of which the path to the first `num_reached` was looked at; one more than
        there are where the drafter ended its chain before the depth that was requested."""
        if not num_accepted <= num_reached <= num_checked + 1:
            raise ValueError(
                f"{num_accepted} accepted, {num_reached} reached and {num_checked} checked cannot be"
            )
        self.number += 1
        self.checked += num_checked
        self.accepted += num_accepted
        if len(self.reached_at) < num_reached:
            more = [0] * (num_reached - len(self.reached_at))
            self.reached_at += more
            self.accepted_at += more
        for position in range(num_accepted):
            self.reached_at[position] += 1
            self.accepted_at[position] += 1
        if num_reached > num_accepted:
            self.reached_at[num_accepted] += 1


@dataclass(slots=True)
class Counts:
    """Decayed counts of drafts: tokens checked and accepted, and for chains reached and accepted by position."""

    memory: float
    drafts: float = 0.0
    checked: float = 0.0
    accepted: float = 0.0
    reached_at: list[float] = field(default_factory=list)
    accepted_at: list[float] = field(default_factory=list)
    better: float = 0.0
    """Evidence that the first token is accepted more often than it was."""
    worse: float = 0.0

    def learn(self, drafts: Drafts) -> bool:
        """Some drafts, of about the same age; True where they show that acceptance has changed."""
        keep = (1.0 - 1.0 / self.memory) ** drafts.number
        changed = self._changed(drafts)
        if changed:
            self.forget()
        self.drafts = self.drafts * keep + drafts.number
        self.checked = self.checked * keep + drafts.checked
        self.accepted = self.accepted * keep + drafts.accepted
        more = [0.0] * (len(drafts.reached_at) - len(self.reached_at))
        # All positions fade alike, so that one that has not been drafted for long is expected to be as the one before.
        self.reached_at = [reached * keep for reached in self.reached_at] + more
        self.accepted_at = [accepted * keep for accepted in self.accepted_at] + more
        for position, reached in enumerate(drafts.reached_at):
            self.reached_at[position] += reached
            self.accepted_at[position] += drafts.accepted_at[position]
        return changed

    def forget(self) -> None:
        """What was learned says little of what comes."""
        keep = KEPT / max(self.drafts, KEPT)
        self.drafts, self.checked, self.accepted = (
            self.drafts * keep,
            self.checked * keep,
            self.accepted * keep,
        )
        self.reached_at = [reached * keep for reached in self.reached_at]
        self.accepted_at = [accepted * keep for accepted in self.accepted_at]

    def _changed(self, drafts: Drafts) -> bool:
        """Whether the recent drafts, these included, are of another kind than those before (Page's CUSUM test)."""
        if not drafts.reached_at or not self.reached_at or self.reached_at[0] < MIN_DRAFTS:
            return False
        odds = (self.accepted_at[0] + 0.5) / (self.reached_at[0] - self.accepted_at[0] + 0.5)
        accepted = drafts.accepted_at[0]
        rejected = drafts.reached_at[0] - accepted
        self.better = max(0.0, self.better + _evidence(odds, odds * SHIFT, accepted, rejected))
        self.worse = max(0.0, self.worse + _evidence(odds, odds / SHIFT, accepted, rejected))
        changed = max(self.better, self.worse) > EVIDENCE
        if changed:
            self.better = self.worse = 0.0
        return changed

    def conditional(self, position: int, prior: float, weight: float) -> float:
        """Acceptance at `position`, from 0, of the drafts that came so far, shrunk towards `prior`."""
        if position >= len(self.reached_at):
            return prior
        return (self.accepted_at[position] + weight * prior) / (self.reached_at[position] + weight)

    def per_draft(self, prior: tuple[float, float], weight: float) -> tuple[float, float]:
        """Tokens accepted and tokens checked a draft, shrunk towards `prior`."""
        total = self.drafts + weight
        return (self.accepted + weight * prior[0]) / total, (self.checked + weight * prior[1]) / total


def _evidence(odds: float, other: float, accepted: int, rejected: int) -> float:
    """Log-likelihood ratio of `other` odds against `odds`."""
    return accepted * math.log(other / odds) + (accepted + rejected) * math.log((1 + odds) / (1 + other))


def length_class(length: int) -> int:
    """How long a text of `length` tokens is: 0 for one below the first of `LENGTHS`."""
    return bisect_right(LENGTHS, length)


class Acceptance:
    """What one drafter's drafts are worth.

    Of a chain, whose length is chosen, it estimates *survival*: the chance that a token and all before it are accepted.
    Of a tree or a lookup, whose size is not, the tokens that a draft yields and those that it has the target check.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._all = Counts(DRAFTER_MEMORY)
        self._tasks = BoundedDict[str, Counts](MAX_TASKS)
        self._lengths = BoundedDict[tuple[str, int], Counts](MAX_TASKS * (len(LENGTHS) + 1))
        """By task and class of length."""
        self._requests: dict[int, tuple[tuple[str, int], Counts]] = {}
        """With their tasks and classes of length."""

    def learn(self, sequence_id: int, task: str, drafts: Drafts, length: int = 0) -> bool:
        """What became of the drafts, some perhaps empty, of a request whose text has `length` tokens; True where the
        acceptance of its task's texts of such a length has changed."""
        self._all.learn(drafts)
        kind = task, length_class(length)
        known = self._requests.get(sequence_id)
        mine = Counts(REQUEST_MEMORY) if known is None else known[1]
        self._requests[sequence_id] = kind, mine
        mine.learn(drafts)
        of_length = self._lengths.touch(kind, lambda: Counts(TASK_MEMORY))
        is_new = of_length.drafts < MIN_DRAFTS
        changed = self._tasks.touch(task, lambda: Counts(TASK_MEMORY)).learn(drafts)
        own_changed = of_length.learn(drafts)
        if not is_new:  # a task's acceptance also changes as its texts are long and short in turn
            changed = own_changed
        if changed:
            for number, (its_kind, counts) in self._requests.items():
                if its_kind == kind and number != sequence_id:
                    counts.forget()
        return changed

    def survival(self, sequence_id: int, task: str, length: int = 0) -> list[float]:
        """The chance that a chain for this request is accepted down to position 1, 2, … `max_depth`."""
        levels = self._levels(sequence_id, task, length)
        chances: list[float] = []
        above, rate = 1.0, PRIOR
        for position in range(self.max_depth):
            estimate = rate  # what is known of a position is the prior of the next one
            for counts, weight in levels:
                estimate = counts.conditional(position, estimate, weight)
                if counts is self._all:
                    rate = estimate
            above *= estimate
            chances.append(above)
        return chances

    def per_draft(self, sequence_id: int, task: str, length: int = 0) -> tuple[float, float]:
        """Tokens accepted, and tokens checked, that a whole draft for this request comes to; empty drafts included."""
        levels = float(min(self.max_depth, 4))
        estimate = sum(PRIOR**depth for depth in range(1, int(levels) + 1)), levels
        for counts, weight in self._levels(sequence_id, task, length):
            estimate = counts.per_draft(estimate, weight)
        return estimate

    def knows(self, sequence_id: int) -> bool:
        """Whether anything was drafted for the request itself."""
        return sequence_id in self._requests

    def num_drafts(self, sequence_id: int, task: str) -> tuple[float, float]:
        """How much is known: drafts of the request and of its task, old ones counted less."""
        request, of_task = self._requests.get(sequence_id), self._tasks.get(task)
        return 0.0 if request is None else request[1].drafts, 0.0 if of_task is None else of_task.drafts

    def rate(self, task: str | None = None) -> float | None:
        """Recent pooled α of a task, or of all; None before anything was checked."""
        counts = self._all if task is None else self._tasks.get(task)
        return None if counts is None or counts.checked <= 0 else counts.accepted / counts.checked

    def release(self, sequence_id: int) -> None:
        """Forget a request; what its task learned stays."""
        self._requests.pop(sequence_id, None)

    @property
    def num_held(self) -> int:
        """Requests that are remembered."""
        return len(self._requests)

    def _levels(self, sequence_id: int, task: str, length: int) -> list[tuple[Counts, float]]:
        """From the general to the particular, with the weight of what each is shrunk towards."""
        levels = [(self._all, DRAFTER_PRIOR)]
        if (of_task := self._tasks.get(task)) is not None:
            levels.append((of_task, TASK_PRIOR))
        lengths = [self._lengths.get((task, each)) for each in range(len(LENGTHS) + 1)]
        of_length = lengths[length_class(length)]
        if of_length is not None and sum(each is not None for each in lengths) > 1:
            levels.append((of_length, LENGTH_PRIOR))  # of one length alone its task says the same
        if (request := self._requests.get(sequence_id)) is not None:
            levels.append((request[1], REQUEST_PRIOR))
        return levels


BUCKETS = (0, 1, 2, 4, 8, 16)
"""Lengths of a lookup's proposal from which on it counts for the next bucket: 0, 1, 2 to 3, 4 to 7, …"""
BUCKET_PRIOR = 4.0
"""Proposals that the level above, and the bucket before, is worth."""


class _ByLength:
    """Decayed counts of a lookup's proposals, by bucket of their length."""

    def __init__(self, memory: float) -> None:
        self._growth = 1.0 / (1.0 - 1.0 / memory)
        self._weight = 1.0
        """Weight of the next proposal: what comes counts more, instead of fading what is there."""
        self._number, self._checked, self._accepted = ([0.0] * len(BUCKETS) for _ in range(3))

    def learn(self, length: int, num_accepted: int) -> None:
        bucket = bucket_of(length)
        self._weight *= self._growth
        self._number[bucket] += self._weight
        self._checked[bucket] += self._weight * length
        self._accepted[bucket] += self._weight * num_accepted
        if self._weight > 1e9:
            for counts in (self._number, self._checked, self._accepted):
                counts[:] = [count / self._weight for count in counts]
            self._weight = 1.0

    @property
    def number(self) -> list[float]:
        return [count / self._weight for count in self._number]

    @property
    def checked(self) -> list[float]:
        return [count / self._weight for count in self._checked]

    @property
    def accepted(self) -> list[float]:
        return [count / self._weight for count in self._accepted]


_NOTHING_FOUND = _ByLength(TASK_MEMORY)
"""Counts of an unknown task."""


def bucket_of(length: int) -> int:
    """The bucket that a proposal of `length` tokens counts for."""
    return bisect_right(BUCKETS, length) - 1


class LookupYield:
    """What a lookup's proposals are worth by their length, which says how much of the text was found again.

    A proposal is there before it is decided whether to check it, and it is no random draw, so its length may decide.
    """

    def __init__(self) -> None:
        self._all = _ByLength(DRAFTER_MEMORY)
        self._tasks = BoundedDict[str, _ByLength](MAX_TASKS)

    def learn(self, task: str, length: int, num_accepted: int) -> None:
        """One proposal of `length` tokens; 0 where nothing was found."""
        self._all.learn(length, num_accepted)
        self._tasks.touch(task, lambda: _ByLength(TASK_MEMORY)).learn(length, num_accepted)

    def rates(self, task: str) -> list[float]:
        """Return, by bucket, the share of a proposal that is accepted."""
        levels = [
            (counts.number, counts.checked, counts.accepted)
            for counts in (self._all, self._tasks.get(task, _NOTHING_FOUND))
        ]
        rates = [0.0]
        rate = PRIOR
        for bucket in range(1, len(BUCKETS)):
            for number, checked, accepted in levels:
                # A bucket's numbers are tokens; a proposal counts as one, however long it is.
                seen = number[bucket] * accepted[bucket] / max(checked[bucket], 1e-9)
                rate = (seen + BUCKET_PRIOR * rate) / (number[bucket] + BUCKET_PRIOR)
            rates.append(rate)
        return rates

    def shares(self, task: str) -> list[float]:
        """Return how often a proposal falls into each bucket; a task that is little known takes the others' values into
        account."""
        of_task = self._tasks.get(task, _NOTHING_FOUND)
        of_all = _shares(self._all.number, [1 / len(BUCKETS)] * len(BUCKETS))
        return _shares(of_task.number, of_all)

    def lengths(self, task: str) -> list[float]:
        """Return, by bucket, the mean length of a proposal."""
        of_task = self._tasks.get(task, _NOTHING_FOUND)
        return [
            (checked + BUCKET_PRIOR * first) / (number + BUCKET_PRIOR)
            for checked, number, first in zip(of_task.checked, of_task.number, BUCKETS, strict=True)
        ]


def _shares(counts: list[float], prior: list[float]) -> list[float]:
    total = sum(counts) + BUCKET_PRIOR
    return [(count + BUCKET_PRIOR * share) / total for count, share in zip(counts, prior, strict=True)]
