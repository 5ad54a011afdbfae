"""Choosing the threshold of a judge: the one that keeps most steps among those that keep the accuracy. No tensors."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.stats.paired import PairedAccuracy

DEFAULT_GRID = {
    "score": (3.0, 5.0, 6.0, 7.0, 8.0, 8.5),
    "logprob": (-1.5, -1.0, -0.75, -0.5, -0.35, -0.2),
}
"""Thresholds to try, the laxest first."""


@dataclass(frozen=True, slots=True)
class CalibrationCell:
    """What a threshold made of the problems."""

    threshold: float
    right: Seq[bool]
    """One a problem."""
    num_steps: int
    num_kept_steps: int
    num_passes: int
    num_tokens: int

    @property
    def kept_share(self) -> float:
        """Return the share of all steps that were drafted and kept."""
        return self.num_kept_steps / self.num_steps if self.num_steps else 0.0


def choose_threshold(
    reference: Seq[bool], cells: Seq[CalibrationCell], max_loss: float
) -> CalibrationCell | None:
    """The cell with the fewest passes of the target whose accuracy is at most `max_loss` below the reference's with
    95 % confidence; None where no cell is."""
    kept = [cell for cell in cells if PairedAccuracy.of(reference, cell.right).least_difference >= -max_loss]
    return min(kept, key=lambda cell: (cell.num_passes, -cell.threshold), default=None)


def is_expected(text: str, expected: str, think_end: str, exact: bool) -> bool:
    """Whether an answer is right: what follows the thinking is `expected`, or has it as a word where not `exact`."""
    answer = text.rpartition(think_end)[2].strip()
    if exact:
        return answer == expected.strip()
    padded = f" {' '.join(''.join(c if c.isalnum() or c in '.-/' else ' ' for c in answer).split())} "
    wanted = " ".join("".join(c if c.isalnum() or c in ".-/" else " " for c in expected).split())
    return f" {wanted} " in padded or f" {wanted}. " in padded
