"""A whole forward pass in one call: the CPU kernels' decoder for models that are shaped like Llama.

Pre-norm layers of rotary grouped-query attention and a gated MLP cover most families; `fuse` takes over a Transformers
model of one of them and leaves every other alone. Weights move into the kernels' layout layer by layer and are held
once. Rows are computed independently of each other, bit for bit, so that neither drafts nor neighbours can change what
a row says.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.kv.pool import KVPool
from slipstream.models.attention.packed import Variant
from slipstream.models.cpu import native, threads
from slipstream.models.cpu.native import BatchStruct, Kernel, LayerStruct, ModelStruct, PackedWeight
from slipstream.models.rows import RowGroup

log = logging.getLogger(__name__)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers are computed as kernels/decoder.h says; the load-time canary checks each model all the same."""

STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not change with the length of the text."""


class Decoder:
    """A model in the kernels' layout. Make one with `fuse`."""

    def __init__(self, model: Any, variants: Sequence[Variant], kernel: Kernel) -> None:
        config = model.config
        self.num_layers = config.num_hidden_layers
        self.vocab_size = model.lm_head.weight.shape[0]
        self.hidden_size = config.hidden_size
        self._kept: list[Any] = []  # what the structs point into
        rotary = model.model.rotary_emb
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        embedding = None if tied else self._keep(model.model.embed_tokens.weight)
        self._embedding = None if tied else self._kept[-1]
        layers = (LayerStruct * self.num_layers)(
            *(
                self._layer(layer, variant, kernel)
                for layer, variant in zip(model.model.layers, variants, strict=True)
            )
        )
        frequencies = rotary.inv_freq.float().contiguous().clone()
        final_norm = self._keep(model.model.norm.weight)
        self._head = self._pack([model.lm_head], kernel)
        self._struct = ModelStruct(
            num_layers=self.num_layers,
            hidden=self.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=model.model.layers[0].self_attn.head_dim,
            rotary_dim=2 * len(rotary.inv_freq),
            intermediate=config.intermediate_size,
            vocab=self.vocab_size,
            norm_epsilon=model.model.norm.variance_epsilon,
            attention_scale=variants[0].scaling,
            rotary_scale=rotary.attention_scaling,
            inverse_frequencies=frequencies.data_ptr(),
            embedding=embedding,
            final_norm=final_norm,
            head=self._head.struct,
            layers=layers,
        )
        self._frequencies = frequencies
        self._scratch = native.library().slipstream_new_scratch()
        # Not at exit: a daemon thread may be in the middle of a pass.
        finalize(self, native.library().slipstream_free_scratch, self._scratch).atexit = False
        self._lock = threading.Lock()
        self.num_threads = threads.available()
        self._pools: WeakKeyDictionary[KVPool, tuple[Any, Any]] = WeakKeyDictionary()
        model.to_empty(device="meta")

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
    def num_read(self) -> int:
        """How many weights every pass multiplies with."""
        return sum(kept.num_weights for kept in self._kept if isinstance(kept, PackedWeight))

    def forward(
        self,
        groups: Sequence[RowGroup],
        pool: KVPool,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `CausalLM.forward`."""
        rows = _Rows(groups)
        logits = native.empty_rows(len(rows.logit_rows), self.vocab_size)
        hidden = {layer: native.empty_rows(rows.num_rows, self.hidden_size) for layer in hidden_layers}
        keys, values = self._addresses(pool)
        tap_layers = np.array(list(hidden), dtype=np.int64)
        taps = (ctypes.c_void_p * len(hidden))(*(tensor.data_ptr() for tensor in hidden.values()))
        run = np.array(range(self.num_layers) if layers is None else layers, dtype=np.int64)
        batch = BatchStruct(
            rows.num_rows,
            len(rows.logit_rows),
            len(hidden),
            len(run),
            *rows.addresses(),
            ctypes.addressof(keys),
            ctypes.addressof(values),
            tap_layers.ctypes.data,
            ctypes.addressof(taps),
            logits.data_ptr(),
            run.ctypes.data,
        )
        with self._lock:
            native.library().slipstream_forward(
                ctypes.byref(self._struct), ctypes.byref(batch), self._scratch, self.num_threads
            )
        return logits, hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `CausalLM.embed`; a tied embedding is read out of the packed head."""
        flat = token_ids.reshape(-1)
        rows = self._head.unpack(flat) if self._embedding is None else self._embedding[flat]
        return rows.view(*token_ids.shape, self.hidden_size)

    def project(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.project`."""
        logits = self._head.multiply(hidden.reshape(-1, self.hidden_size))
        return logits.view(*hidden.shape[:-1], self.vocab_size)

    def _layer(self, layer: Any, variant: Variant, kernel: Kernel) -> LayerStruct:
        attention, mlp = layer.self_attn, layer.mlp
        struct = LayerStruct(
            attention_norm=self._keep(layer.input_layernorm.weight),
            mlp_norm=self._keep(layer.post_attention_layernorm.weight),
            query_norm=self._keep(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
            key_norm=self._keep(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
            qkv=self._pack([attention.q_proj, attention.k_proj, attention.v_proj], kernel).struct,
            output=self._pack([attention.o_proj], kernel).struct,
            gate_up=self._pack([mlp.gate_proj, mlp.up_proj], kernel, interleaved=True).struct,
            down=self._pack([mlp.down_proj], kernel).struct,
            sliding_window=variant.sliding_window or 0,
        )
        layer.to_empty(device="meta")
        return struct

    def _pack(self, linears: list[nn.Linear], kernel: Kernel, interleaved: bool = False) -> PackedWeight:
        packed = PackedWeight(
            [linear.weight for linear in linears],
            [linear.bias for linear in linears],
            kernel,
            interleaved,
        )
        self._kept.append(packed)
        for linear in linears:
            native.release(linear.weight)
        return packed

    def _keep(self, tensor: Tensor) -> int:
        kept = tensor.detach().float().contiguous().clone()
        self._kept.append(kept)
        return kept.data_ptr()

    def _addresses(self, pool: KVPool) -> tuple[Any, Any]:
        if pool not in self._pools:
            array = ctypes.c_void_p * self.num_layers
            self._pools[pool] = (
                array(*(tensor.data_ptr() for tensor in pool.keys)),
                array(*(tensor.data_ptr() for tensor in pool.values)),
            )
        return self._pools[pool]


def fuse(model: Any, variants: Sequence[Variant], kernel: Kernel | None) -> Decoder | None:
    """Take over a float32 CPU model; None, with the model untouched, when it is not of the kernels' shape.

    `variants` says how each layer attends, `kernel` how the kernels hold the weight format, if they can.
    """
    reason = "its weight format has no kernel" if kernel is None else next(_misfits(model, variants), None)
    if kernel is None or reason is not None:
        log.info("%s runs layer by layer: %s", model.config.model_type, reason)
        return None
    return Decoder(model, variants, kernel)


def _misfits(model: Any, variants: Sequence[Variant]) -> Iterator[str]:
    """Why the kernels' decoder does not compute this model."""
    config = model.config
    if config.model_type not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
        yield f"the fused decoder knows {', '.join(FAMILIES)}"
        return
    if model.device.type != "cpu" or model.dtype != torch.float32:
        yield f"the fused decoder computes float32 on a CPU, not {model.dtype} on {model.device.type}"
    if config.hidden_act not in ("silu", "swish"):
        yield f"its activation is {config.hidden_act}"
    if model.model.rotary_emb.rope_type not in STATIC_ROTARY:
        yield f"its rotary embedding is {model.model.rotary_emb.rope_type}"
    layers = model.model.layers
    parts = [part for layer in layers for part in (*layer.self_attn.children(), *layer.mlp.children())]
    linears = [part for part in (*parts, model.lm_head) if isinstance(part, nn.Linear)]
    if len(linears) != 7 * len(layers) + 1 or any(type(linear) is not nn.Linear for linear in linears):
        yield "its linear layers are not plain ones"  # a subclass may compute something else
    if any(layer.mlp.down_proj.bias is not None for layer in layers):
        yield "its MLP has biases"
    if any(variant.softcap or variant.sinks is not None for variant in variants):
        yield "its attention has capped logits or sinks"


class _Rows:
    """The rows of a pass as the kernels take them: flat int64 arrays in one buffer."""

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        run_begin: list[int] = []
        run_length: list[int] = []
        tail_size: list[int] = []
        tail_slots: list[int] = []
        tail_positions: list[int] = []
        self.logit_rows: list[int] = []
        for group in groups:
            n, first = len(group.token_ids), group.first_new_slot
            self.logit_rows.extend(len(token_ids) + row for row in group.logit_rows)
            token_ids.extend(group.token_ids)
            positions.extend(group.row_positions())
            slots.extend(range(first, first + n))
            run_begin.extend([group.start] * n)
            chain = n if group.tail_visible is None else group.num_chain
            run_length.extend(range(first - group.start + 1, first - group.start + chain + 1))
            tail_size.extend([0] * chain)
            if group.tail_visible is None:
                continue
            run = group.num_past + chain
            run_length.extend([run] * (n - chain))
            tail = group.start + run
            held = [*group.stored_positions, *group.row_positions()[chain:]]
            for visible in group.tail_visible.tolist():
                seen = [entry for entry, sees in enumerate(visible) if sees]
                tail_size.append(len(seen))
                tail_slots.extend(tail + entry for entry in seen)
                tail_positions.extend(held[entry] for entry in seen)
        self.num_rows = len(token_ids)
        parts = (
            token_ids,
            positions,
            slots,
            run_begin,
            run_length,
            list(accumulate(tail_size, initial=0)),
            tail_slots,
            tail_positions,
            self.logit_rows,
        )
        self._ends = list(accumulate(map(len, parts), initial=0))[:-1]
        self._buffer = np.array([number for part in parts for number in part], dtype=np.int64)

    def addresses(self) -> list[int]:
        """Where each array begins, in the order of `BatchStruct`."""
        base = self._buffer.ctypes.data
        return [base + 8 * end for end in self._ends]
