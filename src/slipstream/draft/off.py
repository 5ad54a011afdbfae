"""Ordinary decoding, as a drafter without proposals."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter


@dataclass(frozen=True)
class OffOptions:
    """No keys."""


class OffDrafter(Drafter):
    """Speculation off: the empty proposal in every step of the same loop."""

    Options = OffOptions

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """The empty proposal for each sequence."""
        return [EMPTY_PROPOSAL] * len(sequences)
