"""Weights of whole layers in the kernels' layout, and what passes over them need."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from ctypes import Structure
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.kv.pool import KVPool
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu import native, threads
from slipstream.models.cpu.experts import PackedExperts
from slipstream.models.cpu.kernel import Kernel, common_kernel
from slipstream.models.cpu.packed_weight import PackedWeight
from slipstream.models.cpu.pages import moved, release
from slipstream.models.cpu.structs import (
    ENTRY_TYPES,
    SIXTEEN_BIT_KINDS,
    TABLE_KINDS,
    BatchStruct,
    LayerStruct,
    NormStruct,
)
from slipstream.models.families.parts import LayerParts, NormParts
from slipstream.models.linear.grouped import GroupedLinear


class PackedModel:
    """Weights in the kernels' layout, and what passes over them need."""

    num_layers: int
    _keeps_experts: bool = True
    """Whether experts that a file holds in groups stay so."""
    _embedding: Tensor | None = None
    """A table that is not multiplied with."""
    _table: PackedWeight | None = None
    """One that is packed."""
    _head: PackedWeight | None = None
    """The output layer, where it is this model's own."""

    def __init__(self) -> None:
        self._kept: list[Any] = []  # what the structs point into
        self._shared: frozenset[int] = frozenset()  # where weights begin that are packed more than once
        self._scratch = native.library().slipstream_new_scratch()
        if self._scratch is None:
            raise MemoryError("there is no memory for the rows of a pass")
        # Not at exit: a daemon thread may be in the middle of a pass.
        finalize(self, native.library().slipstream_free_scratch, self._scratch).atexit = False
        self._lock = threading.Lock()
        self.num_threads = threads.available()
        self._pools: WeakKeyDictionary[KVPool, tuple[list[Any], list[int]]] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are held."""
        return sum(int(kept.nbytes) for kept in self._kept)

    @property
    def read_bytes(self) -> int:
        """Bytes that every pass must read: all weights but an embedding table of its own, without padding.

        Of experts those that one row is sent to.
        """
        tables = 0 if self._embedding is None else int(self._embedding.nbytes)
        if self._table is not None:
            tables += self._table.least_bytes
        return (
            sum(
                kept.least_bytes if isinstance(kept, PackedWeight | PackedExperts) else int(kept.nbytes)
                for kept in self._kept
            )
            - tables
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes that passes have taken to compute with so far, as the kernels count them."""
        return int(native.library().slipstream_scratch_bytes(self._scratch))

    @property
    def linears(self) -> list[PackedWeight]:
        """The weights of all layers but their experts, and the output layer."""
        return [kept for kept in self._kept if isinstance(kept, PackedWeight) and kept is not self._table]

    @property
    def experts(self) -> list[PackedExperts]:
        """Those of all layers."""
        return [kept for kept in self._kept if isinstance(kept, PackedExperts)]

    @property
    def num_read(self) -> int:
        """How many weights every pass multiplies with; of experts those that one row is sent to."""
        kept: list[PackedWeight | PackedExperts] = [*self.linears, *self.experts]
        return sum(each.num_weights for each in kept)

    @cached_property
    def _has_sixteen_bits(self) -> bool:
        """Whether all layers are kept in 16 bits, and none has experts; the output layer need not be."""
        layers = [linear for linear in self.linears if linear is not self._head]
        return not self.experts and all(linear.struct.kind in SIXTEEN_BIT_KINDS for linear in layers)

    def _run(self, function: str, *structs: Structure) -> None:
        """Call one of the kernels that compute whole passes."""
        with self._lock:
            getattr(native.library(), function)(*map(ctypes.byref, structs), self._scratch, self.num_threads)

    def _batch(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        logits: Tensor,
        hidden: Mapping[int, Tensor] | None = None,
        layers: Sequence[int] | None = None,
    ) -> BatchStruct:
        """The rows of a pass that writes `logits` [wanted rows, vocab] and the `hidden` states of some layers."""
        if not rows.contiguous:
            raise ValueError("the native kernels read contiguous slots; give the cache another layout")
        if rows.num_fast and not self._has_sixteen_bits:
            raise ValueError("num_fast is for models whose layers are kept in 16 bits")
        tap_layers, taps, fast_rows, run = _NONE, None, _NONE, self._every_layer
        if hidden:
            tap_layers = np.array(list(hidden), dtype=np.int64)
            taps = (ctypes.c_void_p * len(hidden))(*(tensor.data_ptr() for tensor in hidden.values()))
        if layers is not None:
            run = np.array(layers, dtype=np.int64)
        if rows.num_fast:
            fast_rows = np.array(rows.fast_rows, dtype=np.int64)
        arrays, (keys, values, key_scales, value_scales) = self._addresses(pool)
        addresses = rows.addresses()
        batch = BatchStruct(
            rows.num_rows,
            rows.num_logit_rows,
            len(tap_layers),
            len(run),
            *addresses[:9],  # token_ids to logit_rows
            keys,
            values,
            _address(tap_layers),
            0 if taps is None else ctypes.addressof(taps),
            logits.data_ptr(),
            _address(run),
            pool.num_slots,
            ENTRY_TYPES[pool.cache_dtype],
            key_scales,
            value_scales,
            len(fast_rows),
            _address(fast_rows),
            *(addresses[-2:] if rows.shares else ()),
        )
        added = None if rows.added is None else rows.added.float().contiguous()
        if added is not None:
            batch.added = added.data_ptr()
        batch.kept = (
            rows,
            added,
            arrays,
            tap_layers,
            taps,
            run,
            fast_rows,
        )  # as long as the kernels may read them
        return batch

    def _layer(self, parts: LayerParts, kernel: Kernel, reach: int = 0, rotary: int = 0) -> LayerStruct:
        """`rotary` numbers the frequencies; -1: none."""
        heads = [
            None if norm is None else self._norm(norm).weight for norm in (parts.query_norm, parts.key_norm)
        ]
        return LayerStruct(
            attention_norm=self._norm(parts.attention_norm),
            mlp_norm=self._norm(parts.mlp_norm),
            attended_norm=self._norm(parts.attended_norm),
            mlp_out_norm=self._norm(parts.mlp_out_norm),
            query_norm=heads[0],
            key_norm=heads[1],
            qkv=self._pack(parts.qkv, kernel, parts.ordered_qkv).struct,
            output=self._pack([parts.output], kernel).struct,
            **self._mlp(parts, kernel),
            sinks=None if parts.sinks is None else self._keep(parts.sinks),
            reach=reach,
            rotary=rotary,
        )

    def _mlp(self, parts: LayerParts, kernel: Kernel) -> dict[str, Structure]:
        """The fields of a layer that hold its MLP, or its experts."""
        if parts.experts is not None:
            is_own = self._shared.isdisjoint(stack.data_ptr() for stack in parts.experts.stacks)
            experts = PackedExperts(parts.experts, kernel, is_own, self._keeps_experts)
            self._kept.append(experts)
            return {"mixture": experts.struct}
        assert parts.down is not None
        return {
            "gate_up": self._pack(parts.gate_up, kernel, parts.ordered_gate_up, parts.is_gated).struct,
            "down": self._pack([parts.down], kernel).struct,
        }

    def _norm(self, norm: NormParts | None) -> NormStruct:
        if norm is None:
            return NormStruct()
        weight = norm.weight.detach().float()
        return NormStruct(
            weight=self._keep(norm.offset + weight if norm.offset else weight),
            bias=None if norm.bias is None else self._keep(norm.bias),
            centred=norm.is_centred,
        )

    def _pack(
        self,
        linears: Sequence[nn.Linear | GroupedLinear],
        kernel: Kernel,
        ordered: Sequence[nn.Linear | GroupedLinear] | None = None,
        interleaved: bool = False,
    ) -> PackedWeight:
        """Linear layers as one. `ordered` are their outputs in the kernels' order, None: as they are."""
        ordered = linears if ordered is None else ordered
        grouped = [linear for linear in ordered if isinstance(linear, GroupedLinear)]
        own = [
            linear
            for linear in linears
            if isinstance(linear, nn.Linear) and linear.weight.data_ptr() not in self._shared
        ]
        packed = PackedWeight(
            grouped or [linear.weight for linear in ordered if isinstance(linear, nn.Linear)],
            [linear.bias for linear in ordered],
            common_kernel(grouped) if grouped else kernel,
            interleaved,
            give_back=len(own) == len(linears),
        )
        self._kept.append(packed)
        for linear in own:
            release(linear.weight)
        return packed

    def _keep(self, tensor: Tensor) -> int:
        kept = tensor.detach().float().contiguous().clone()
        self._kept.append(kept)
        return kept.data_ptr()

    def _keep_table(self, table: Tensor) -> Tensor:
        """A table [n, width] in its own type, one that the kernels widen."""
        table = table.detach()
        kept = moved(table if table.dtype in TABLE_KINDS else table.float())
        self._kept.append(kept)
        return kept

    def _addresses(self, pool: KVPool) -> tuple[list[Any], list[int]]:
        """Arrays of the pool's keys, values, key scales and value scales, one address a layer, and where they begin."""
        if pool not in self._pools:
            array = ctypes.c_void_p * self.num_layers
            kinds = (pool.keys, pool.values, pool.key_scales, pool.value_scales)
            arrays = [array(*(tensor.data_ptr() for tensor in kind)) for kind in kinds]
            self._pools[pool] = arrays, [ctypes.addressof(each) for each in arrays]
        return self._pools[pool]

    @cached_property
    def _every_layer(self) -> NDArray[np.int64]:
        return np.arange(self.num_layers)


def _address(numbers: NDArray[np.int64]) -> int:
    address: int = numbers.__array_interface__["data"][0]
    return address


_NONE = np.zeros(0, dtype=np.int64)
