"""Whole passes of a Transformers model in the GPU's kernels, written once for all families.

It computes what `models.families` describes. A layer is some ten kernels: add and norm, the product for queries, keys
and values, rotation, attention (which writes the entries), its output's product, add and norm, the product for gate
and up, activation, the last product. Experts compute in Transformers' own code. The states between layers are in the
model's own type, as Transformers has them; in a kernel all is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.attention.base import AttentionPass, Variant
from slipstream.models.batch import BatchTensors
from slipstream.models.cuda.decoder_layer import (
    DecoderLayer,
    LayerSizes,
    Packing,
    device_weight,
    forget_numbers,
)
from slipstream.models.cuda.linear import DeviceWeight
from slipstream.models.cuda.norm import Norm, joined
from slipstream.models.cuda.rotation import Turns
from slipstream.models.executor.base import PassOutput, ReadWeights
from slipstream.models.families.experts import ExpertParts
from slipstream.models.families.family import Family
from slipstream.models.families.frequencies import Rotation
from slipstream.models.families.parts import LayerParts, NormParts
from slipstream.models.files.stored import StoredEmbedding


class GpuDecoder:
    """The layers, final norm and output layer of a model that is no misfit of its family."""

    def __init__(
        self, model: Any, family: Family, variants: Sequence[Variant], dtype: torch.dtype, packing: Packing
    ) -> None:
        """`variants` says how each layer attends, `dtype` is that of the states."""
        part = family.part
        layers = [family.layer_parts(layer) for layer in part(model, family.layers)]
        sizes = _sizes(model, family, layers[0], dtype)
        self._read_numbers(model, family)
        ways = family.rotations(model)
        self._rotations: list[Rotation] = list(dict.fromkeys(way for way in ways if way is not None))
        self._ways = [None if way is None else self._rotations.index(way) for way in ways]
        self._frequencies = [way.inverse_frequencies.to(model.device) for way in self._rotations]
        mixtures = [
            None if family.experts is None else part(layer, family.experts.rpartition(".")[0])
            for layer in part(model, family.layers)
        ]
        self.layers = [
            DecoderLayer(number, *own, sizes, packing)
            for number, own in enumerate(zip(layers, mixtures, variants, strict=True))
        ]
        norm = Norm.of(NormParts.of(part(model, family.final_norm), family.norm_offset), sizes.epsilon)
        assert norm is not None
        self._final_norm, self._dtype = norm, dtype
        self._take_head(part(model, family.head), part(model, family.embedding), packing)

    def _take_head(self, head: Any, embedding: Any, packing: Packing) -> None:
        """The output layer and the embedding, whose rows are read out of packed weights where it has no other."""
        is_stored = isinstance(embedding, StoredEmbedding)
        if is_stored:
            is_tied = embedding.linear is head
        else:
            is_tied = isinstance(head, nn.Linear) and head.weight.data_ptr() == embedding.weight.data_ptr()
        fmt = None if packing.fmt is None else packing.fmt.of_head()
        self._head = device_weight([head], self._dtype, packing._replace(fmt=fmt))
        is_read = is_stored or (is_tied and packing.frees and fmt is not None)
        self._embedding, self._table = embedding, self._head if is_read and is_tied else None
        if is_stored and not is_tied:
            self._table = device_weight([embedding.linear], self._dtype, packing._replace(fmt=None))
        elif is_read and not is_stored:
            forget_numbers(embedding)
        table = embedding.weight if self._table is None else self._table
        self._table_bytes = 0 if is_tied else int(table.nbytes)

    def _read_numbers(self, model: Any, family: Family) -> None:
        self._is_parallel = bool(family.number(model, family.parallel, 0.0))
        self._residual_scale = family.number(model, family.residual_scale, 1.0)
        self._input_scale = family.number(model, family.input_scale, 1.0)
        self._embedding_scale = family.number(model, family.embedding_scale, 1.0)
        self._logit_divisor = family.number(model, family.logit_divisor, 1.0)
        self._logit_cap = family.number(model, family.logit_cap, 0.0)

    def run(
        self,
        batch: BatchTensors,
        embedded: Tensor,
        attention: AttentionPass,
        hidden_layers: Sequence[int],
        layers: Sequence[int] | None = None,
    ) -> PassOutput:
        """A pass over rows whose embeddings are `embedded`; `layers` are those that run, None: all."""
        turns = [
            Turns.of(batch.positions, frequencies, way.scale)
            for frequencies, way in zip(self._frequencies, self._rotations, strict=True)
        ]
        states = embedded if self._input_scale == 1.0 else embedded * self._input_scale
        change: Tensor | None = None
        behind: Norm | None = None
        hidden: dict[int, Tensor] = {}
        scale = self._residual_scale
        for number in range(len(self.layers)) if layers is None else layers:
            layer, way = self.layers[number], self._ways[number]
            states, rows = joined(states, change, behind, layer.attention_norm, scale)
            if number in hidden_layers:
                hidden[number] = states
            attended = layer.attend(rows, attention, None if way is None else turns[way])
            if self._is_parallel:
                change = layer.feed(states if layer.mlp_norm is None else layer.mlp_norm(states)) + attended
            else:
                states, rows = joined(states, attended, layer.attended_norm, layer.mlp_norm, scale)
                change = layer.feed(rows)
            behind = layer.mlp_out_norm
        wants_last = len(self.layers) in hidden_layers
        if not wants_last:
            states = states[batch.logit_rows]
            change = None if change is None else change[batch.logit_rows]
        _, rows = joined(states, change, behind, self._final_norm, scale)
        if wants_last:
            hidden[len(self.layers)], rows = rows, rows[batch.logit_rows]
        return PassOutput(self._scaled(self.project(rows)), hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., width], as the model's own embedding has them."""
        if self._table is None:
            embedded: Tensor = self._embedding(token_ids)
            return embedded
        rows = self._table.unpack(token_ids.reshape(-1)).to(self._dtype)
        if self._embedding_scale != 1.0:
            rows = rows * rows.new_full((), self._embedding_scale)  # rounded to their type first
        return rows.view(*token_ids.shape, -1)

    def project(self, rows: Tensor) -> Tensor:
        """[..., width], behind the final norm -> [..., vocab]"""
        logits = self._head(rows.reshape(-1, rows.shape[-1]))
        return logits.view(*rows.shape[:-1], -1)

    def _scaled(self, logits: Tensor) -> Tensor:
        """In Transformers' own operators: they round as the model does."""
        if self._logit_divisor != 1.0:
            logits = logits / self._logit_divisor
        if self._logit_cap:
            logits = torch.tanh(logits / self._logit_cap) * self._logit_cap
        return logits

    @property
    def reads(self) -> ReadWeights:
        """What a pass of one row reads; of experts those that it is sent to."""
        number = float(sum(linear.num_weights for linear in self._linears))
        num_bytes = float(self._dense_bytes)
        for experts in self._experts:
            share = experts.num_chosen / experts.num_experts
            for tensor in experts.parameters:
                read = 1.0 if tensor is experts.router or tensor is experts.router_bias else share
                number += read * tensor.numel() if tensor.ndim == 3 or tensor is experts.router else 0
                num_bytes += read * tensor.nbytes
        return ReadWeights(round(number), round(num_bytes))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are held; of the model's own norms there is a copy."""
        of_experts = sum(int(tensor.nbytes) for experts in self._experts for tensor in experts.parameters)
        return self._dense_bytes + self._table_bytes + of_experts

    @property
    def _dense_bytes(self) -> int:
        """Bytes of what every pass reads."""
        return sum(linear.nbytes for linear in self._linears) + sum(norm.nbytes for norm in self._norms)

    @property
    def _linears(self) -> list[DeviceWeight]:
        return [self._head, *(linear for layer in self.layers for linear in layer.linears)]

    @property
    def _experts(self) -> list[ExpertParts]:
        return [layer.experts for layer in self.layers if layer.experts is not None]

    @property
    def _norms(self) -> list[Norm]:
        return [self._final_norm, *(norm for layer in self.layers for norm in layer.norms)]


def _sizes(model: Any, family: Family, first: LayerParts, dtype: torch.dtype) -> LayerSizes:
    config = model.config
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return LayerSizes(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=sum(linear.out_features for linear in first.qkv) // (num_heads + 2 * num_kv_heads),
        activation=family.activation_number(model),
        is_gated=first.is_gated,
        has_interleaved_heads=bool(first.interleaved_heads),
        epsilon=float(family.part(family.part(model, family.final_norm), family.norm_epsilon)),
        dtype=dtype,
    )
