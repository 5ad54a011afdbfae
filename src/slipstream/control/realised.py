"""What speculation really gains: pairs of neighbouring steps, with drafts and without."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.control.types import MAX_TASKS, Speedup, StepRequest
from slipstream.core.bounded import BoundedDict

NUM_OFF_STEPS = 4
"""Steps of a probe; the first is not counted, because it still pays for what the step before it left."""
NUM_BACK_STEPS = 9
"""Steps of a probe with drafts, where there are none otherwise. Its first pays for beginning."""
NUM_ON_STEPS = 16
"""Steps before a probe that it is compared with, at most; half of them at least."""
MAX_PAIRS = 200
"""Pairs that are kept of each task."""
MIN_PAIRS = 3
"""Fewer give no interval."""
MAX_DIFFERENCE = 0.1
"""Between the batches of a pair, as a share."""


class Step(NamedTuple):
    """One step that only decoded."""

    num_sequences: int
    seconds: float
    outcomes: Seq[StepRequest]
    """One outcome a sequence; may be empty in a step without drafts."""
    speculates: bool
    """Whether drafts were allowed: a step in which no drafter had a proposal is what speculation makes of it, too."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One probe of one task."""

    on_tokens: float
    """Tokens that a sequence gained in a step with speculation."""
    on_s: float
    """Seconds of a step with speculation."""
    off_s: float
    """And of one without, in which a sequence gains one token."""


class Realised:
    """Pairs of neighbouring steps of batches of about one size, with drafts and without, by task: neither the machine's
    mood nor the load is in their ratio."""

    def __init__(self) -> None:
        self._before: deque[Step] = deque(maxlen=NUM_ON_STEPS)
        self._probe: list[Step] = []
        self._pairs = BoundedDict[str, deque[Pair]](MAX_TASKS)
        self._all: deque[Pair] = deque(maxlen=MAX_PAIRS)

    def can_probe(self, num_sequences: int, with_drafts: bool = False) -> bool:
        """True where the steps just made give a fair comparison with a probe."""
        return len(self._fair(num_sequences, not with_drafts)) >= NUM_ON_STEPS // 2

    def learn(self, step: Step, in_probe: bool, with_drafts: bool = False) -> Pair | None:
        """One step, and whether it was part of a probe; the pair of all tasks, where it ended one."""
        if not in_probe:
            self._before.append(step)
            return None
        self._probe.append(step)
        if len(self._probe) < (NUM_BACK_STEPS if with_drafts else NUM_OFF_STEPS):
            return None
        return self._close(with_drafts)

    def give_up(self) -> None:
        """The probe cannot be finished: what ran was not what is compared."""
        self._probe = []

    def speedup(self, task: str | None = None) -> Speedup | None:
        """Return the speedup of a task, or of all; None before there are pairs enough."""
        return ratio_of(list(self._all if task is None else self._pairs.get(task, ())))

    def num_pairs(self, task: str | None = None) -> int:
        """Pairs of a task, or of all, that are kept."""
        return len(self._all if task is None else self._pairs.get(task, ()))

    def _close(self, with_drafts: bool) -> Pair | None:
        number, least = self._probe[0].num_sequences, len(self._probe) - 1
        probed = [
            step
            for step in self._probe[1:]
            if step.num_sequences == number and step.speculates == with_drafts
        ]
        before = self._fair(number, not with_drafts)
        self._probe = []
        self._before.clear()
        if len(probed) < least or len(before) < NUM_ON_STEPS // 2:
            return None
        on, off = (probed, before) if with_drafts else (before, probed)
        on_s, off_s = mean([step.seconds for step in on]), mean([step.seconds for step in off])
        tokens: dict[str, list[int]] = {}
        for step in on:
            for outcome in step.outcomes:
                tokens.setdefault(outcome.task, []).append(outcome.num_tokens)
        for task, of_task in tokens.items():
            pairs = self._pairs.touch(task, lambda: deque(maxlen=MAX_PAIRS))
            pairs.append(Pair(mean(of_task), on_s, off_s))
        pair = Pair(mean([number for of_task in tokens.values() for number in of_task]), on_s, off_s)
        self._all.append(pair)
        return pair

    def _fair(self, num_sequences: int, speculates: bool) -> list[Step]:
        """Steps before, with speculation or without, of about so many sequences."""
        most = MAX_DIFFERENCE * num_sequences
        return [
            step
            for step in self._before
            if step.speculates == speculates and abs(step.num_sequences - num_sequences) <= most
        ]


def ratio_of(pairs: Seq[Pair]) -> Speedup | None:
    """The ratio of the sums, with a 95 % interval by the delta method over pairs, each of which is its own sample.

    They may be few, so the interval is Student's.
    """
    if len(pairs) < MIN_PAIRS:
        return None
    # A pair's two sides are put on one scale by its own off steps, so that large and small batches count alike.
    tokens = [pair.on_tokens for pair in pairs]
    costs = [pair.on_s / pair.off_s for pair in pairs]
    ratio = sum(tokens) / sum(costs)
    mean_tokens, mean_cost = mean(tokens), mean(costs)
    spread = [t / mean_tokens - c / mean_cost for t, c in zip(tokens, costs, strict=True)]
    error = math.sqrt(sum(s * s for s in spread) / (len(pairs) - 1) / len(pairs))
    width = math.exp(quantile(len(pairs) - 1, 0.975) * error)
    return Speedup(ratio, ratio / width, ratio * width, len(pairs))


def mean(values: Seq[float]) -> float:
    return sum(values) / len(values)


def within(value: float, freedom: int) -> float:
    """The chance that Student's |t| is at most `value`; Abramowitz and Stegun, 26.7.3 and 4.

    For whole degrees of `freedom` it is a finite sum. SciPy has it, but takes a part of a second of a start to import.
    """
    angle = math.atan(value / math.sqrt(freedom))
    cos = math.cos(angle)
    odd = freedom % 2
    term, total = (cos, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cos * cos * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


@functools.cache
def quantile(freedom: int, chance: float) -> float:
    """The value that t exceeds with a chance of 1 - `chance`, for a `chance` of at least one half."""
    low, high = 0.0, 1.0
    while within(high, freedom) < 2 * chance - 1:
        high *= 2
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < 2 * chance - 1 else (low, middle)
    return high
