"""Latent attention in the CPU kernels: a layer's rows in one call. A row's bits do not depend on the other rows."""

from __future__ import annotations

import ctypes

from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu import native
from slipstream.models.cpu.attention import room, sight_of
from slipstream.models.cpu.structs import ENTRY_TYPES, TABLE_KINDS, LatentStruct
from slipstream.models.mixers.latent import LatentHeads


def attend_to_latents(
    rows: ForwardBatch, pool: KVPool, layer: int, heads: LatentHeads, query: Tensor, key: Tensor, scale: float
) -> Tensor:
    """Store the rows' entries, then attend: query [1, heads, N, nope + rope], key [1, 1, N, rank + rope], float32 ->
    [1, N, heads, value]. The slots must be consecutive."""
    num_heads, n = query.shape[1:3]
    query = query[0] if query.stride(-1) == 1 else query[0].contiguous()
    made, weight = key[0, 0].contiguous(), heads.kv_b_proj.weight.detach().contiguous()
    out = native.empty_rows(1, n, num_heads, heads.v_head_dim)
    struct = LatentStruct(
        num_rows=n,
        num_heads=num_heads,
        rank=heads.kv_lora_rank,
        rope=heads.qk_rope_head_dim,
        nope=heads.qk_nope_head_dim,
        value=heads.v_head_dim,
        weight_kind=TABLE_KINDS[weight.dtype],
        entry_type=ENTRY_TYPES[pool.cache_dtype],
        scale=scale,
        num_slots=len(pool.keys[layer][0]),
        query_row=query.stride(1),
        query_head=query.stride(0),
        weight=weight.data_ptr(),
        queries=query.data_ptr(),
        made=made.data_ptr(),
        slots=rows.addresses()[2],
        numbers=pool.keys[layer].data_ptr(),
        scales=pool.key_scales[layer].data_ptr() if pool.key_scales else None,
        out=out.data_ptr(),
        sight=sight_of(rows),
    )
    native.library().slipstream_latent(ctypes.byref(struct), room(), heads.native_threads)
    return out
