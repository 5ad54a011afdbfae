"""Heads that run with a target whose passes are recorded: whole drafts are one recording too."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.head_executor import EagerEagle
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM
from slipstream.models.attention.base import AttentionPass
from slipstream.models.attention.triton import plan_over
from slipstream.models.batch import ForwardBatch
from slipstream.models.cuda.attention_plan import AttentionPlan
from slipstream.models.executor.cuda_graph import CudaGraphExecutor
from slipstream.models.executor.levels import PendingDrafts
from slipstream.models.executor.recorded_drafts import DraftRecorder, FirstStates, draw_by_passes
from slipstream.models.linear.formats import WeightFormat


def recorder_of(target: CausalLM) -> DraftRecorder:
    """Records as the target's executor does."""
    executor = target.executor
    assert isinstance(executor, CudaGraphExecutor)
    return DraftRecorder(executor.graph, target.device)


class RecordedEagle(EagerEagle):
    """An EAGLE head; its rows attend in our Triton kernels while drafts are recorded."""

    records: ClassVar[bool] = True

    def __init__(self, head: EagleHead, target: CausalLM, fmt: WeightFormat) -> None:
        super().__init__(head, target, fmt)
        self.drafts = recorder_of(target)

    def draft(
        self, rows: ForwardBatch, pool: KVPool, drafts: PendingDrafts, features: FirstStates
    ) -> Tensor | None:
        def step(
            level: int, batch: ForwardBatch, attention: AttentionPass, given: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            assert given is not None
            states, logits = self.compute(batch, attention, given, level)
            return logits, states

        depth = 1 + len(drafts.shape.fed)
        return draw_by_passes(self.drafts, rows, pool, drafts, self._plan, step, features, depth + 1)

    def _plan(self, rows: ForwardBatch, pool: KVPool) -> AttentionPlan:
        return plan_over(rows, pool, self.head.config.num_attention_heads)
