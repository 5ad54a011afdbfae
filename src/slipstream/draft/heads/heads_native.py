"""Medusa and Hydra heads in the CPU kernels: all levels of a chain in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor, nn

from slipstream.draft.heads.hydra_head import HydraHeads
from slipstream.draft.heads.medusa_head import MedusaHeads
from slipstream.models.causal_lm import CausalLM
from slipstream.models.cpu import native
from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.packed_model import PackedModel
from slipstream.models.cpu.pages import free_numbers, trim_heap
from slipstream.models.cpu.structs import BatchStruct, BlockStruct, HeadRowsStruct, HeadsStruct, LinearStruct
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.rows import RowGroup, Rows


def fuse_heads(
    heads: MedusaHeads | HydraHeads, target: CausalLM, quantization: str | None
) -> NativeHeads | None:
    """Take over heads that draft for `target`, in this weight format; None where the kernels do not compute them.

    They do where they compute the target, whose format is taken without `quantization`.
    """
    kernel = target.format_beside(quantization).kernel
    if not isinstance(target.executor, CpuKernels) or kernel is None:
        return None
    return NativeHeads(heads, target.executor, kernel)


class NativeHeads(PackedModel):
    """Takes over the weights of a set of heads; those of `heads` are gone afterwards."""

    num_layers = 0

    def __init__(self, heads: MedusaHeads | HydraHeads, target: CpuKernels, kernel: Kernel) -> None:
        super().__init__()
        config = heads.config
        self._vocab_size = config.vocab_size
        self._target = target  # whose weights the structs point to
        blocks = [
            BlockStruct(self._linear(block.linear, kernel), self._linear(block.res_connection, kernel))
            for head in heads.blocks
            for block in head  # type: ignore[attr-defined]
        ]
        outputs = [self._linear(projection, kernel) for projection in heads.projections]
        shared = not outputs
        if shared:
            outputs = [target.head.struct]
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

    def forward(self, rows: Tensor, first: int, count: int) -> Tensor:
        """Logits [count, n, vocab] of the heads from `first` on, all over the same rows [n, width]."""
        given, logits = self._rows(rows, first, count)
        self._run("slipstream_heads", self._struct, given)
        return logits

    def draft_medusa(self, states: Tensor, chains: Chains) -> list[list[int]]:
        """As `CpuKernels.draft`, from the target's states [chains, hidden], which every head reads."""
        given, _ = self._rows(states, 0, chains.depth)
        self._run("slipstream_draft_medusa", self._struct, given, chains.struct)
        return chains.take_struct()

    def draft_hydra(self, states: Tensor, token_ids: Seq[int], chains: Chains) -> list[list[int]]:
        """As `CpuKernels.draft`, from the target's states [chains, hidden] and the tokens behind them."""
        states = states.contiguous()
        logits = native.empty_rows(len(states), self._vocab_size)
        rows = Rows([RowGroup(range(1), 0, [token_id], [0]) for token_id in token_ids])  # stored nowhere
        batch = BatchStruct(len(states), len(states), 0, 0, *rows.addresses()[:9], logits=logits.data_ptr())
        embedder, given = self._target.struct, ctypes.c_void_p(states.data_ptr())
        with self._lock:
            native.library().slipstream_draft_hydra(
                *map(ctypes.byref, (self._struct, embedder, batch)),
                given,
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
