"""One layer's attention in the CPU kernels, where Transformers' code runs. A row's bits do not depend on other rows."""

from __future__ import annotations

import ctypes
import threading
from weakref import finalize

from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu import native
from slipstream.models.cpu.structs import ENTRY_TYPES, LayerAttentionStruct, SightStruct


class _LayerRoom:
    """What a thread's passes compute with; grows to the largest."""

    def __init__(self) -> None:
        self.address = native.library().slipstream_new_layer_scratch()
        if self.address is None:
            raise MemoryError("there is no memory for the rows of a pass")
        # Not at exit: a daemon thread may be in the middle of a pass.
        finalize(self, native.library().slipstream_free_layer_scratch, self.address).atexit = False


_own = threading.local()
"""`room`: this thread's."""


def room() -> int:
    """The address of what this thread's passes compute with."""
    if getattr(_own, "room", None) is None:
        _own.room = _LayerRoom()
    return int(_own.room.address)


def room_bytes() -> int:
    """Bytes that this thread's passes have taken to compute with so far, as the kernels count them."""
    return int(native.library().slipstream_layer_scratch_bytes(room()))


def sight_of(rows: ForwardBatch) -> SightStruct:
    """What the rows see, which must lie in consecutive slots; it holds addresses in the batch's arrays."""
    addresses = rows.addresses()
    return SightStruct(
        positions=addresses[1],
        run_begin=addresses[3],
        run_length=addresses[4],
        tail_begin=addresses[5],
        tail_slots=addresses[6],
        tail_positions=addresses[7],
        shared_begin=addresses[10] if rows.shares else None,
        shared_length=addresses[11] if rows.shares else None,
    )


def attend_to_heads(
    rows: ForwardBatch,
    pool: KVPool,
    layer: int,
    query: Tensor,
    scale: float,
    reach: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    num_threads: int = 1,
) -> Tensor:
    """Attend over entries that are stored: query [1, heads, N, key_dim], float32 -> [1, N, heads, value_dim].

    The slots must be consecutive. `reach` is that of `Variant`, `sinks` are [heads] logits in float32.
    """
    num_heads, n = query.shape[1:3]
    query = query[0].transpose(0, 1).contiguous()
    keys, values = pool.keys[layer], pool.values[layer]
    num_kv_heads, num_slots, key_dim = keys.shape
    out = native.empty_rows(1, n, num_heads, values.shape[2])
    struct = LayerAttentionStruct(
        num_rows=n,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=values.shape[2],
        value_step=values.stride(1),
        entry_type=ENTRY_TYPES[pool.cache_dtype],
        scale=scale,
        cap=cap,
        reach=reach,
        num_slots=num_slots,
        queries=query.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        key_scales=pool.key_scales[layer].data_ptr() if pool.key_scales else None,
        value_scales=pool.value_scales[layer].data_ptr() if pool.value_scales else None,
        out=out.data_ptr(),
        sight=sight_of(rows),
    )
    native.library().slipstream_attend(ctypes.byref(struct), room(), num_threads)
    return out
