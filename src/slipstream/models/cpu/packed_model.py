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
from slipstream.models.cpu.model_sizes import HeadSizes
from slipstream.models.cpu.packed_weight import PackedWeight
from slipstream.models.cpu.pages import moved, release
from slipstream.models.cpu.part_times import PartTimes
from slipstream.models.cpu.rounded_head import RoundedHead
from slipstream.models.cpu.structs import (
    ENTRY_TYPES,
    SIXTEEN_BIT_KINDS,
    TABLE_KINDS,
    BatchStruct,
    InputsStruct,
    LayerStruct,
    LinearStruct,
    NormStruct,
)
from slipstream.models.families.inputs import InputParts
from slipstream.models.families.parts import LayerInputs, LayerParts, NormParts
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
    input_table: Tensor | PackedWeight | None = None
    """One whose rows are what layers are given besides the states."""
    _head: PackedWeight | None = None
    """The output layer, where it is this model's own."""
    rounded: RoundedHead | None = None
    """The same in 8 bits, which passes read in its stead where only best tokens are wanted."""

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
        return sum(
            kept.least_bytes if isinstance(kept, PackedWeight | PackedExperts) else int(kept.nbytes)
            for kept in self._kept
            if kept is not self.rounded and not self._is_table(kept)
        )

    def _is_table(self, kept: Any) -> bool:
        """Whether a pass reads of it one row for each of its own."""
        return any(kept is table for table in (self._embedding, self._table, self.input_table))

    @property
    def scratch_bytes(self) -> int:
        """Bytes that passes have taken to compute with so far, as the kernels count them."""
        return int(native.library().slipstream_scratch_bytes(self._scratch))

    @property
    def linears(self) -> list[PackedWeight]:
        """The weights of all layers but their experts, and the output layer."""
        packed = (kept for kept in self._kept if isinstance(kept, PackedWeight))
        return [kept for kept in packed if not self._is_table(kept)]

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

    def _run_timed(self, times: PartTimes, model: Structure, batch: Structure) -> None:
        """Compute a whole pass, and write what its parts take into `times`."""
        structs = (ctypes.byref(model), ctypes.byref(batch))
        with self._lock:
            native.library().slipstream_forward_by_part(
                *structs, times.address, self._scratch, self.num_threads
            )

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

    def _layer(self, parts: LayerParts, kernel: Kernel, heads: HeadSizes, reach: int = 0) -> LayerStruct:
        of_heads = [
            None if norm is None else self._norm(norm).weight for norm in (parts.query_norm, parts.key_norm)
        ]
        return LayerStruct(
            attention_norm=self._norm(parts.attention_norm),
            mlp_norm=self._norm(parts.mlp_norm),
            attended_norm=self._norm(parts.attended_norm),
            mlp_out_norm=self._norm(parts.mlp_out_norm),
            query_norm=of_heads[0],
            key_norm=of_heads[1],
            qkv=self._pack(parts.qkv, kernel, parts.ordered_qkv).struct,
            output=self._pack([parts.output], kernel).struct,
            **self._mlp(parts, kernel),
            **self._layer_inputs(parts.inputs, kernel),
            sinks=None if parts.sinks is None else self._keep(parts.sinks),
            reach=reach,
            **heads._asdict(),
            projected=parts.projected,
            norms_values=parts.has_value_norm,
            scale=1.0 if parts.scale is None else float(parts.scale),
        )

    def _mlp(self, parts: LayerParts, kernel: Kernel) -> dict[str, Structure]:
        """The fields of a layer that hold its MLP, its experts, or both."""
        found: dict[str, Structure] = {}
        if parts.down is not None:
            found["gate_up"] = self._pack(parts.gate_up, kernel, parts.ordered_gate_up, parts.is_gated).struct
            found["down"] = self._pack([parts.down], kernel).struct
        if parts.experts is None:
            return found
        is_own = self._shared.isdisjoint(stack.data_ptr() for stack in parts.experts.stacks)
        experts = PackedExperts(parts.experts, kernel, is_own, self._keeps_experts)
        self._kept.append(experts)
        found["mixture"] = experts.struct
        if parts.beside is not None:
            experts.struct.scales = self._keep(parts.beside.scales)
            for name in ("router_norm", "input_norm", "mlp_out_norm", "output_norm"):
                setattr(experts.struct, name, self._norm(getattr(parts.beside, name)))
        return found

    def _layer_inputs(self, inputs: LayerInputs | None, kernel: Kernel) -> dict[str, Structure]:
        """The fields of a layer that say what it does with what it is given besides the states."""
        if inputs is None:
            return {}
        return {
            "input_gate": self._pack([inputs.gate], kernel).struct,
            "input_projection": self._pack([inputs.last], kernel).struct,
            "input_norm": self._norm(inputs.norm),
        }

    def _inputs(self, inputs: InputParts, kernel: Kernel) -> InputsStruct:
        """What makes the inputs of all layers."""
        table = self._keep_table(inputs.table.weight) if inputs.stored is None else None
        packed = None if inputs.stored is None else self._pack([inputs.stored], kernel)
        self.input_table = table if packed is None else packed
        return InputsStruct(
            width=inputs.width,
            table_kind=0 if table is None else TABLE_KINDS[table.dtype],
            table_scale=inputs.table_scale,
            projection_scale=inputs.projection_scale,
            scale=inputs.scale,
            table=None if table is None else table.data_ptr(),
            packed_table=LinearStruct() if packed is None else packed.struct,
            projection=self._pack([inputs.projection], kernel).struct,
            norm=self._norm(inputs.norm).weight,
        )

    def _norm(self, norm: NormParts | None) -> NormStruct:
        if norm is None:
            return NormStruct()
        weight = norm.weight.detach().float()
        weight = norm.offset + weight if norm.offset else weight
        return NormStruct(
            weight=self._keep(weight * norm.factor if norm.factor != 1.0 else weight),
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
