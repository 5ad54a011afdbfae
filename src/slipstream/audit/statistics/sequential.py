"""A two-sample test that may stop after any pair: a gambler guesses which of two answers is whose.

Podkopaev and Ramdas, "Sequential predictive two-sample and independence testing" (NeurIPS 2023). Each pair is one
answer of either source to the same prompt. What tells them apart is learned from the pairs before; a pair is bet on
before it is learned from. If both sources answer alike, the two answers of a pair are exchangeable, so a guess is
right with probability one half whatever was learned, and the wealth is a martingale.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Seq

import numpy as np

from slipstream.audit.statistics.ngrams import NgramCounts, Reading
from slipstream.audit.statistics.samples import Floats, Integers, padded
from slipstream.audit.statistics.wealth import Wealth

FEATURES = (
    "surprise",
    "surprise by the first's texts, less that by the second's",
    "spread of the surprise",
    "share of different tokens",
    "length",
    "agreement with the first's answers, less that with the second's",
)
"""What is measured of an answer."""
MIN_PAIRS = 4
"""No bet before so many pairs: nothing can be learned from fewer."""
_GROWTH = 1.05
"""The weights are fitted anew when the number of pairs has grown by this factor."""
_RIDGE = 1.0
"""Weight of the prior that no feature tells anything."""
_NEWTON_STEPS = 8
_LOG_LARGEST = 700.0
"""The exponential of more is no float."""


class SequentialTest:
    """Bets on one pair after the other; anytime valid."""

    def __init__(self, confidence: float, length: int = 64) -> None:
        """A false alarm has at most the probability 1 - `confidence`. Answers are compared up to `length` tokens."""
        self.wealth = Wealth(1 - confidence)
        self._length = length
        self._counts = NgramCounts(2)
        self._earlier = _EarlierAnswers()
        self._seen: list[Floats] = []  # a pair's features, the first's less the second's
        self._weights = np.zeros(len(FEATURES))
        self._scale = np.ones(len(FEATURES))
        self._next_fit = MIN_PAIRS

    @property
    def num_pairs(self) -> int:
        return self.wealth.num_bets

    @property
    def rejects(self) -> bool:
        """True once the sources differ."""
        return self.wealth.rejects

    @property
    def rejected_after(self) -> int | None:
        """How many pairs it took; None while the test does not reject."""
        return self.wealth.rejected_after

    @property
    def e_value(self) -> float:
        """The wealth, which began with 1; a float's largest where it is more."""
        return math.exp(min(self.wealth.log_wealth, _LOG_LARGEST))

    @property
    def weights(self) -> dict[str, float]:
        """What the gambler goes by now: positive where more of it is a sign of the first source."""
        return dict(zip(FEATURES, self._weights.tolist(), strict=True))

    def add(self, prompt: int, first: Seq[int], second: Seq[int]) -> None:
        """Bet on a pair of answers, token ids or code points, then learn from it."""
        rows = padded((first, second), self._length)  # [2, L]
        readings = [
            Reading(prompt, row[: min(len(answer), self._length)])
            for row, answer in zip(rows, (first, second), strict=True)
        ]
        features = [self._features(prompt, row, reading) for row, reading in zip(rows, readings, strict=True)]
        difference = features[0] - features[1]
        # The factor 2 * sigmoid(z): at z and at -z together it pays what it costs.
        z = float(self._weights @ (difference / self._scale))
        self.wealth.bet(float(np.log(2.0) - np.logaddexp(0.0, -z)))
        self._seen.append(difference)
        for source, (row, reading) in enumerate(zip(rows, readings, strict=True)):
            self._counts.add(source, reading)
            self._earlier.add(source, prompt, row)
        if len(self._seen) >= self._next_fit:
            self._fit()

    def _features(self, prompt: int, row: Integers, reading: Reading) -> Floats:
        agreement = self._earlier.agreement(prompt, row)
        if not reading.num_tokens:
            return np.array([0.0, 0.0, 0.0, 0.0, 0.0, agreement])
        surprise = self._counts.surprise(reading)  # [3, T]
        return np.array(
            [
                surprise[0].mean(),
                surprise[1].mean() - surprise[2].mean(),
                surprise[0].std(),
                len(np.unique(row[: reading.num_tokens])) / reading.num_tokens,
                reading.num_tokens / self._length,
                agreement,
            ]
        )

    def _fit(self) -> None:
        """Logistic regression without intercept on the pairs so far; Newton's method from the last weights."""
        pairs = np.stack(self._seen)  # [pairs, features]
        self._scale = np.sqrt((pairs**2).mean(0)) + 1e-9
        pairs = pairs / self._scale
        weights = self._weights
        for _ in range(_NEWTON_STEPS):
            right = 1 / (1 + np.exp(-np.clip(pairs @ weights, -30, 30)))  # chance given to what was
            slope = pairs.T @ (1 - right) - _RIDGE * weights
            curve = (pairs * (right * (1 - right))[:, None]).T @ pairs + _RIDGE * np.eye(len(weights))
            step = np.linalg.solve(curve, slope)
            weights = weights + step
            if float(np.abs(step).max()) < 1e-6:
                break
        self._weights = weights
        self._next_fit = max(len(self._seen) + 1, int(len(self._seen) * _GROWTH))


class _EarlierAnswers:
    """The agreement of an answer with each source's earlier answers to the prompt: the witness function of MMD."""

    def __init__(self) -> None:
        self._answers: dict[int, tuple[list[Integers], list[Integers]]] = defaultdict(lambda: ([], []))

    def add(self, source: int, prompt: int, row: Integers) -> None:
        self._answers[prompt][source].append(row)

    def agreement(self, prompt: int, row: Integers) -> float:
        """Mean share of equal positions with the first source's, less that with the second's."""
        first, second = self._answers[prompt]
        if not first or not second:
            return 0.0
        return float((np.stack(first) == row).mean() - (np.stack(second) == row).mean())
