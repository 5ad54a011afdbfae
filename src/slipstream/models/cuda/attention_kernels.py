"""Attention over a pass's rows in Triton: new entries are written, splits are computed, partials are added.

See `attention_plan` for columns, splits, items and partials.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def write_entries(
    key, value, keys, values, key_scales, value_scales, slots, num_slots,
    key_row, key_head, value_row, value_head,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    IS_INT8: tl.constexpr,
):  # fmt: skip
    """Keeps the key and the value of row `program_id(0)` and key head `program_id(1)` in the row's slot.

    key [rows, kv_heads, KEY_DIM] by its strides, keys [kv_heads, num_slots, KEY_DIM], and so for values.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = head.to(tl.int64) * num_slots + tl.load(slots + row)
    _write(key + row * key_row + head * key_head, keys, key_scales, slot, KEY_DIM, KEY_BLOCK, IS_INT8)
    _write(
        value + row * value_row + head * value_head,
        values,
        value_scales,
        slot,
        VALUE_DIM,
        VALUE_BLOCK,
        IS_INT8,
    )


@triton.jit
def _write(entry, entries, scales, slot, DIM: tl.constexpr, BLOCK: tl.constexpr, IS_INT8: tl.constexpr):
    """As `kv.pool.quantise` does where entries are int8."""
    d = tl.arange(0, BLOCK)
    numbers = tl.load(entry + d, mask=d < DIM, other=0.0)
    if IS_INT8:
        exact = numbers.to(tl.float32)
        largest = tl.max(tl.abs(exact), 0)
        finite = tl.sum((tl.abs(exact) < float("inf")).to(tl.int32), 0) == BLOCK
        usable = finite & (largest >= 1e-30)
        rounded = _round(exact * tl.where(usable, tl.div_rn(127.0, tl.where(usable, largest, 1.0)), 0.0))
        tl.store(entries + slot * DIM + d, rounded.to(tl.int8), mask=d < DIM)
        scale = tl.where(usable, tl.div_rn(largest, 127.0), tl.where(finite, 0.0, float("nan")))
        tl.store(scales + slot, scale)
    else:
        tl.store(entries + slot * DIM + d, numbers.to(entries.dtype.element_ty), mask=d < DIM)


@triton.jit
def _round(x):
    """To the nearest integer, halves to the even one, for |x| below 2^22."""
    magic = 12582912.0  # 1.5 · 2^23: the sum has no bits behind the point
    return tl.where(x == x, (x + magic) - magic, 0.0)


@triton.jit
def attend_splits(
    query, keys, values, key_scales, value_scales,
    items, partials, positions, run_begin, run_length, tail_begin, tail_slots, tail_positions,
    sums, peaks, masses,
    scaling, softcap, num_slots, query_row, query_head,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    REACH: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_INT8: tl.constexpr,
):  # fmt: skip
    """The partial of item `program_id(0)` for key head `program_id(1)`.

    query [rows, heads, KEY_DIM] by its strides; sums [partials, heads, VALUE_DIM], peaks and masses [partials, heads]
    in float32: for each row and head the sum of exp2(score - peak) · value, the largest score (base 2), and the sum of
    exp2(score - peak). `REACH` is as in `Variant`. TILE rows of GROUP heads each: TILE // GROUP rows.
    """
    item = items + tl.program_id(0) * 5
    num_rows = tl.load(item + 1)
    if num_rows != 0:
        head = tl.program_id(1)
        is_tail = num_rows < 0
        m = tl.arange(0, TILE)
        row = (tl.load(item) + m // GROUP).to(tl.int32)
        own = m // GROUP < tl.abs(num_rows)
        q_head = head * GROUP + m % GROUP
        kd = tl.arange(0, KEY_BLOCK)
        vd = tl.arange(0, VALUE_BLOCK)
        at = row[:, None] * query_row + q_head[:, None] * query_head + kd[None, :]
        q = tl.load(query + at, mask=own[:, None] & (kd < KEY_DIM)[None, :], other=0.0)
        begin = tl.load(run_begin + tl.load(item)).to(tl.int32)
        run = tl.load(run_length + row, mask=own, other=0).to(tl.int32)
        position = tl.load(positions + row, mask=own, other=0).to(tl.int32)
        tail = tl.load(tail_begin + tl.load(item)).to(tl.int32)
        last_run = tl.max(run, 0)
        end = last_run
        if is_tail:
            end += tl.load(tail_begin + tl.load(item) + 1).to(tl.int32) - tail
        oldest = 0
        oldest_seen = position * 0
        if REACH > 0:
            oldest_seen = position - REACH + 1
        if REACH < 0:
            oldest_seen = position // (0 - REACH) * (0 - REACH)
        if REACH != 0:  # column and position are the same within a run
            oldest = tl.maximum(tl.min(tl.where(own, oldest_seen, 1 << 30), 0), 0) // BLOCK * BLOCK
        total = tl.zeros([TILE, VALUE_BLOCK], tl.float32)
        total_peak = tl.full([TILE], NOTHING, tl.float32)
        total_mass = tl.zeros([TILE], tl.float32)
        first_split = tl.load(item + 2).to(tl.int32)
        keys += head.to(tl.int64) * num_slots * KEY_DIM  # offsets within a head's entries are of 32 bits
        values += head.to(tl.int64) * num_slots * VALUE_DIM
        if IS_INT8:
            key_scales += head.to(tl.int64) * num_slots
            value_scales += head.to(tl.int64) * num_slots
        for split in range(first_split, first_split + tl.load(item + 3).to(tl.int32)):
            acc = tl.zeros([TILE, VALUE_BLOCK], tl.float32)
            peak = tl.full([TILE], NOTHING, tl.float32)
            mass = tl.zeros([TILE], tl.float32)
            for c0 in range(tl.maximum(split * SPLIT, oldest), tl.minimum(split * SPLIT + SPLIT, end), BLOCK):
                c = c0 + tl.arange(0, BLOCK)
                in_tail = (c >= last_run) & (c < end)
                slot = begin + c
                at_position = c
                if is_tail:
                    drafted = tail + c - last_run
                    slot = tl.where(
                        in_tail, tl.load(tail_slots + drafted, mask=in_tail, other=0).to(tl.int32), slot
                    )
                    at_position = tl.load(tail_positions + drafted, mask=in_tail, other=0).to(tl.int32)
                    at_position = tl.where(in_tail, at_position, c)
                inside = c < end
                k = tl.load(
                    keys + slot[:, None] * KEY_DIM + kd[None, :],
                    mask=inside[:, None] & (kd < KEY_DIM)[None, :], other=0.0,
                )  # fmt: skip
                v = tl.load(
                    values + slot[:, None] * VALUE_DIM + vd[None, :],
                    mask=inside[:, None] & (vd < VALUE_DIM)[None, :], other=0.0,
                )  # fmt: skip
                if IS_INT8:
                    k_scale = tl.load(key_scales + slot, mask=inside, other=0.0)
                    v_scale = tl.load(value_scales + slot, mask=inside, other=0.0)
                    k = k.to(q.dtype) * k_scale.to(q.dtype)[:, None]
                    v = v.to(q.dtype) * v_scale.to(q.dtype)[:, None]
                score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scaling
                if HAS_SOFTCAP:
                    score = _tanh(score / softcap) * softcap
                sees = own[:, None] & inside[None, :]
                if not is_tail:
                    sees = sees & (c[None, :] < run[:, None])
                if REACH != 0:
                    sees = sees & (at_position[None, :] >= oldest_seen[:, None])
                score = tl.where(sees, score * LOG2_E, NOTHING)
                top = tl.maximum(peak, tl.max(score, 1))
                safe = tl.where(top == NOTHING, 0.0, top)
                p = tl.exp2(score - safe[:, None])
                fade = tl.exp2(peak - safe)
                acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
                mass = mass * fade + tl.sum(p, 1)
                peak = top
            total, total_peak, total_mass = _add(total, total_peak, total_mass, acc, peak, mass)
        partial = tl.load(partials + row, mask=own, other=0) + tl.load(item + 4)
        place = partial * (tl.num_programs(1) * GROUP) + q_head
        tl.store(peaks + place, total_peak, mask=own)
        tl.store(masses + place, total_mass, mask=own)
        tl.store(
            sums + place[:, None] * VALUE_DIM + vd[None, :],
            total,
            mask=own[:, None] & (vd < VALUE_DIM)[None, :],
        )


@triton.jit
def _add(total, total_peak, total_mass, acc, peak, mass):
    """The sum of two partials; one that saw nothing changes no bit of the other."""
    top = tl.maximum(total_peak, peak)
    safe = tl.where(top == NOTHING, 0.0, top)
    fade = tl.exp2(total_peak - safe)
    gain = tl.exp2(peak - safe)
    return total * fade[:, None] + acc * gain[:, None], top, total_mass * fade + mass * gain


@triton.jit
def _tanh(x):
    """Of float32, without a library: 1 - 2 / (exp(2x) + 1), which is 1 and -1 where exp overflows or vanishes."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def add_partials(
    sums, peaks, masses, partials, sinks, output,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The partials of row `program_id(0)` and head `program_id(1)` in order, and the head's sink, added.

    output [rows, heads, VALUE_DIM], sinks [heads].
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, VALUE_BLOCK)
    one = tl.arange(0, 1)
    total = tl.zeros([1, VALUE_BLOCK], tl.float32)
    peak = tl.full([1], NOTHING, tl.float32)
    mass = tl.zeros([1], tl.float32)
    for partial in range(tl.load(partials + row), tl.load(partials + row + 1)):
        place = partial * tl.num_programs(1) + head + one
        acc = tl.load(
            sums + place[:, None] * VALUE_DIM + d[None, :], mask=(d < VALUE_DIM)[None, :], other=0.0
        )
        total, peak, mass = _add(total, peak, mass, acc, tl.load(peaks + place), tl.load(masses + place))
    if HAS_SINKS:
        sink = tl.load(sinks + head + one).to(tl.float32) * LOG2_E
        total, peak, mass = _add(total, peak, mass, total * 0.0, sink, tl.full([1], 1.0, tl.float32))
    seen = tl.where(mass == 0.0, 1.0, mass)
    out = output + (row * tl.num_programs(1) + head) * VALUE_DIM + d[None, :]
    tl.store(out, (total / seen[:, None]).to(output.dtype.element_ty), mask=(d < VALUE_DIM)[None, :])
