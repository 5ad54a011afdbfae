"""Heads in the CPU kernels: a level, or a whole chain, in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.head_executor import EagleExecutor, HeadsExecutor
from slipstream.draft.heads.packed_head import PackedHead
from slipstream.draft.heads.residual import ProjectedHeads
from slipstream.kv.pool import KVPool
from slipstream.models.batch import ForwardBatch
from slipstream.models.causal_lm import CausalLM
from slipstream.models.cpu import native
from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.packed_model import PackedModel
from slipstream.models.cpu.pages import free_numbers, trim_heap
from slipstream.models.cpu.structs import (
    BatchStruct,
    BlockStruct,
    EagleStruct,
    HeadRowsStruct,
    HeadsStruct,
    LinearStruct,
    StatesStruct,
)
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.families.frequencies import STATIC_ROTARY
from slipstream.models.families.parts import LayerParts, NormParts
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.rows import RowGroup


class NativeHeads(PackedModel, HeadsExecutor):
    """Takes over the weights of a set of heads; those of `heads` are gone afterwards."""

    num_layers = 0

    @classmethod
    def refusal(cls, head: ProjectedHeads, target: CausalLM, fmt: WeightFormat) -> str | None:
        return "its weight format has no kernel" if fmt.kernel is None else None

    def __init__(self, heads: ProjectedHeads, target: CausalLM, fmt: WeightFormat) -> None:
        PackedModel.__init__(self)
        HeadsExecutor.__init__(self, heads, target, fmt)
        kernel, executor = fmt.kernel, target.executor
        assert isinstance(executor, CpuKernels)
        assert kernel is not None
        config = heads.config
        self._vocab_size = config.vocab_size
        self._executor = executor  # whose weights the structs point to
        blocks = [
            BlockStruct(self._linear(block.linear, kernel), self._linear(block.res_connection, kernel))
            for head in heads.blocks
            for block in head  # type: ignore[attr-defined]
        ]
        outputs = [self._linear(projection, kernel) for projection in heads.projections]
        shared = not outputs
        if shared:
            outputs = [executor.head.struct]
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
        embedder, given_at = self._executor.struct, ctypes.c_void_p(states.data_ptr())
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


class NativeEagle(PackedHead, EagleExecutor):
    """Takes over the weights of a head; those of `head` are gone afterwards."""

    @classmethod
    def refusal(cls, head: EagleHead, target: CausalLM, fmt: WeightFormat) -> str | None:
        width = target.hidden_size if head.embedding is None else head.embedding.shape[1]
        if fmt.kernel is None:
            return "its weight format has no kernel"
        if head.config.hidden_act not in ("silu", "swish") or head.rotary.rope_type not in STATIC_ROTARY:
            return "the kernels do not know its activation or its rotary embedding"
        return None if width == head.config.hidden_size else "its embeddings are of another width"

    def __init__(self, head: EagleHead, target: CausalLM, fmt: WeightFormat) -> None:
        PackedModel.__init__(self)
        kernel, executor = fmt.kernel, target.executor
        assert isinstance(executor, CpuKernels)
        assert kernel is not None
        config, rotary = head.config, head.rotary
        layers: list[Any] = [head.layer, *head.upper]
        self._hidden_size, self._vocab_size = config.hidden_size, config.vocab_size
        self._executor = executor  # whose weights the structs point to
        fuses = config.version == 3
        if head.embedding is not None:
            self._keep(head.embedding)
            self._embedding = self._kept[-1]
        model = self._decoder(
            config,
            rotary,
            [_eagle_parts(each) for each in layers],
            kernel,
            vocab=config.vocab_size,
            embedding_scale=1.0,
            embedding=None if self._embedding is None else self._embedding.data_ptr(),
            final_norm=self._norm(NormParts(head.norm.weight) if fuses else None),
            head=(self._pack([head.lm_head], kernel) if fuses else executor.head).struct,
        )
        ids = head.draft_token_ids
        self._token_ids = None if torch.equal(ids, torch.arange(config.vocab_size)) else ids.clone()
        self._struct = EagleStruct(
            model=model,
            embedder=ctypes.pointer(model if self._embedding is not None else executor.struct),
            fc=self._pack([head.fc], kernel).struct,
            embedding_norm=self._keep(layers[0].input_layernorm.weight) if fuses else None,
            token_ids=None if self._token_ids is None else self._token_ids.data_ptr(),
            residual_is_normed=config.norm_before_residual,
        )
        free_numbers(head)
        trim_heap()

    def footprint(self) -> int:
        return self.nbytes

    def forward(self, rows: ForwardBatch, pool: KVPool, given: Tensor, level: int) -> tuple[Tensor, Tensor]:
        made, logits, states = self._outputs(rows, given, from_target=level == 0)
        self._run("slipstream_eagle", self._struct, self._batch(rows, pool, logits), states)
        return made, logits

    def draft_chain(self, rows: ForwardBatch, pool: KVPool, given: Tensor, chains: Chains) -> list[list[int]]:
        chains.begin(rows)
        _, logits, states = self._outputs(rows, given, from_target=True)
        batch = self._batch(rows, pool, logits)
        self._run("slipstream_draft_eagle", self._struct, batch, states, chains.struct)
        return chains.take_struct()

    def _outputs(
        self, rows: ForwardBatch, given: Tensor, from_target: bool
    ) -> tuple[Tensor, Tensor, StatesStruct]:
        given = given.contiguous()
        made = native.empty_rows(rows.num_rows, self._hidden_size)
        states = StatesStruct(given.data_ptr(), made.data_ptr(), from_target)
        states.kept = (given, made)
        return made, native.empty_rows(rows.num_logit_rows, self._vocab_size), states


def _eagle_parts(layer: Any) -> LayerParts:
    """The parts of a head's layer; the norm of the embedding that the first one reads is not among them."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = (
        layer.hidden_norm if layer.fuses else layer.input_layernorm,
        layer.post_attention_layernorm,
        attention.q_norm,
        attention.k_norm,
    )
    of_attention, of_mlp, of_queries, of_keys = (
        None if norm is None else NormParts(norm.weight) for norm in norms
    )
    return LayerParts(
        attention_norm=of_attention,
        mlp_norm=of_mlp,
        query_norm=of_queries,
        key_norm=of_keys,
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        output=attention.o_proj,
        gate_up=(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
    )
