"""Passes in Transformers' own code, recorded once a shape as a CUDA graph and replayed.

A pass is padded to a bucket of rows, so that few graphs serve all. What differs from pass to pass lies in one buffer at
a fixed place, which one copy fills. What cannot be recorded is computed as `eager` does, and counted.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.core.metrics.passes import PassCounts
from slipstream.kv.pool import KVPool
from slipstream.kv.upload import upload
from slipstream.models.attention.base import AttentionBackend, AttentionPass
from slipstream.models.attention.triton import TritonAttention, TritonBackend
from slipstream.models.batch import Bucket, ForwardBatch
from slipstream.models.cuda.tree_attention import Reads
from slipstream.models.cuda.verdict import conclude
from slipstream.models.executor.base import LargestPass, PassOutput, ProbedModel
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.choices import TokenChoices
from slipstream.models.executor.eager import EagerExecutor
from slipstream.models.executor.levels import PendingDrafts
from slipstream.models.executor.pass_layout import (
    ROWS,
    WANTED,
    PassLayout,
    PassShape,
    doubled,
    plan_sizes,
    usual_seen,
)
from slipstream.models.executor.pass_memory import recorded_bytes
from slipstream.models.executor.recorded_drafts import DraftRecorder, draw_by_one_pass, draw_by_passes
from slipstream.models.executor.recording import CudaGraph, Graph, RecordedPass, on_device, why_not_recorded
from slipstream.models.rows import RowGroup

log = logging.getLogger(__name__)


class CudaGraphExecutor(EagerExecutor):
    """Replays recorded passes of the Transformers model."""

    name: ClassVar[str] = "cuda_graph"
    chooses: ClassVar[bool] = True
    records: ClassVar[bool] = True
    num_scratch_slots: ClassVar[int] = 64
    warms_up: ClassVar[bool] = True
    graph: ClassVar[type[Graph]] = CudaGraph

    def __init__(self, given: ProbedModel, packs: bool = True) -> None:
        super().__init__(given, packs)
        assert isinstance(given.backend, TritonBackend)
        self.backend: TritonBackend = given.backend
        self.recorded: weakref.WeakKeyDictionary[KVPool, dict[PassShape, RecordedPass[PassOutput]]] = (
            weakref.WeakKeyDictionary()
        )
        self.num_replayed = 0
        """Passes that a graph computed."""
        self.eager: Counter[str] = Counter()
        """Passes that none did, by why."""
        self._failure: str | None = None
        """Why passes of this model cannot be recorded."""
        self._has_warned = False
        self.drafts = DraftRecorder(self.graph, given.model.device)
        self.outputs: dict[int | None, Tensor] = {}
        """Where all graphs leave logits, under None, and hidden states by layer. Else each would hold its own."""

    @classmethod
    def misfit(cls, backend: AttentionBackend) -> str | None:
        if isinstance(backend, TritonBackend):
            return None
        return TritonBackend.refusal(backend.traits) or "its attention_backend is not triton"

    @classmethod
    def refusal(cls, given: ProbedModel) -> str | None:
        return cls.misfit(given.backend) or super().refusal(given)

    @classmethod
    def recorded_bytes(cls, largest: LargestPass) -> int:
        return recorded_bytes(largest)

    def forward(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
        choices: TokenChoices | None = None,
    ) -> PassOutput:
        with on_device(self.model.device):
            return self._forward(rows, pool, hidden_layers, layers, choices)

    def _forward(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        hidden_layers: Sequence[int],
        layers: Sequence[int] | None,
        choices: TokenChoices | None,
    ) -> PassOutput:
        reason = self.reason_not(rows, pool, layers)
        if reason is None:
            with self._lock:
                try:
                    output = self._replay(rows, pool, tuple(hidden_layers), choices)
                except RuntimeError as error:
                    reason = self._failure = why_not_recorded(error)
                    self.recorded.clear()  # no graph is replayed any more
                    self.outputs.clear()
                    log.warning("passes of %s are not recorded: %s", self.model.config.model_type, reason)
                else:
                    self.num_replayed += 1
                    return output
        self._count_eager(reason)
        output = super().forward(rows, pool, hidden_layers, layers)
        if choices is None:
            return output
        # By the arithmetic of recorded passes: a text takes both routes.
        table = choices.fill_in(upload(choices.table(rows.num_logit_rows), self.model.device))
        return conclude(output, table, rows.on(self.model.device), pool)

    def draft(
        self, rows: ForwardBatch, pool: KVPool, drafts: PendingDrafts, layers: Sequence[int] | None = None,
        at_once: bool = False,
    ) -> Tensor | None:  # fmt: skip
        reason = self.reason_not(rows, pool, layers)
        if reason is not None:
            return self.drafts.refuse(reason)
        call = self.callable()

        def step(
            _: int, level: ForwardBatch, attention: AttentionPass, given: Tensor | None
        ) -> tuple[Tensor, None]:
            return self.run(level, attention, (), call).logits, None

        with self._lock:
            draw = draw_by_one_pass if at_once else draw_by_passes
            drawn = draw(self.drafts, rows, pool, drafts, self.backend.plan, step)
        num_passes = 1 if at_once else 1 + len(drafts.shape.fed)
        self.num_replayed += 0 if drawn is None else num_passes
        return drawn

    def draft_chain(
        self, rows: ForwardBatch, pool: KVPool, chains: Chains, layers: Sequence[int] | None = None
    ) -> Sequence[Sequence[int]]:
        if chains.pends:
            chains.begin(rows)
            drawn = self.draft(rows, pool, chains, layers)
            if drawn is not None:
                return chains.pending(drawn)
        return super().draft_chain(rows, pool, chains, layers)

    def warm_up(
        self, pool: KVPool, max_rows: int, hidden_layers: Sequence[int] = (), chooses: bool = False
    ) -> None:
        """Record a pass of every bucket, the largest first, so that smaller ones fit into the memory that it took."""
        started_s, before = time.perf_counter(), self.num_replayed
        scratch = len(pool.scratch)
        for size in reversed([size for size in ROWS if size < 2 * max_rows] if self.warms_up else []):
            starts = range(0, size, scratch)
            groups = [RowGroup(pool.scratch, 0, [0] * min(scratch, size - row), [0]) for row in starts]
            choices = TokenChoices()
            choices.skip(len(groups))
            with torch.inference_mode():
                self.forward(ForwardBatch(groups), pool, hidden_layers, choices=choices if chooses else None)
        if self.num_replayed > before:
            num, took_s = self.num_replayed - before, time.perf_counter() - started_s
            log.info("recorded passes of %d sizes of %s in %.1f s", num, self.model.config.model_type, took_s)

    def callable(self) -> Callable[..., Any]:
        """What a pass that is to be recorded calls: the model."""
        model: Callable[..., Any] = self.model
        return model

    @property
    def is_asynchronous(self) -> bool:
        return bool(self.model.device.type == "cuda")

    @property
    def pass_counts(self) -> PassCounts:
        return PassCounts(self.num_replayed, dict(self.eager))

    def _count_eager(self, reason: str) -> None:
        """Count a pass that no graph computes, and warn once where too many are such; a failure was said already."""
        self.eager[reason] += 1
        if self._has_warned or self._failure is not None:
            return
        complaint = self.pass_counts.complaint
        if complaint is not None:
            self._has_warned = True
            log.warning("%s: %s", self.model.config.model_type, complaint)

    def reason_not(self, rows: ForwardBatch, pool: KVPool, layers: Sequence[int] | None) -> str | None:
        """Why a pass is not computed by a graph."""
        if self._failure is not None:
            return self._failure
        if not pool.scratch:
            return "a cache without slots for rows that fill a pass"
        if not rows.contiguous:
            return "slots that are not consecutive"
        if layers is not None:
            return "some layers only"
        if rows.added is not None:
            return "something added to the embeddings"
        if rows.num_rows > ROWS[-1] or rows.num_logit_rows > WANTED[-1]:
            return "too many rows"
        return None

    def _replay(
        self, rows: ForwardBatch, pool: KVPool, hidden_layers: tuple[int, ...], choices: TokenChoices | None
    ) -> PassOutput:
        num_rows = next(size for size in ROWS if size >= rows.num_rows)
        num_wanted = min(num_rows, next(size for size in WANTED if size >= rows.num_logit_rows))
        num_seen = max(usual_seen(num_rows), doubled(int(rows.tail_begin[-1])))
        bucket = Bucket(num_rows, num_wanted, num_seen)
        padded = ForwardBatch(rows.groups, bucket, pool.scratch)
        plan = self.backend.plan(padded, pool)
        sizes = plan_sizes(num_rows, plan.sizes.num_partials)
        chooses, filters = choices is not None, choices is not None and choices.filtered
        shape = PassShape(bucket, sizes, hidden_layers, chooses, filters)
        layout = PassLayout(shape, padded.buffer.size)
        recorded = self.recorded.setdefault(pool, {})
        if shape not in recorded:
            recorded[shape] = self._record(padded, pool, shape, layout)
        numbers = upload(layout.numbers(padded, plan, choices), self.model.device)
        padded.views(layout.part(numbers, "batch")).fill_in(rows.drafted, padded.ranks, rows.shifts)
        if choices is not None:
            choices.fill_in(layout.choices(numbers))
        output = recorded[shape].replay(numbers)
        return PassOutput(
            output.logits[: rows.num_logit_rows].clone(),
            {layer: hidden[: rows.num_rows].clone() for layer, hidden in output.hidden.items()},
            None if output.verdicts is None else output.verdicts.clone(),
        )

    def _record(
        self, padded: ForwardBatch, pool: KVPool, shape: PassShape, layout: PassLayout
    ) -> RecordedPass[PassOutput]:
        device, call = self.model.device, self.callable()

        def compute(buffer: Tensor) -> PassOutput:
            views = padded.views(layout.part(buffer, "batch"))
            padded.read(device, views)
            items, partials = layout.part(buffer, "items"), layout.part(buffer, "partials")
            reads = Reads.of(views, items.view(-1, 5), partials)
            attention = TritonAttention(pool, reads, shape.plan.num_partials)
            output = self.run(padded, attention, shape.hidden_layers, call)
            if shape.chooses:
                output = conclude(output, layout.choices(buffer), views, pool)
            return self._left(output)

        return RecordedPass(self.graph(), layout.size, device, compute)

    def _left(self, output: PassOutput) -> PassOutput:
        """The outputs of a pass, moved to where the next pass leaves its own: they are copied out before that."""
        logits = self._leave(None, output.logits, WANTED[-1])
        hidden = {layer: self._leave(layer, states, ROWS[-1]) for layer, states in output.hidden.items()}
        return replace(output, logits=logits, hidden=hidden)

    def _leave(self, name: int | None, values: Tensor, most: int) -> Tensor:
        if name not in self.outputs:
            with torch.inference_mode(False):  # passes in either mode write to it
                self.outputs[name] = values.new_empty(most, values.shape[1])
        return self.outputs[name][: len(values)].copy_(values)
