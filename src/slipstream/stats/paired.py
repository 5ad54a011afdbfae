"""Two ways to answer the same problems, compared pair by pair."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

ONE_SIDED_95 = 1.6449


def sign_test(num: int, total: int) -> float:
    """P(at least `num` of `total`) where either outcome is equally probable; 1 without any."""
    from scipy.stats import binom

    return float(binom.sf(num - 1, total, 0.5))


@dataclass(frozen=True, slots=True)
class PairedAccuracy:
    """The same problems, answered by a reference and by another way."""

    num_problems: int
    num_right: int
    """By the other way."""
    num_reference: int
    """By the reference."""
    num_lost: int
    """Right by the reference alone."""
    num_won: int
    """Right by the other way alone."""

    @classmethod
    def of(cls, reference: Seq[bool], other: Seq[bool]) -> PairedAccuracy:
        """Make it from one flag a problem, in the same order. Raises `ValueError` for lists of different lengths."""
        pairs = list(zip(reference, other, strict=True))
        return cls(
            len(pairs),
            sum(map(bool, other)),
            sum(map(bool, reference)),
            sum(before and not after for before, after in pairs),
            sum(after and not before for before, after in pairs),
        )

    @property
    def accuracy(self) -> float:
        """Return the accuracy of the other way."""
        return self.num_right / self.num_problems if self.num_problems else 0.0

    @property
    def difference(self) -> float:
        """The other way's accuracy less the reference's."""
        return (self.num_won - self.num_lost) / self.num_problems if self.num_problems else 0.0

    @property
    def p_lower(self) -> float:
        """The one-sided exact p-value of McNemar's test: small where the other way is worse than the reference."""
        return sign_test(self.num_lost, self.num_lost + self.num_won)

    @property
    def least_difference(self) -> float:
        """A lower bound of the difference that holds with 95 % confidence: Agresti and Min, "Simple improved confidence
        intervals for comparing matched proportions" (Statistics in Medicine, 2005), half a pair added to each cell."""
        num, lost, won = self.num_problems + 2, self.num_lost + 0.5, self.num_won + 0.5
        middle = (won - lost) / num
        spread = math.sqrt(max(won + lost - (won - lost) ** 2 / num, 0.0)) / num
        return max(middle - ONE_SIDED_95 * spread, -1.0)
