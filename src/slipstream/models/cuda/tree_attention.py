"""Attention of all rows of a pass as one operator, which writes their entries first.

`slipstream::tree_attention` runs in Triton on a CUDA device. On a CPU it is computed in PyTorch, or in Triton's
interpreter where TRITON_INTERPRET is 1: for tests. Its arguments are tensors at fixed places and numbers, so that a
pass that calls it can be recorded, compiled and replayed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kv.pool import quantise
from slipstream.models.attention.base import first_seen
from slipstream.models.batch import BatchTensors
from slipstream.models.cuda.attention_plan import SPLIT
from slipstream.models.cuda.triton_use import runs_triton


class Cut(NamedTuple):
    """How the kernel's matrix products are cut. The same for all passes over a layer, since another instruction may
    add in another order."""

    tile: int
    """Rows of a product: rows of an item times the heads that share a key head."""
    block: int
    """Columns of a product."""
    num_warps: int

    @classmethod
    def of(cls, dim: int, is_int8: bool) -> Cut:
        """The largest that spills no register, for heads of up to `dim` numbers (compute capability 8.0 to 10.0)."""
        if dim > 128 or (is_int8 and dim > 64):
            return cls(32, 32, 8)
        return cls(64, 32, 8 if dim > 64 else 4)


class Reads(NamedTuple):
    """What the operator reads of a pass: arrays of `BatchTensors` and of `AttentionPlan`, int64."""

    positions: Tensor
    slots: Tensor
    run_begin: Tensor
    run_length: Tensor
    tail_begin: Tensor
    tail_slots: Tensor
    tail_positions: Tensor
    items: Tensor
    """[items, 5]"""
    partials: Tensor
    """[rows + 1]"""

    @classmethod
    def of(cls, batch: BatchTensors, items: Tensor, partials: Tensor) -> Reads:
        """The arrays of a pass and of its plan."""
        own = {name: getattr(batch, name) for name in cls._fields[:-2]}
        return cls(**own, items=items, partials=partials)


class Scratch(NamedTuple):
    """Where partials are kept between the two kernels, in float32."""

    sums: Tensor
    """[partials, heads, value_dim]"""
    peaks: Tensor
    """[partials, heads]"""
    masses: Tensor
    """[partials, heads]"""

    @classmethod
    def of(cls, num_partials: int, num_heads: int, value_dim: int, device: torch.device) -> Scratch:
        """Room for so many partials."""
        shape = (num_partials, num_heads)
        sums = torch.empty(*shape, value_dim, dtype=torch.float32, device=device)
        return cls(sums, *torch.empty(2, *shape, dtype=torch.float32, device=device).unbind())


def launch(
    query: Tensor, key: Tensor, value: Tensor, entries: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    reads: Reads, scratch: Scratch, output: Tensor, scaling: float, reach: int, softcap: float | None,
    sinks: Tensor | None, cut: Cut | None = None, split: int = SPLIT,
) -> None:  # fmt: skip
    """The three kernels. query [rows, heads, key_dim], key/value [rows, kv_heads, dim], dense in their last dimension;
    `entries` are a layer's keys, values and their scales in the pool; output [rows, heads, value_dim]."""
    from triton import next_power_of_2

    from slipstream.models.cuda.attention_kernels import add_partials, attend_splits, write_entries

    keys, values, key_scales, value_scales = entries
    num_rows, num_heads, key_dim = query.shape
    kv_heads, num_slots, value_dim = values.shape
    key_block, value_block = max(next_power_of_2(key_dim), 16), max(next_power_of_2(value_dim), 16)
    is_int8 = keys.dtype == torch.int8
    cut = cut or Cut.of(max(key_dim, value_dim), is_int8)
    write_entries[(num_rows, kv_heads)](
        key, value, keys, values, key_scales, value_scales, reads.slots, num_slots,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        key_dim, value_dim, key_block, value_block, is_int8, enable_fp_fusion=False,
    )  # fmt: skip
    attend_splits[(len(reads.items), kv_heads)](
        query, keys, values, key_scales, value_scales,
        reads.items, reads.partials, reads.positions, reads.run_begin, reads.run_length, reads.tail_begin,
        reads.tail_slots, reads.tail_positions, *scratch,
        scaling, softcap or 1.0, num_slots, query.stride(0), query.stride(1),
        num_heads // kv_heads, key_dim, value_dim, key_block, value_block, cut.tile, cut.block, split,
        reach, softcap is not None, is_int8, num_warps=cut.num_warps, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    add_partials[(num_rows, num_heads)](
        *scratch,
        reads.partials,
        sinks,
        output,
        value_dim,
        value_block,
        sinks is not None,
        enable_fp_fusion=False,
    )


@torch.library.custom_op(
    "slipstream::tree_attention",
    mutates_args=("keys", "values", "key_scales", "value_scales", "sums", "peaks", "masses"),
)
def tree_attention(
    query: Tensor, key: Tensor, value: Tensor,
    keys: Tensor, values: Tensor, key_scales: Tensor | None, value_scales: Tensor | None,
    reads: list[Tensor], sums: Tensor, peaks: Tensor, masses: Tensor,
    scaling: float, reach: int, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """query [rows, heads, key_dim], key/value [rows, kv_heads, dim] -> [rows, heads, value_dim].

    Keeps the rows' entries in keys and values, [kv_heads, slots, dim], and attends. `reads` are the fields of `Reads`;
    `sums`, `peaks` and `masses` those of `Scratch`, which may be reused by the next layer.
    """
    output = query.new_empty(*query.shape[:2], values.shape[2])
    entries = (keys, values, key_scales, value_scales)
    compute = launch if runs_triton(query) else _in_pytorch
    compute(
        query,
        key,
        value,
        entries,
        Reads(*reads),
        Scratch(sums, peaks, masses),
        output,
        scaling,
        reach,
        softcap,
        sinks,
    )
    return output


@tree_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], values.shape[2])


def _in_pytorch(
    query: Tensor, key: Tensor, value: Tensor, entries: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    reads: Reads, scratch: Scratch, output: Tensor, scaling: float, reach: int, softcap: float | None,
    sinks: Tensor | None,
) -> None:  # fmt: skip
    """What the kernels compute, row by row; the plan is not read."""
    keys, values, key_scales, value_scales = entries
    kept = ((key, keys, key_scales), (value, values, value_scales))
    for entry, held, scales in kept:
        new = entry.transpose(0, 1)
        if scales is not None:
            new, scales[:, reads.slots] = quantise(new)
        held[:, reads.slots] = new.to(held.dtype)
    group = query.shape[1] // keys.shape[0]
    for row in range(query.shape[0]):
        begin, run = int(reads.run_begin[row]), int(reads.run_length[row])
        behind = slice(int(reads.tail_begin[row]), int(reads.tail_begin[row + 1]))
        slots = torch.cat([torch.arange(begin, begin + run), reads.tail_slots[behind]])
        if reach:
            at = torch.cat([torch.arange(run), reads.tail_positions[behind]])
            slots = slots[at >= first_seen(reads.positions[row], reach)]
        seen = []
        for _, held, scales in kept:
            numbers = held[:, slots].to(query.dtype)
            seen.append(numbers if scales is None else numbers * scales[:, slots, None].to(query.dtype))
        own = query[row].view(-1, group, query.shape[2]).float()  # [kv_heads, group, key_dim]
        scores = own @ seen[0].float().transpose(1, 2) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(-1, group, 1)], dim=2)
        weights = torch.softmax(scores, dim=2)[..., : len(slots)]
        output[row] = (weights @ seen[1].float()).flatten(0, 1).to(output.dtype)
