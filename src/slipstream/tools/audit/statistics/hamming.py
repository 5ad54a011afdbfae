"""Two samples of text compared by their maximum mean discrepancy under the Hamming kernel, with permutations.

Gao, Liang and Guestrin, "Model equality testing: which model is this API serving?" (ICLR 2025). The kernel counts the
positions at which two answers to the same prompt agree. Answers to different prompts are not compared, and the
permutations keep each prompt's answers together: without that, a prompt that is oftener on one side than on the other
would raise false alarms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from slipstream.tools.audit.statistics.samples import Floats, Integers

NUM_PERMUTATIONS = 1999
_CHUNK = 256
"""Permutations that are computed at once, to bound the memory."""

Stratum = tuple[Integers, Integers]
"""Both sources' answers to one prompt, padded: [n, L] and [m, L]."""


@dataclass(frozen=True, slots=True)
class MmdTest:
    """The discrepancy of two samples next to its values under random relabelling."""

    statistic: float
    """Over the prompts, the mean of the squared discrepancy, weighted by nm/(n + m); at most 2."""
    p_value: float
    """(1 + permutations with at least the statistic) / (1 + permutations): never below what the permutations allow."""
    num_first: int
    num_second: int
    num_permutations: int
    smallest_detectable: float | None
    """The statistic above which the test would have rejected; None where no relabelling of these answers could."""


def hamming_kernel(answers: Integers) -> Floats:
    """The share of positions at which two answers agree, padding included: [N, L] -> [N, N]."""
    agree = np.zeros((len(answers), len(answers)))
    for column in answers.T:
        agree += column[:, None] == column[None, :]
    return np.asarray(agree / answers.shape[1])


def mmd_test(
    strata: Seq[Stratum], num_permutations: int = NUM_PERMUTATIONS, seed: int = 0, level: float = 0.01
) -> MmdTest:
    """Whether both sources answer alike. Prompts that one source did not answer are left out.

    A p-value below `level` rejects. Raises `ValueError` where no prompt is left, or without a permutation.
    """
    strata = [stratum for stratum in strata if all(map(len, stratum))]
    if not strata or num_permutations < 1:
        raise ValueError("the test needs a prompt that both sources answered, and at least one permutation")
    generator = np.random.default_rng(seed)
    observed, permuted, total = 0.0, np.zeros(num_permutations), 0.0
    for first, second in strata:
        weight = len(first) * len(second) / (len(first) + len(second))
        kernel = hamming_kernel(np.concatenate((first, second)))
        shares = np.repeat((1 / len(first), -1 / len(second)), (len(first), len(second)))  # [n + m]
        observed += weight * float(shares @ kernel @ shares)
        for start in range(0, num_permutations, _CHUNK):
            size = min(_CHUNK, num_permutations - start)
            shuffled = generator.permuted(np.tile(shares, (size, 1)), axis=1)  # [size, n + m]
            permuted[start : start + size] += weight * np.einsum("bi,bi->b", shuffled @ kernel, shuffled)
        total += weight
    # Equal statistics may differ in the last place: they count as at least the observed one.
    close = 1e-9 * max(1.0, abs(observed))
    reached = int((permuted >= observed - close).sum())
    smallest = _smallest_rejected(permuted, level, close)
    return MmdTest(
        observed / total,
        (1 + reached) / (1 + num_permutations),
        sum(len(first) for first, _ in strata),
        sum(len(second) for _, second in strata),
        num_permutations,
        None if smallest is None else smallest / total,
    )


def _smallest_rejected(permuted: Floats, level: float, close: float) -> float | None:
    """The value above which a statistic is rejected; None where that is the largest that relabelling gives."""
    most_reached = math.ceil(level * (1 + len(permuted)) - 1) - 1  # permutations that may reach it
    ordered = np.sort(permuted)[::-1]
    if most_reached < 0 or ordered[0] - ordered[min(max(most_reached, 1), len(ordered) - 1)] <= close:
        return None
    return float(ordered[most_reached])
