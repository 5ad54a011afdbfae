"""A draft model whose passes take a given time, for measurements in which waiting stands for another machine's work."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.types import Proposal, Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions


@dataclass(frozen=True, kw_only=True)
class PacedOptions(DraftModelOptions):
    """How long a pass takes."""

    pass_s: float = 0.01


class PacedDrafter(DraftModelDrafter):
    """Drafts as a draft model does, and then waits until every token has taken its time."""

    Options = PacedOptions
    reads_text_only = True

    def __init__(self, options: PacedOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._pass_s = options.pass_s

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """As a draft model, later."""
        started_s = time.perf_counter()
        proposals = super().propose(sequences, budgets)
        num_passes = max(map(len, proposals), default=0)
        time.sleep(max(num_passes * self._pass_s - (time.perf_counter() - started_s), 0.0))
        return proposals
