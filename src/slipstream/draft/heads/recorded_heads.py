"""Heads that run with a target whose passes are recorded: whole drafts are one recording too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.head_executor import EagerEagle, EagerHeads, FeatureExecutor
from slipstream.draft.heads.mtp_executor import EagerMtp
from slipstream.draft.heads.mtp_head import MtpHead
from slipstream.draft.heads.residual import ProjectedHeads
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM
from slipstream.models.attention.base import AttentionPass
from slipstream.models.attention.triton import plan_over
from slipstream.models.batch import ForwardBatch
from slipstream.models.cuda.attention_plan import AttentionPlan
from slipstream.models.executor.cuda_graph import CudaGraphExecutor
from slipstream.models.executor.levels import PendingDrafts, draw_levels
from slipstream.models.executor.pass_layout import doubled
from slipstream.models.executor.recorded_drafts import (
    DraftRecorder,
    FirstStates,
    draw_by_one_pass,
    draw_by_passes,
    most_wanted,
    with_room,
)
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.support import text_config


def recorder_of(target: CausalLM) -> DraftRecorder:
    """Records as the target's executor does."""
    executor = target.executor
    assert isinstance(executor, CudaGraphExecutor)
    return DraftRecorder(executor.graph, target.device)


class RecordedFeatures(FeatureExecutor):
    """Whole drafts of a head that reads features; its rows attend in our Triton kernels while they are recorded."""

    drafts: DraftRecorder
    num_heads: int
    """Of its attention."""

    @abstractmethod
    def step(
        self, level: int, rows: ForwardBatch, attention: AttentionPass, given: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One level, see `DraftStep`."""

    def draft(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        drafts: PendingDrafts,
        features: FirstStates,
        at_once: bool = False,
    ) -> Tensor | None:
        def step(
            level: int, batch: ForwardBatch, attention: AttentionPass, given: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            assert given is not None
            return self.step(level, batch, attention, given)

        def plan(batch: ForwardBatch, pool: KVPool) -> AttentionPlan:
            return plan_over(batch, pool, self.num_heads)

        if at_once:
            return draw_by_one_pass(self.drafts, rows, pool, drafts, plan, step, features)
        depth = 1 + len(drafts.shape.fed)
        return draw_by_passes(self.drafts, rows, pool, drafts, plan, step, features, depth + 1)


class RecordedEagle(RecordedFeatures, EagerEagle):
    """An EAGLE head."""

    records = True

    def __init__(self, head: EagleHead, target: CausalLM, fmt: WeightFormat) -> None:
        super().__init__(head, target, fmt)
        self.drafts, self.num_heads = recorder_of(target), head.config.num_attention_heads

    def step(
        self, level: int, rows: ForwardBatch, attention: AttentionPass, given: Tensor
    ) -> tuple[Tensor, Tensor]:
        states, logits = self.compute(rows, attention, given, level)
        return logits, states


class RecordedMtp(RecordedFeatures, EagerMtp):
    """Layers for multi-token prediction, recorded where there is one of them: of several each has rows of its own."""

    def __init__(self, head: MtpHead, target: CausalLM, fmt: WeightFormat) -> None:
        super().__init__(head, target, fmt)
        self.drafts, self.num_heads = recorder_of(target), text_config(target.config).num_attention_heads
        self.records = len(head.layers) == 1

    def draft(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        drafts: PendingDrafts,
        features: FirstStates,
        at_once: bool = False,
    ) -> Tensor | None:
        if not self.records or at_once:
            return self.drafts.refuse("several layers for multi-token prediction")
        return super().draft(rows, pool, drafts, features)

    def step(
        self, level: int, rows: ForwardBatch, attention: AttentionPass, given: Tensor
    ) -> tuple[Tensor, Tensor]:
        output, normed = self.call(0, rows, attention, given if level else self.head.encode(given))
        logits = self.target.project(normed[rows.on(normed.device).logit_rows])
        return logits, normed if self.head.form.recycles_normed else output


class RecordedHeads(EagerHeads):
    """A set of Medusa or Hydra heads."""

    def __init__(self, heads: ProjectedHeads, target: CausalLM, fmt: WeightFormat) -> None:
        super().__init__(heads, target, fmt)
        self.drafts = recorder_of(target)

    def draft(
        self, pool: KVPool, drafts: PendingDrafts, states: FirstStates, token_ids: Seq[int]
    ) -> Tensor | None:
        shape, number = drafts.shape, doubled(len(token_ids))
        fed = (1, *shape.fed)
        if number * max(fed) > most_wanted(max(fed)):
            return self.drafts.refuse("too many rows")

        def compute(table: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
            levels, begun = shape.levels(table.view(-1, number)), states.read(places)
            of_all: Tensor | list[Tensor] = [] if self.reads_tokens else self.forward(begun, 0, len(fed))

            def step(level: int, above: Tensor | None) -> tuple[Tensor, Tensor | None]:
                if not self.reads_tokens:  # all nodes of a level share its logits
                    return of_all[level].repeat_interleave(fed[level], dim=0), None
                own = levels.tokens.clamp(min=0) if level else tokens
                rows = torch.cat([begun if above is None else above, self.target.embed(own)], dim=-1)
                return self.forward(rows, level, 1)[0], rows

            return draw_levels(levels, len(fed), step)

        table = with_room(drafts.numbers(), number)
        rows = with_room(np.array([states.places, token_ids], np.int64), number)
        return self.drafts.draw(pool, (number, shape), [table, *rows], compute)
