"""Medusa and Hydra heads in the CPU kernels: all levels of a chain in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor, nn

from slipstream.draft.heads.head_executor import HeadsExecutor
from slipstream.draft.heads.hydra_head import HydraHeads
from slipstream.draft.heads.medusa_head import MedusaHeads
from slipstream.draft.heads.residual import ProjectedHeads
from slipstream.models.batch import ForwardBatch, RowGroup
from slipstream.models.causal_lm import CausalLM
from slipstream.models.cpu import native
from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.packed_model import PackedModel
from slipstream.models.cpu.pages import free_numbers, trim_heap
from slipstream.models.cpu.structs import BatchStruct, BlockStruct, HeadRowsStruct, HeadsStruct, LinearStruct
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.linear.formats import WeightFormat


class NativeHeads(PackedModel, HeadsExecutor):
    """Takes over the weights of a set of heads; those of `heads` are gone afterwards."""

    num_layers = 0

    @classmethod
    def refusal(cls, head: ProjectedHeads, target: CausalLM, fmt: WeightFormat) -> str | None:
        return "its weight format has no kernel" if fmt.kernel is None else None

    def __init__(self, heads: MedusaHeads | HydraHeads, target: CausalLM, fmt: WeightFormat) -> None:
        PackedModel.__init__(self)
        HeadsExecutor.__init__(self, heads, target, fmt)
        kernel, beside = fmt.kernel, target.executor
        assert isinstance(beside, CpuKernels)
        assert kernel is not None
        config = heads.config
        self._vocab_size = config.vocab_size
        self._beside = beside  # whose weights the structs point to
        blocks = [
            BlockStruct(self._linear(block.linear, kernel), self._linear(block.res_connection, kernel))
            for head in heads.blocks
            for block in head  # type: ignore[attr-defined]
        ]
        outputs = [self._linear(projection, kernel) for projection in heads.projections]
        shared = not outputs
        if shared:
            outputs = [beside.head.struct]
        self._struct = HeadsStruct(
            config.num_heads,
            config.num_layers,
            config.hidden_size,
            config.vocab_size,
            (BlockStruct * len(blocks))(*blocks),
            (LinearStruct * len(outputs))(*outputs),
            shared,
        )
        free_numbers(heads)
        trim_heap()

    def footprint(self) -> int:
        return self.nbytes

    def forward(self, rows: Tensor, first: int, count: int) -> Tensor:
        given, logits = self._rows(rows, first, count)
        self._run("slipstream_heads", self._struct, given)
        return logits

    def draft_chain(self, states: Tensor, token_ids: Seq[int], chains: Chains) -> list[list[int]]:
        if not self.reads_tokens:
            given, _ = self._rows(states, 0, chains.depth)
            self._run("slipstream_draft_medusa", self._struct, given, chains.struct)
            return chains.take_struct()
        states = states.contiguous()
        logits = native.empty_rows(len(states), self._vocab_size)
        rows = ForwardBatch(
            [RowGroup(range(1), 0, [token_id], [0]) for token_id in token_ids]
        )  # stored nowhere
        batch = BatchStruct(len(states), len(states), 0, 0, *rows.addresses()[:9], logits=logits.data_ptr())
        embedder, given_at = self._beside.struct, ctypes.c_void_p(states.data_ptr())
        with self._lock:
            native.library().slipstream_draft_hydra(
                *map(ctypes.byref, (self._struct, embedder, batch)),
                given_at,
                ctypes.byref(chains.struct),
                self._scratch,
                self.num_threads,
            )
        return chains.take_struct()

    def _rows(self, rows: Tensor, first: int, count: int) -> tuple[HeadRowsStruct, Tensor]:
        rows = rows.contiguous()
        logits = native.empty_rows(count, len(rows), self._vocab_size)
        given = HeadRowsStruct(len(rows), first, count, 0, rows.data_ptr(), logits.data_ptr())
        given.kept = (rows, logits)
        return given, logits

    def _linear(self, linear: Any, kernel: Kernel) -> LinearStruct:
        """A null one for the identity."""
        if not isinstance(linear, nn.Linear):
            return LinearStruct()
        return self._pack([linear], kernel).struct
