"""How many draft tokens stand: by drafter, by task and by request, each the first guess for the next.

Nothing here looks at the tokens of the draft at hand: what is decided from it never depends on what was drawn, which
the classical verifiers demand (the non-anticipation rule).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field

FIRST_GUESS = 0.6
"""Conditional acceptance of a drafter of which nothing is known."""
DRAFTER_PRIOR, TASK_PRIOR, REQUEST_PRIOR = 12.0, 12.0, 8.0
"""How many drafts the level above is worth."""
DRAFTER_MEMORY, TASK_MEMORY, REQUEST_MEMORY = 600.0, 400.0, 60.0
"""Drafts after which an old one weighs 1/e."""
SURPRISE = 6.0
"""Evidence, in logarithms of a likelihood ratio, that drafts do better or worse than before: then what was before is
forgotten, because where little is drafted it would take long to outweigh it."""
SHIFT = 7.0
"""By what factor the odds of the first token must have changed for a change to be worth noticing."""
FEW = 10.0
"""Drafts without which there is no before."""
KEPT = 2.0
"""Drafts that the forgotten ones then weigh together."""
MAX_TASKS = 256
"""Of one drafter; the one that was used the longest time ago makes room."""


@dataclass(slots=True)
class Drafts:
    """What became of some drafts, added up."""

    number: int = 0
    checked: int = 0
    accepted: int = 0
    looks_at: list[int] = field(default_factory=list)
    """Entry i: drafts that had a token at position i + 1 below an accepted path."""
    accepted_at: list[int] = field(default_factory=list)

    def add(self, num_checked: int, num_reached: int, num_accepted: int) -> None:
        """One draft of `num_checked` tokens, of which the path to the first `num_reached` was looked at; one more than
        there are where the drafter ended its chain before the depth that was asked for."""
        if not num_accepted <= num_reached <= num_checked + 1:
            raise ValueError(
                f"{num_accepted} accepted, {num_reached} reached and {num_checked} checked cannot be"
            )
        self.number += 1
        self.checked += num_checked
        self.accepted += num_accepted
        if len(self.looks_at) < num_reached:
            more = [0] * (num_reached - len(self.looks_at))
            self.looks_at += more
            self.accepted_at += more
        for position in range(num_accepted):
            self.looks_at[position] += 1
            self.accepted_at[position] += 1
        if num_reached > num_accepted:
            self.looks_at[num_accepted] += 1


def _evidence(odds: float, other: float, stood: int, fell: int) -> float:
    """Log-likelihood ratio of `other` odds against `odds`."""
    return stood * math.log(other / odds) + (stood + fell) * math.log((1 + odds) / (1 + other))


@dataclass(slots=True)
class Counts:
    """Decayed counts of drafts: tokens checked and accepted, and for chains looks and acceptances by position."""

    memory: float
    drafts: float = 0.0
    checked: float = 0.0
    accepted: float = 0.0
    looks_at: list[float] = field(default_factory=list)
    """Entry i: drafts that had a token at position i + 1 below an accepted path."""
    accepted_at: list[float] = field(default_factory=list)
    better: float = 0.0
    """Evidence that the first token stands more often than it did."""
    worse: float = 0.0

    def learn(self, drafts: Drafts) -> None:
        """Some drafts, of about the same age."""
        keep = (1.0 - 1.0 / self.memory) ** drafts.number
        if self._surprised_by(drafts):
            keep *= KEPT / max(self.drafts, KEPT)
        self.drafts = self.drafts * keep + drafts.number
        self.checked = self.checked * keep + drafts.checked
        self.accepted = self.accepted * keep + drafts.accepted
        while len(self.looks_at) < len(drafts.looks_at):
            self.looks_at.append(0.0)
            self.accepted_at.append(0.0)
        # All positions fade alike, so that one that has not been tried for long is thought of as the one before it.
        self.looks_at = [looks * keep for looks in self.looks_at]
        self.accepted_at = [accepted * keep for accepted in self.accepted_at]
        for position, looks in enumerate(drafts.looks_at):
            self.looks_at[position] += looks
            self.accepted_at[position] += drafts.accepted_at[position]

    def _surprised_by(self, drafts: Drafts) -> bool:
        """Whether the recent drafts, these included, are of another kind than those before (Page's CUSUM test)."""
        if not drafts.looks_at or not self.looks_at:
            return False
        if self.looks_at[0] < FEW:
            return False
        odds = (self.accepted_at[0] + 0.5) / (self.looks_at[0] - self.accepted_at[0] + 0.5)
        stood = drafts.accepted_at[0]
        fell = drafts.looks_at[0] - stood
        self.better = max(0.0, self.better + _evidence(odds, odds * SHIFT, stood, fell))
        self.worse = max(0.0, self.worse + _evidence(odds, odds / SHIFT, stood, fell))
        surprised = max(self.better, self.worse) > SURPRISE
        if surprised:
            self.better = self.worse = 0.0
        return surprised

    def conditional(self, position: int, prior: float, weight: float) -> float:
        """Acceptance at `position`, from 0, of the drafts that came so far, shrunk towards `prior`."""
        if position >= len(self.looks_at):
            return prior
        return (self.accepted_at[position] + weight * prior) / (self.looks_at[position] + weight)

    def per_draft(self, prior: tuple[float, float], weight: float) -> tuple[float, float]:
        """Tokens accepted and tokens checked a draft, shrunk towards `prior`."""
        total = self.drafts + weight
        return (self.accepted + weight * prior[0]) / total, (self.checked + weight * prior[1]) / total


class Acceptance:
    """What one drafter's guesses are worth.

    Of a chain, whose length is chosen, it estimates *survival*: the chance that a token stands and all before it. Of a
    tree or a lookup, which is taken as it comes, the tokens that a draft yields and those that it has the target check.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._all = Counts(DRAFTER_MEMORY)
        self._tasks: OrderedDict[str, Counts] = OrderedDict()
        self._requests: dict[int, Counts] = {}

    def learn(self, sequence_id: int, task: str, drafts: Drafts) -> None:
        """What became of a request's drafts; some may have been empty."""
        request = self._requests.get(sequence_id)
        if request is None:
            request = self._requests[sequence_id] = Counts(REQUEST_MEMORY)
        for counts in (self._all, self._task(task), request):
            counts.learn(drafts)

    def survival(self, sequence_id: int, task: str) -> list[float]:
        """The chance that a chain for this request stands down to position 1, 2, … `max_depth`."""
        levels = self._levels(sequence_id, task)
        chances: list[float] = []
        above, rate = 1.0, FIRST_GUESS
        for position in range(self.max_depth):
            # What is known of a position is the first guess for the next one.
            estimate = rate
            for counts, weight in levels:
                estimate = counts.conditional(position, estimate, weight)
                if counts is self._all:
                    rate = estimate
            above *= estimate
            chances.append(above)
        return chances

    def per_draft(self, sequence_id: int, task: str) -> tuple[float, float]:
        """Tokens accepted, and tokens checked, that a whole draft for this request comes to; empty drafts included."""
        estimate = self._first_yield()
        for counts, weight in self._levels(sequence_id, task):
            estimate = counts.per_draft(estimate, weight)
        return estimate

    def knows(self, sequence_id: int) -> bool:
        """Whether anything was drafted for the request itself."""
        return sequence_id in self._requests

    def worth(self, sequence_id: int, task: str) -> tuple[list[float], tuple[float, float]]:
        """`survival` and `per_draft`."""
        return self.survival(sequence_id, task), self.per_draft(sequence_id, task)

    def num_drafts(self, sequence_id: int, task: str) -> tuple[float, float, float]:
        """How much is known: drafts of the request, of its task and of all, old ones counted less."""
        request, of_task = self._requests.get(sequence_id), self._tasks.get(task)
        return (
            0.0 if request is None else request.drafts,
            0.0 if of_task is None else of_task.drafts,
            self._all.drafts,
        )

    def rate(self, task: str | None = None) -> float | None:
        """Pooled α lately of a task, or of all; None before anything was checked."""
        counts = self._all if task is None else self._tasks.get(task)
        return None if counts is None or counts.checked <= 0 else counts.accepted / counts.checked

    def release(self, sequence_id: int) -> None:
        """Forget a request; what its task learned stays."""
        self._requests.pop(sequence_id, None)

    @property
    def num_held(self) -> int:
        """Requests that are remembered."""
        return len(self._requests)

    def _levels(self, sequence_id: int, task: str) -> list[tuple[Counts, float]]:
        """From the general to the particular, with the weight of what each is shrunk towards."""
        levels = [(self._all, DRAFTER_PRIOR)]
        if (of_task := self._tasks.get(task)) is not None:
            levels.append((of_task, TASK_PRIOR))
        if (request := self._requests.get(sequence_id)) is not None:
            levels.append((request, REQUEST_PRIOR))
        return levels

    def _first_yield(self) -> tuple[float, float]:
        """A guess for trees and lookups: as a chain of `FIRST_GUESS` would do."""
        accepted = sum(FIRST_GUESS**depth for depth in range(1, min(self.max_depth, 4) + 1))
        return accepted, float(min(self.max_depth, 4))

    def _task(self, task: str) -> Counts:
        counts = self._tasks.get(task)
        if counts is None:
            counts = self._tasks[task] = Counts(TASK_MEMORY)
            if len(self._tasks) > MAX_TASKS:
                self._tasks.popitem(last=False)
        self._tasks.move_to_end(task)
        return counts


BUCKETS = (0, 1, 2, 4, 8, 16)
"""Lengths of a lookup's guess from which on it counts for the next bucket: 0, 1, 2 to 3, 4 to 7, …"""
BUCKET_PRIOR = 4.0
"""Guesses that the level above, and the bucket before, is worth."""


@dataclass(slots=True)
class _Guesses:
    """Decayed counts of a lookup's guesses, by bucket of their length."""

    number: list[float] = field(default_factory=lambda: [0.0] * len(BUCKETS))
    checked: list[float] = field(default_factory=lambda: [0.0] * len(BUCKETS))
    accepted: list[float] = field(default_factory=lambda: [0.0] * len(BUCKETS))

    def learn(self, length: int, num_accepted: int, memory: float) -> None:
        keep = 1.0 - 1.0 / memory
        for counts in (self.number, self.checked, self.accepted):
            for bucket, count in enumerate(counts):
                counts[bucket] = count * keep
        bucket = bucket_of(length)
        self.number[bucket] += 1
        self.checked[bucket] += length
        self.accepted[bucket] += num_accepted


def bucket_of(length: int) -> int:
    """The bucket that a guess of `length` tokens counts for."""
    return bisect_right(BUCKETS, length) - 1


class LookupYield:
    """What a lookup's guesses are worth by their length, which says how much of the text was found again.

    A guess is there before it is decided whether to check it, and it is no random draw, so its length may have a say.
    """

    def __init__(self) -> None:
        self._all = _Guesses()
        self._tasks: OrderedDict[str, _Guesses] = OrderedDict()

    def learn(self, task: str, length: int, num_accepted: int) -> None:
        """One guess of `length` tokens, none included."""
        of_task = self._tasks.get(task)
        if of_task is None:
            of_task = self._tasks[task] = _Guesses()
            if len(self._tasks) > MAX_TASKS:
                self._tasks.popitem(last=False)
        self._tasks.move_to_end(task)
        self._all.learn(length, num_accepted, DRAFTER_MEMORY)
        of_task.learn(length, num_accepted, TASK_MEMORY)

    def rates(self, task: str) -> list[float]:
        """By bucket, the share of a guess that stands."""
        of_task = self._tasks.get(task, _Guesses())
        rates: list[float] = []
        rate = FIRST_GUESS
        for bucket in range(1, len(BUCKETS)):
            for guesses in (self._all, of_task):
                # A bucket's numbers are tokens; a guess counts as one look, however long it is.
                looks = guesses.number[bucket]
                seen = guesses.accepted[bucket] / max(guesses.checked[bucket], 1e-9)
                rate = (looks * seen + BUCKET_PRIOR * rate) / (looks + BUCKET_PRIOR)
            rates.append(rate)
        return [0.0, *rates]

    def shares(self, task: str) -> list[float]:
        """By bucket, how often a guess falls into it; a task of which little is known borrows from the others."""
        of_task = self._tasks.get(task, _Guesses())
        of_all = _shares(self._all.number, [1 / len(BUCKETS)] * len(BUCKETS))
        return _shares(of_task.number, of_all)

    def lengths(self, task: str) -> list[float]:
        """By bucket, the mean length of a guess."""
        of_task = self._tasks.get(task, _Guesses())
        return [
            (checked + BUCKET_PRIOR * first) / (number + BUCKET_PRIOR)
            for checked, number, first in zip(of_task.checked, of_task.number, BUCKETS, strict=True)
        ]

    def num_guesses(self, task: str) -> float:
        """How much is known of a task, old guesses counted less."""
        return sum(self._tasks[task].number) if task in self._tasks else 0.0


def _shares(counts: list[float], prior: list[float]) -> list[float]:
    total = sum(counts) + BUCKET_PRIOR
    return [(count + BUCKET_PRIOR * share) / total for count, share in zip(counts, prior, strict=True)]
