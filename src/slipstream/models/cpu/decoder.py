"""A whole forward pass in one call: the CPU kernels' decoder for models that are shaped like Llama.

It takes over Transformers models of the families in `families.py`; `misfit` says why it cannot take another. Weights
move into the kernels' layout layer by layer and are held once. Rows are computed independently of each other, bit for
bit, so neither drafts nor neighbours can change a row's result.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from ctypes import Structure
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.kv.pool import KVPool
from slipstream.models.attention.base import Variant
from slipstream.models.cpu import native, threads
from slipstream.models.cpu.chains import Chains
from slipstream.models.cpu.families import FAMILIES, Family, LayerParts, find_family
from slipstream.models.cpu.frequencies import inverse_frequencies
from slipstream.models.cpu.native import BatchStruct, Kernel, LayerStruct, ModelStruct, PackedWeight
from slipstream.models.matrices import row_dtype
from slipstream.models.rows import Rows


class PackedModel:
    """Weights in the kernels' layout, and what passes over them need."""

    num_layers: int
    _embedding: Tensor | None = None
    """A table that is not multiplied with."""

    def __init__(self) -> None:
        self._kept: list[Any] = []  # what the structs point into
        self._scratch = native.library().slipstream_new_scratch()
        # Not at exit: a daemon thread may be in the middle of a pass.
        finalize(self, native.library().slipstream_free_scratch, self._scratch).atexit = False
        self._lock = threading.Lock()
        self.num_threads = threads.available()
        self._pools: WeakKeyDictionary[KVPool, list[Any]] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held."""
        return sum(int(kept.nbytes) for kept in self._kept)

    @property
    def read_bytes(self) -> int:
        """Bytes that every pass must read: all weights but an embedding table of its own, without padding."""
        tables = 0 if self._embedding is None else int(self._embedding.nbytes)
        return (
            sum(
                kept.least_bytes if isinstance(kept, PackedWeight) else int(kept.nbytes)
                for kept in self._kept
            )
            - tables
        )

    @property
    def linears(self) -> list[PackedWeight]:
        """The weights of all layers and the output layer."""
        return [kept for kept in self._kept if isinstance(kept, PackedWeight)]

    @property
    def num_read(self) -> int:
        """How many weights every pass multiplies with."""
        return sum(linear.num_weights for linear in self.linears)

    def _run(self, function: str, *structs: Structure) -> None:
        """Call one of the kernels that compute whole passes."""
        with self._lock:
            getattr(native.library(), function)(*map(ctypes.byref, structs), self._scratch, self.num_threads)

    def _batch(
        self,
        rows: Rows,
        pool: KVPool,
        logits: Tensor,
        hidden: Mapping[int, Tensor] | None = None,
        layers: Sequence[int] | None = None,
    ) -> BatchStruct:
        """The rows of a pass that writes `logits` [wanted rows, vocab] and the `hidden` states of some layers."""
        if not rows.contiguous:
            raise ValueError("the native kernels read contiguous slots; give the cache another layout")
        hidden = hidden or {}
        keys, values, key_scales, value_scales = self._addresses(pool)
        tap_layers = np.array(list(hidden), dtype=np.int64)
        taps = (ctypes.c_void_p * len(hidden))(*(tensor.data_ptr() for tensor in hidden.values()))
        run = np.array(range(self.num_layers) if layers is None else layers, dtype=np.int64)
        batch = BatchStruct(
            rows.num_rows,
            rows.num_logit_rows,
            len(hidden),
            len(run),
            *rows.addresses()[:9],  # token_ids to logit_rows
            ctypes.addressof(keys),
            ctypes.addressof(values),
            tap_layers.ctypes.data,
            ctypes.addressof(taps),
            logits.data_ptr(),
            run.ctypes.data,
            pool.num_slots,
            native.ENTRY_TYPES[pool.cache_dtype],
            ctypes.addressof(key_scales),
            ctypes.addressof(value_scales),
        )
        # As long as the kernels may read them:
        batch.kept = (rows, keys, values, key_scales, value_scales, tap_layers, taps, run)
        return batch

    def _layer(self, parts: LayerParts, kernel: Kernel, sliding_window: int | None = None) -> LayerStruct:
        return LayerStruct(
            attention_norm=None if parts.attention_norm is None else self._keep(parts.attention_norm),
            mlp_norm=self._keep(parts.mlp_norm),
            query_norm=None if parts.query_norm is None else self._keep(parts.query_norm),
            key_norm=None if parts.key_norm is None else self._keep(parts.key_norm),
            qkv=self._pack(parts.qkv, kernel).struct,
            output=self._pack([parts.output], kernel).struct,
            gate_up=self._pack(parts.gate_up, kernel, interleaved=True).struct,
            down=self._pack([parts.down], kernel).struct,
            sliding_window=sliding_window or 0,
        )

    def _pack(self, linears: Sequence[nn.Linear], kernel: Kernel, interleaved: bool = False) -> PackedWeight:
        packed = PackedWeight(
            [linear.weight for linear in linears],
            [linear.bias for linear in linears],
            kernel,
            interleaved,
            give_back=True,
        )
        self._kept.append(packed)
        for linear in linears:
            native.release(linear.weight)
        return packed

    def _keep(self, tensor: Tensor) -> int:
        kept = tensor.detach().float().contiguous().clone()
        self._kept.append(kept)
        return kept.data_ptr()

    def _keep_table(self, table: Tensor) -> Tensor:
        """A table [n, width] in its own type, one that the kernels widen."""
        table = table.detach()
        kept = native.moved(table if table.dtype in native.TABLE_KINDS else table.float())
        self._kept.append(kept)
        return kept

    def _addresses(self, pool: KVPool) -> list[Any]:
        """Of the pool's keys, values, key scales and value scales: one a layer."""
        if pool not in self._pools:
            array = ctypes.c_void_p * self.num_layers
            kinds = (pool.keys, pool.values, pool.key_scales, pool.value_scales)
            self._pools[pool] = [array(*(tensor.data_ptr() for tensor in kind)) for kind in kinds]
        return self._pools[pool]


class Decoder(PackedModel):
    """A model in the kernels' layout: takes over a CPU model that computes in float32 and is no `misfit`."""

    def __init__(self, model: Any, family: Family, variants: Sequence[Variant], kernel: Kernel) -> None:
        super().__init__()
        config = model.config
        part = partial(family.part, model)
        head, table, rotary = part(family.head), part(family.embedding).weight, part(family.rotary)
        norm, model_layers = part(family.final_norm), part(family.layers)
        self.num_layers = len(model_layers)
        self.vocab_size = head.weight.shape[0]
        self.hidden_size = config.hidden_size
        tied = head.weight.data_ptr() == table.data_ptr()
        query_width = family.layer_parts(model_layers[0]).qkv[0].out_features
        layers = (LayerStruct * self.num_layers)(
            *(
                self._packed_layer(layer, family, variant, kernel)
                for layer, variant in zip(model_layers, variants, strict=True)
            )
        )
        frequencies = inverse_frequencies(rotary)
        final_norm = self._keep(norm.weight)
        self._head = self._pack([head], kernel)
        self._embedding = None if tied else self._keep_table(table)
        self._struct = ModelStruct(
            num_layers=self.num_layers,
            hidden=self.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=query_width // config.num_attention_heads,
            rotary_dim=2 * len(rotary.inv_freq),
            intermediate=config.intermediate_size,
            vocab=self.vocab_size,
            norm_epsilon=family.part(norm, family.norm_epsilon),
            attention_scale=variants[0].scaling,
            rotary_scale=rotary.attention_scaling,
            embedding_kind=0 if self._embedding is None else native.TABLE_KINDS[self._embedding.dtype],
            inverse_frequencies=frequencies.data_ptr(),
            embedding=None if self._embedding is None else self._embedding.data_ptr(),
            final_norm=final_norm,
            head=self._head.struct,
            layers=layers,
        )
        self._frequencies = frequencies
        model.to_empty(device="meta")

    def forward(
        self,
        rows: Rows,
        pool: KVPool,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `CausalLM.forward`; returns logits and hidden states. A run must lie in consecutive slots."""
        logits = native.empty_rows(rows.num_logit_rows, self.vocab_size)
        hidden = {layer: native.empty_rows(rows.num_rows, self.hidden_size) for layer in hidden_layers}
        self._run("slipstream_forward", self._struct, self._batch(rows, pool, logits, hidden, layers))
        return logits, hidden

    def draft(
        self, rows: Rows, pool: KVPool, chains: Chains, layers: Sequence[int] | None = None
    ) -> list[list[int]]:
        """The tokens of whole chains, behind the rows whose logits are wanted; see `Chains` and `CausalLM.forward`.

        Their entries but the last tokens' are in `pool`, behind those rows', where a sequence must have slots.
        """
        logits = native.empty_rows(rows.num_logit_rows, self.vocab_size)
        self._run(
            "slipstream_draft", self._struct, self._batch(rows, pool, logits, None, layers), chains.struct
        )
        return chains.tokens()

    @property
    def struct(self) -> ModelStruct:
        """As the kernels see it; valid as long as this object lives."""
        return self._struct

    @property
    def head(self) -> PackedWeight:
        """The output layer."""
        return self._head

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `CausalLM.embed`; a tied embedding is read out of the packed head."""
        flat = token_ids.reshape(-1)
        rows = self._head.unpack(flat) if self._embedding is None else self._embedding[flat].float()
        return rows.view(*token_ids.shape, self.hidden_size)

    def project(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.project`."""
        logits = self._head.multiply(hidden.reshape(-1, self.hidden_size))
        return logits.view(*hidden.shape[:-1], self.vocab_size)

    def _packed_layer(
        self, layer: nn.Module, family: Family, variant: Variant, kernel: Kernel
    ) -> LayerStruct:
        struct = self._layer(family.layer_parts(layer), kernel, variant.sliding_window)
        layer.to_empty(device="meta")
        native.trim_heap()
        return struct


def misfit(model: Any, variants: Sequence[Variant], kernel: Kernel | None) -> str | None:
    """Why the kernels' decoder does not compute a model; None where it does.

    `variants` says how each layer attends, `kernel` how the kernels hold the weight format, if they can.
    """
    family = find_family(model)
    if family is None:
        return f"the fused decoder knows {', '.join(FAMILIES.names())}"
    if kernel is None:
        return "its weight format has no kernel"
    return next(_misfits(model, family, variants), None)


def fuse(model: Any, variants: Sequence[Variant], kernel: Kernel | None) -> Decoder:
    """Take over a float32 CPU model that is no `misfit`."""
    family = find_family(model)
    assert family is not None
    assert kernel is not None
    return Decoder(model, family, variants, kernel)


def _misfits(model: Any, family: Family, variants: Sequence[Variant]) -> Iterator[str]:
    """Why the kernels' decoder does not compute this model."""
    if model.device.type != "cpu" or row_dtype(model) != torch.float32:
        yield f"the fused decoder computes float32 on a CPU, not {row_dtype(model)} on {model.device.type}"
    yield from family.misfits(model, variants)
