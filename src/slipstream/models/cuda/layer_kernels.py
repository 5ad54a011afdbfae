"""What lies between the products and the attention of a layer, in Triton: norms, rotary embeddings and activations.

A program computes one row, or one head of it, in float32 and rounds once, so a row's bits depend on that row alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_then_norm(
    states, change, change_weight, change_bias, weight, bias, total, output,
    states_row, change_row, size, epsilon, scale,
    BLOCK: tl.constexpr, HAS_CHANGE: tl.constexpr, NORMS_CHANGE: tl.constexpr, CENTRES_CHANGE: tl.constexpr,
    HAS_CHANGE_BIAS: tl.constexpr, NORMS: tl.constexpr, CENTRES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Row `program_id(0)`: total = states + scale · change, and output = the norm of total.

    states and change [rows, size] by their strides; total and output [rows, size]. Each of change, its norm and the
    last norm may be missing. Weights and biases are float32 [size].
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < size
    x = tl.load(states + row * states_row + d, mask=inside, other=0.0).to(tl.float32)
    if HAS_CHANGE:
        y = tl.load(change + row * change_row + d, mask=inside, other=0.0).to(tl.float32)
        if NORMS_CHANGE:
            y = _normed(
                y, change_weight, change_bias, d, inside, size, epsilon, CENTRES_CHANGE, HAS_CHANGE_BIAS
            )
        rounded = (x + y * scale).to(total.dtype.element_ty)
        tl.store(total + row * size + d, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if NORMS:
        x = _normed(x, weight, bias, d, inside, size, epsilon, CENTRES, HAS_BIAS)
        tl.store(output + row * size + d, x.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _normed(x, weight, bias, d, inside, size, epsilon, CENTRES: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The root mean square norm or layer norm of a row that is 0 outside."""
    if CENTRES:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / size + epsilon))
    x = x * tl.load(weight + d, mask=inside, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + d, mask=inside, other=0.0)
    return x


@triton.jit
def rotate_heads(
    query, key, cosines, sines, query_weight, key_weight, rotated_query, rotated_key,
    query_row, query_head, key_row, key_head, num_heads, num_kv_heads, epsilon,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    NORMS_QUERY: tl.constexpr, NORMS_KEY: tl.constexpr,
):  # fmt: skip
    """Head `program_id(1)` of row `program_id(0)`, those of queries first: its norm, then its rotation.

    query [rows, num_heads, DIM] and key by their strides; cosines and sines float32 [rows, HALF]; the first 2 · HALF
    numbers of a head are rotated.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < num_heads:
        source = query + row * query_row + head * query_head
        target = rotated_query + (row * num_heads + head) * DIM
        _rotate(source, target, cosines, sines, query_weight, row, epsilon, DIM, BLOCK, HALF, NORMS_QUERY)
    else:
        head -= num_heads
        source = key + row * key_row + head * key_head
        target = rotated_key + (row * num_kv_heads + head) * DIM
        _rotate(source, target, cosines, sines, key_weight, row, epsilon, DIM, BLOCK, HALF, NORMS_KEY)


@triton.jit
def _rotate(
    source, target, cosines, sines, weight, row, epsilon,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    turns = d < 2 * HALF
    is_first = d < HALF
    partner = tl.where(is_first, d + HALF, d - HALF)
    x = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / DIM + epsilon)
        x = x * scale * tl.load(weight + d, mask=inside, other=0.0)
        y = y * scale * tl.load(weight + partner, mask=turns, other=0.0)
    angle = row * HALF + tl.where(is_first, d, d - HALF)
    cosine = tl.load(cosines + angle, mask=turns, other=1.0)
    sine = tl.load(sines + angle, mask=turns, other=0.0)
    x = x * cosine + tl.where(is_first, -y, y) * sine
    tl.store(target + d, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def activate_rows(
    source, output, source_row, size, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """Block `program_id(1)` of row `program_id(0)`: the activation of the gate times up, or of up alone.

    source [rows, 2 · size] by its stride, the gate first, or [rows, size]; output [rows, size]. `KIND` is a number of
    `families.activations`.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < size
    x = tl.load(source + row * source_row + d, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        y = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 4:
        y = tl.where(x < 0.0, 0.0, x * x)
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x - x / (tl.exp(2.0 * inner) + 1.0)
    if GATED:
        y = y * tl.load(source + row * source_row + size + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * size + d, y.to(output.dtype.element_ty), mask=inside)
