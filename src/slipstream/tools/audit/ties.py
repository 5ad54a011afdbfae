"""Near-ties: what rounding may change, how many flips are expected from it, and how many were seen."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy.stats import fisher_exact

from slipstream.tools.audit.findings import AuditTest
from slipstream.tools.audit.replaying import Floats
from slipstream.tools.audit.statistics.ties import (
    flip_probabilities,
    flip_test,
    smallest_rejected,
    tail_probability,
)

SAFETY = 2.0
"""A near-tie's margin may be this many times the largest measured difference of a log-probability."""
UNKNOWN_FACTOR = 4.0
_KNOWN = 1000
"""A margin that the user gives counts as if so many measurements had shown it: of one alone the scale is unknown."""


@dataclass
class Rounding:
    """Measured differences of log-probabilities that an honest engine computes twice, in nats, and what follows."""

    noise: Floats = field(default_factory=lambda: np.zeros(0))
    given: float | None = None
    """The margin that the user says; None measures it."""

    @property
    def largest(self) -> float:
        return float(np.abs(self.noise).max()) if len(self.noise) else 0.0

    @property
    def tie_margin(self) -> float:
        """Nats within which a difference is a near-tie."""
        return self.given if self.given is not None else SAFETY * self.largest

    @property
    def unknown_chance(self) -> float:
        """Return a bound of the chance that rounding turns a draw around at a token; 0 where results are exact.

        A draw from two distributions with one random number differs with about the distance of the distributions, and
        at most a small multiple of it: half the mean difference of a log-probability, here times eight.
        """
        return min(1.0, UNKNOWN_FACTOR * float(np.abs(self.noise).mean())) if len(self.noise) else 0.0

    def test(self, gaps: Iterable[Floats], num_ties: int, level: float) -> AuditTest | None:
        """Whether rounding explains so many flipped near-ties; None where there were none and none were expected.

        `gaps` are the distances of the two best choices at every compared position. A p-value below `level` rejects.
        """
        noise = self.noise
        if not self.largest and self.given:
            noise = np.full(_KNOWN, self.given / SAFETY)
        if not np.any(noise) and not num_ties:
            return None
        margins = joined(list(gaps))
        found = flip_test(margins, noise, num_ties)
        needed = smallest_rejected(flip_probabilities(margins, noise), level)
        return AuditTest(
            "near-ties",
            "near-ties are broken as rounding alone would break them",
            found.p_value,
            asdict(found),
            smallest=f"{needed:,} flipped near-ties",
        )

    def unknown_test(self, num_tokens: int, num_unknown: int, level: float, most: int) -> AuditTest | None:
        """Whether rounding explains so many differences of unknown margin among `num_tokens`, of at most `most`;
        None where there were none and none were expected. A p-value below `level` rejects.
        """
        chance = self.unknown_chance
        if not num_unknown and not chance:
            return None
        chances = np.full(num_tokens, chance)
        needed = smallest_rejected(chances, level)
        return AuditTest(
            "differences of unknown margin",
            "answers differ only where rounding turned a draw around",
            tail_probability(chances, num_unknown),
            {"observed": num_unknown, "expected": chance * num_tokens, "num_tokens": num_tokens},
            smallest=f"{needed:,} differences of unknown margin" if needed <= most else "",
        )

    def report(self, num_ties: int, test: AuditTest | None) -> dict[str, Any]:
        """Return what the certificate says."""
        return {
            "tie_margin_nats": self.tie_margin,
            "measured_differences": len(self.noise),
            "largest_difference_nats": self.largest,
            "observed": num_ties,
            "expected": 0.0 if test is None else test.figures["expected"],
        }


def more_than_repeats(num_different: int, num_answers: int, num_unlike: int, num_repeated: int) -> AuditTest:
    """Whether answers differ more often from the other side's than answers that one side gives twice, by Fisher's exact
    test.
    """
    table = [[num_different, num_answers - num_different], [num_unlike, num_repeated - num_unlike]]
    return AuditTest(
        "differences beyond repeats",
        "answers differ no more often than those of one server that is asked twice",
        float(fisher_exact(table, alternative="greater").pvalue),
        {"different": num_different, "answers": num_answers, "unlike": num_unlike, "repeated": num_repeated},
    )


def joined(parts: Seq[Floats]) -> Floats:
    """All parts one after another."""
    return np.concatenate([np.zeros(0), *parts])
