"""Block heads in the CPU kernels: a block is a pass of the fused decoder over the head's own layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from slipstream.draft.heads.block_executor import BlockExecutor, behind_layers, block_views, fits_decoder
from slipstream.draft.heads.dflash_head import DFlashHead
from slipstream.draft.heads.packed_head import PackedHead
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu import native
from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.packed_model import PackedModel
from slipstream.models.cpu.packed_weight import PackedWeight
from slipstream.models.cpu.pages import free_numbers, trim_heap
from slipstream.models.cpu.structs import TABLE_KINDS, LevelsStruct, ModelStruct
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.families.activations import ACTIVATIONS
from slipstream.models.families.frequencies import STATIC_ROTARY
from slipstream.models.families.parts import LayerParts, NormParts
from slipstream.models.linear.formats import WeightFormat


class NativeBlocks(PackedHead, BlockExecutor):
    """Takes over the weights of a head; those of its layers are gone afterwards."""

    @classmethod
    def refusal(cls, head: DFlashHead, target: CausalLM, fmt: WeightFormat) -> str | None:
        config = head.config
        width = target.hidden_size if head.embedding is None else head.embedding.shape[1]
        if fmt.kernel is None:
            return "its weight format has no kernel"
        if config.hidden_act not in ACTIVATIONS or head.rotary.rope_type not in STATIC_ROTARY:
            return "the kernels do not know its activation or its rotary embedding"
        if not fits_decoder(config):
            return "it has convolutions or scales, or its layers do not all see the same rows"
        return None if width == config.hidden_size else "its embeddings are of another width"

    def __init__(self, head: DFlashHead, target: CausalLM, fmt: WeightFormat) -> None:
        PackedModel.__init__(self)
        BlockExecutor.__init__(self, head, target, fmt)
        kernel, executor = fmt.kernel, target.executor
        assert isinstance(executor, CpuKernels)
        assert kernel is not None
        self._executor = executor  # whose weights the structs point to
        self._pack_context(head, kernel)
        self._struct = self._model(head, kernel)
        behind = set(behind_layers(head).children())
        for part in set(head.children()) - behind:
            free_numbers(part)
        trim_heap()

    def _pack_context(self, head: DFlashHead, kernel: Kernel) -> None:
        """What makes entries of features. The projections of all layers are one; the layers have them once more."""
        layers: list[Any] = list(head.layers)
        attention = [layer.self_attn for layer in layers]
        linears = [linear for each in attention for linear in (each.k_proj, each.v_proj)]
        self._projections = PackedWeight(
            [each.weight for each in linears], [each.bias for each in linears], kernel
        )
        self._kept.append(self._projections)
        self._fc = self._pack([head.fc], kernel)
        norms = [head.hidden_norm.weight, *(each.k_norm.weight for each in attention)]
        self._context_norm, *key_norms = (norm.detach().float().clone() for norm in norms)
        self._key_norms = torch.stack(key_norms)[:, None]  # [layers, 1, dim]
        self._kept += [self._context_norm, self._key_norms]

    def _model(self, head: DFlashHead, kernel: Kernel) -> ModelStruct:
        """The head as a decoder: what embeds tokens and the output layer are the target's or its own."""
        target = self._executor.struct
        embedding, kind, scale = target.embedding, target.embedding_kind, target.embedding_scale
        if head.embedding is not None:
            self._embedding = self._keep_table(head.embedding)
            embedding, kind, scale = self._embedding.data_ptr(), TABLE_KINDS[self._embedding.dtype], 1.0
        output = target.head if head.lm_head is None else self._pack([head.lm_head], kernel).struct
        norm: Any = head.norm
        return self._decoder(
            self.config,
            head.rotary,
            [_parts(layer) for layer in head.layers],
            kernel,
            vocab=output.out_features,
            embedding_scale=scale,
            embedding_kind=kind,
            embedding=embedding,
            final_norm=self._norm(NormParts(norm.weight)),
            head=output,
            # An embedding that is packed is read out of this; a target without a table reads its output layer.
            table=target.table if target.table.panels else target.head,
        )

    def footprint(self) -> int:
        return self.nbytes + BlockExecutor.footprint(self)

    def store(self, rows: ForwardBatch, pool: KVPool, features: Tensor) -> None:
        config, device = self.config, features.device
        sizes = (config.num_layers, 2, config.num_key_value_heads, config.head_dim)
        context = self._fc.multiply(features)
        context = rms_norm(context, context.shape[1:], self._context_norm, config.rms_norm_eps)
        keys, values = (
            self._projections.multiply(context).view(-1, *sizes).unbind(2)
        )  # [N, layers, heads, dim]
        keys = rms_norm(keys, keys.shape[3:], eps=config.rms_norm_eps) * self._key_norms
        keys = self._rotated(keys, rows.on(device).positions)
        where = pool.index(rows.slots_on(device))
        for layer in range(config.num_layers):
            pool.write(layer, where, keys[:, layer].transpose(0, 1), values[:, layer].transpose(0, 1))

    def forward(self, blocks: Seq[RowGroup], pool: KVPool) -> tuple[Tensor, Tensor]:
        (rows,) = block_views(blocks, self.config).values()
        logits = native.empty_rows(rows.num_logit_rows, self._struct.vocab)
        states = native.empty_rows(rows.num_rows, self.config.hidden_size)
        batch = self._batch(rows, pool, logits, {self.num_layers: states})
        self._run("slipstream_forward", self._struct, batch)
        by_block = (len(blocks), -1)
        return states.view(*by_block, states.shape[1]), logits.view(*by_block, logits.shape[1])

    def draw_level(self, chains: Chains, logits: Tensor, growing: Seq[int]) -> list[int]:
        level, numbers = len(chains.drawn[growing[0]]), np.array(growing, dtype=np.int64)
        levels = self._levels(logits.contiguous(), None)
        native.library().slipstream_draw_level(
            ctypes.byref(chains.struct), level, numbers.ctypes.data, len(growing), ctypes.byref(levels)
        )
        return chains.take_level(growing)

    def draw_levels(self, chains: Chains, logits: Tensor, firsts: Seq[int]) -> list[list[int]]:
        begins = np.array(firsts, dtype=np.int64)
        levels = self._levels(logits, begins.ctypes.data)
        native.library().slipstream_draw_levels(
            ctypes.byref(chains.struct), len(firsts), ctypes.byref(levels)
        )
        return chains.take_struct()

    def _levels(self, logits: Tensor, firsts: int | None) -> LevelsStruct:
        ids = self._token_ids
        levels = LevelsStruct(
            logits.data_ptr(), firsts, logits.shape[1], None if ids is None else ids.data_ptr()
        )
        levels.kept = logits
        return levels

    def _rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """[N, layers, heads, dim] at these positions, [N]"""
        angles = (positions[:, None].float() * self._frequencies)[:, None, None]
        cosines, sines = angles.cos() * self._scales, angles.sin() * self._scales
        low, high = keys.chunk(2, dim=-1)
        return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)


def _parts(layer: Any) -> LayerParts:
    attention, mlp = layer.self_attn, layer.mlp
    return LayerParts(
        attention_norm=NormParts(layer.input_layernorm.weight),
        mlp_norm=NormParts(layer.post_attention_layernorm.weight),
        query_norm=NormParts(attention.q_norm.weight),
        key_norm=NormParts(attention.k_norm.weight),
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        output=attention.o_proj,
        gate_up=(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
    )
