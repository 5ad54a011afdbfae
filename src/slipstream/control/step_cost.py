"""What a step costs, corrected by every step that is made.

A step's time is that of its target pass, which depends on its rows; of drafting, which depends on how many sequences
are drafted for and how deep; and of the rest. The first is learned by bins of rows, from the expectation on that a
measured profile gives, because memory and arithmetic take turns in being what it waits for. The others are sums of so
much a call, a pass, a sequence and a token: a few steps tell these few numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from slipstream.control.profile import isotonic

MEMORY = 40.0
"""Steps after which an old one weighs 1/e, in each bin."""
PRIOR_STEPS = 3.0
"""What the expectation weighs against what was seen in a bin."""
LINEAR_MEMORY = 200.0
RIDGE = 1e-3
OUTLIER = 3.0
"""A step that took more than so many times its bin's mean counts as so many: a neighbour woke up, not a law."""


def _edges() -> tuple[int, ...]:
    """Every number to 16, then steps of about a fifth."""
    edges = list(range(1, 17))
    while edges[-1] < 8192:
        edges.append(max(edges[-1] + 1, round(edges[-1] * 1.2)))
    return tuple(edges)


EDGES = _edges()


@dataclass(slots=True)
class Mean:
    """A decayed mean."""

    weight: float = 0.0
    value: float = 0.0

    def learn(self, value: float, outlier: float | None = OUTLIER) -> None:
        """One more; one above `outlier` times the mean counts as so much."""
        if outlier is not None and self.weight >= PRIOR_STEPS:
            value = min(value, outlier * self.value)
        self.weight = self.weight * (1 - 1 / MEMORY) + 1
        self.value += (value - self.value) / self.weight


@dataclass(slots=True)
class Curve:
    """Seconds as a function of a count, from 1 on: bins, made non-decreasing."""

    expected: Callable[[float], float] | None = None
    """Seconds before anything was seen; None extends what was seen."""
    _bins: dict[int, Mean] = field(default_factory=dict)
    _line: tuple[list[int], list[float]] | None = None

    def learn(self, count: int, seconds: float) -> None:
        """One step."""
        if count >= 1:
            self._bins.setdefault(bisect_left(EDGES, count), Mean()).learn(seconds)
            self._line = None

    @property
    def is_known(self) -> bool:
        return bool(self._bins) or self.expected is not None

    def __call__(self, count: float) -> float:
        """Seconds; 0 before anything is known."""
        if count < 1 or not self.is_known:
            return 0.0
        if not self._bins:
            assert self.expected is not None
            return self.expected(count)
        places, values = self._made()
        if self.expected is not None:
            return self.expected(count) * _between(places, values, count)
        return _between(places, values, count, beyond=True)

    def _made(self) -> tuple[list[int], list[float]]:
        """Counts and seconds, or, with an expectation, the ratio to it: a machine that is slower is so everywhere."""
        if self._line is None:
            places = sorted(self._bins)
            counts = [EDGES[place] for place in places]
            means = [self._bins[place] for place in places]
            if self.expected is None:
                values = isotonic([mean.value for mean in means])
            else:
                values = [
                    (mean.weight * mean.value / self.expected(count) + PRIOR_STEPS)
                    / (mean.weight + PRIOR_STEPS)
                    for count, mean in zip(counts, means, strict=True)
                ]
            self._line = counts, values
        return self._line


def _between(places: list[int], values: list[float], at: float, beyond: bool = False) -> float:
    """Linear between the places, constant before and behind them; with `beyond` in proportion behind the last."""
    if at <= places[0]:
        return values[0]
    if at >= places[-1]:
        return values[-1] * (at / places[-1] if beyond and places[-1] > 1 else 1.0)
    right = bisect_left(places, at)
    share = (at - places[right - 1]) / (places[right] - places[right - 1])
    return (1 - share) * values[right - 1] + share * values[right]


class Linear:
    """Seconds as a sum of non-negative parts, each in proportion to one quantity; decayed least squares.

    What is learned is only kept at first, and worked in when somebody asks: steps are many and short.
    """

    def __init__(self, num_features: int) -> None:
        self._products = np.zeros((num_features, num_features))
        self._targets = np.zeros(num_features)
        self._parts = [0.0] * num_features
        self._mean = 0.0
        self._new: list[tuple[Seq[float], float]] = []

    def learn(self, features: Seq[float], seconds: float) -> None:
        """One call or step."""
        self._new.append((features, seconds))
        if len(self._new) >= LINEAR_MEMORY:
            self._work_in()

    @property
    def is_known(self) -> bool:
        return bool(self._new) or self._mean > 0

    def __call__(self, features: Seq[float]) -> float:
        """Seconds; 0 before anything is known."""
        if self._new:
            self._work_in()
        return sum(part * feature for part, feature in zip(self._parts, features, strict=True))

    def _work_in(self) -> None:
        rows = np.array([features for features, _ in self._new], dtype=float)
        seconds = np.array([each for _, each in self._new])
        self._new = []
        usual = np.maximum(rows @ np.array(self._parts), self._mean or float(np.median(seconds)))
        seconds = np.minimum(seconds, OUTLIER * usual)
        weights = (1 - 1 / LINEAR_MEMORY) ** np.arange(len(rows) - 1, -1, -1)
        keep = (1 - 1 / LINEAR_MEMORY) ** len(rows)
        self._products = self._products * keep + (rows * weights[:, None]).T @ rows
        self._targets = self._targets * keep + rows.T @ (weights * seconds)
        self._mean = float(self._targets[0] / self._products[0, 0])  # the first quantity is 1
        self._parts = self._solve()

    def _solve(self) -> list[float]:
        """With a little ridge: of quantities that always came together, each gets its share."""
        scale = np.sqrt(np.diag(self._products))
        scale[scale == 0] = 1.0
        scaled = self._products / np.outer(scale, scale) + RIDGE * np.eye(len(scale))
        root = np.linalg.cholesky(scaled)
        parts, _ = nnls(root.T, np.linalg.solve(root, self._targets / scale))
        return (parts / scale).tolist()  # type: ignore[no-any-return]


class Drafted(NamedTuple):
    """How much a drafter was asked for in a step."""

    num_sequences: int
    num_levels: int
    """Of the deepest; 1 for trees and lookups."""
    num_tokens: int
    """Asked for in all."""

    @property
    def features(self) -> tuple[float, ...]:
        return 1.0, self.num_levels, self.num_sequences, self.num_tokens


class DraftCost:
    """Seconds of a drafter's calls: so much a call, a level, a sequence and a token."""

    def __init__(self) -> None:
        self.call = Linear(4)
        self.caught_up_token_s = Mean()
        """A token of text that the drafter had not seen, since it was not asked while the text grew."""

    def learn(self, drafted: Drafted, num_missed: int, seconds: float) -> None:
        """One call, before which the text had grown by `num_missed` tokens beyond what a step yields."""
        if num_missed <= 2 * drafted.num_sequences:
            if drafted.num_sequences:
                self.call.learn(drafted.features, seconds)
        elif self.call.is_known or not drafted.num_sequences:
            rest_s = max(0.0, seconds - self.call(drafted.features))
            self.caught_up_token_s.learn(rest_s / num_missed)

    def __call__(self, drafted: Drafted) -> float:
        return self.call(drafted.features) if drafted.num_sequences else 0.0


class StepCost:
    """Seconds of a step, drafting apart."""

    def __init__(self, verify: Callable[[float], float] | None = None) -> None:
        """`verify` is the expected time of a target pass by rows."""
        self.verify = Curve(verify)
        self._rest = Linear(4)

    def learn(
        self, *, num_sequences: int, num_rows: int, drafted: int, checked: int, verify_s: float, rest_s: float
    ) -> None:
        """One step of `num_rows` rows in all, of which `checked` were drafts for `drafted` sequences; `rest_s` is what
        was neither drafting nor the pass."""
        self.verify.learn(num_rows, verify_s)
        self._rest.learn((1.0, num_sequences, drafted, checked), rest_s)

    def step_s(self, num_sequences: int, num_rows: float, drafted: int, checked: float) -> float:
        """Expected seconds."""
        return self.verify(num_rows) + self._rest((1.0, num_sequences, drafted, checked))
