"""A two-sample test that may stop after any pair: it bets on which of two answers came from which source.

Podkopaev and Ramdas, "Sequential predictive two-sample and independence testing" (NeurIPS 2023). Each pair is one
answer of either source to the same prompt. The bet rests on the pairs before only. If both
sources answer alike, the two answers of a pair are exchangeable, so a bet wins with probability one half whatever it
rests on, and the wealth is a martingale.

Several gamblers share the first wealth: to learn the weights of all features costs a wealth that small differences do
not win back, to learn one costs little. The mean of martingales is one too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq

import numpy as np

from slipstream.stats.betting import BettingTest, log_mean
from slipstream.tools.audit.statistics.ngrams import NgramCounts, Reading
from slipstream.tools.audit.statistics.samples import Floats, Integers, padded

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
_ALL = tuple(range(len(FEATURES)))
GAMBLERS = ((_ALL, 1.0), (_ALL, 16.0), *(((feature,), 4.0) for feature in _ALL))
"""Each one's features, and the weight of its prior that none of them tells anything."""
_NEWTON_STEPS = 8


class SequentialTest(BettingTest):
    """Bets on one pair after the other; anytime valid."""

    def __init__(self, confidence: float, length: int = 64) -> None:
        """A false alarm has at most the probability 1 - `confidence`. Answers are compared up to `length` tokens."""
        super().__init__(confidence)
        self._length = length
        self._counts = NgramCounts(2)
        self._earlier = _EarlierAnswers()
        self._seen: list[Floats] = []  # a pair's features, the first's less the second's
        self._weights = np.zeros((len(GAMBLERS), len(FEATURES)))
        self._log_wealths = np.zeros(len(GAMBLERS))
        self._scale = np.ones(len(FEATURES))
        self._next_fit = MIN_PAIRS

    @property
    def num_pairs(self) -> int:
        return self.wealth.num_bets

    @property
    def weights(self) -> dict[str, float]:
        """What the richest gambler's next bet rests on: positive where more of it is a sign of the first source."""
        richest = self._weights[int(self._log_wealths.argmax())]
        return dict(zip(FEATURES, richest.tolist(), strict=True))

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
        z = self._weights @ (difference / self._scale)  # [gamblers]
        self._log_wealths += np.log(2.0) - np.logaddexp(0.0, -z)
        self.wealth.move_to(log_mean(self._log_wealths))
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
        """Each gambler's weights, from the pairs so far."""
        pairs = np.stack(self._seen)  # [pairs, features]
        self._scale = np.sqrt((pairs**2).mean(0)) + 1e-9
        pairs = pairs / self._scale
        for weights, (features, ridge) in zip(self._weights, GAMBLERS, strict=True):
            own = list(features)
            weights[own] = _fitted(pairs[:, own], weights[own], ridge)
        self._next_fit = max(len(self._seen) + 1, int(len(self._seen) * _GROWTH))


def _fitted(pairs: Floats, weights: Floats, ridge: float) -> Floats:
    """Logistic regression without intercept on [pairs, features]; Newton's method from the last weights."""
    for _ in range(_NEWTON_STEPS):
        right = 1 / (1 + np.exp(-np.clip(pairs @ weights, -30, 30)))  # chance given to what was
        slope = pairs.T @ (1 - right) - ridge * weights
        curve = (pairs * (right * (1 - right))[:, None]).T @ pairs + ridge * np.eye(len(weights))
        step = np.linalg.solve(curve, slope)
        weights = weights + step
        if float(np.abs(step).max()) < 1e-6:
            break
    return weights


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
