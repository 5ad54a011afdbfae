"""Products of rows with the weights of linear layers in Triton.

The outputs are on the long side of the matrix instruction and sixteen rows on its short side, whatever the number of
rows: more rows are more tiles, of which a program multiplies up to four with one read of the weights. A row's sums are
added in an order that depends on the weight alone, so its bits depend neither on its place nor on its neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_OUTPUTS = tl.constexpr(64)
"""Outputs of a tile."""
TILE_ROWS = tl.constexpr(16)
"""Rows of a tile."""
NUMBERS, FP8, CODES8, CODES4 = (tl.constexpr(kind) for kind in range(4))
"""What is held: floating-point numbers; e4m3; codes of 8 and of 4 bits from 0 on."""


@triton.jit
def multiply(
    rows, codes, scales, group_scales, zeros, bias, partials, tickets, output,
    num_rows, num_in, num_out, num_groups, num_blocks,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """TILES tiles of rows from `program_id(0)`, and one tile of outputs, over one of SPLITS cuts of the inputs.

    rows [num_rows, num_in], output [num_rows, num_out]; codes, scales and zeros as `linear_codes.Codes` has them. A cut
    is some of the `num_blocks` blocks of BLOCK inputs. With several cuts their sums are left in partials, float32
    [SPLITS, num_rows, num_out], and the last program of a tile adds them in order. `tickets` are zeros, before and
    after.
    """
    first_row = tl.program_id(0) * (TILES * TILE_ROWS)
    tile = tl.program_id(1) // SPLITS
    split = tl.program_id(1) % SPLITS
    o = tile * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    sums = ()
    for _ in tl.static_range(TILES):
        sums += (tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32),)
    for block in range(split * num_blocks // SPLITS, (split + 1) * num_blocks // SPLITS):
        if GROUP == 0:
            k = block * BLOCK + tl.arange(0, BLOCK)
            at = o.to(tl.int64)[:, None] * num_in + k[None, :]
            w = tl.load(codes + at, mask=(o < num_out)[:, None] & (k < num_in)[None, :], other=0)
            w = _widened(w, KIND, rows.dtype.element_ty)
            added = ()
            for t in tl.static_range(TILES):
                x = _inputs(rows, first_row + t * TILE_ROWS, k, num_rows, num_in)
                added += (tl.dot(w, x, sums[t], input_precision="ieee"),)
            sums = added
        else:
            for part in tl.static_range(BLOCK // GROUP):
                sums = _with_group(
                    sums, rows, codes, group_scales, zeros, block * (BLOCK // GROUP) + part,
                    first_row, tile, num_rows, num_in, num_out, num_groups, KIND, GROUP, TILES, HAS_ZEROS,
                )  # fmt: skip
    if SPLITS == 1:
        for t in tl.static_range(TILES):
            r = first_row + t * TILE_ROWS + tl.arange(0, TILE_ROWS)
            _store(output, sums[t], r, o, num_rows, num_out, scales, bias, HAS_SCALES, HAS_BIAS)
    else:
        for t in tl.static_range(TILES):
            r = first_row + t * TILE_ROWS + tl.arange(0, TILE_ROWS)
            at = (split * num_rows + r)[None, :] * num_out + o[:, None]
            tl.store(partials + at, sums[t], mask=(r < num_rows)[None, :] & (o < num_out)[:, None])
        tl.debug_barrier()  # all of this program's stores come before its ticket
        ticket = tickets + tl.program_id(0) * (tl.num_programs(1) // SPLITS) + tile
        if tl.atomic_add(ticket, 1) == SPLITS - 1:
            for t in tl.static_range(TILES):
                r = first_row + t * TILE_ROWS + tl.arange(0, TILE_ROWS)
                inside = (r < num_rows)[None, :] & (o < num_out)[:, None]
                total = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
                for cut in tl.static_range(SPLITS):
                    at = (cut * num_rows + r)[None, :] * num_out + o[:, None]
                    # From the cache that all programs share.
                    total += tl.load(partials + at, mask=inside, other=0.0, cache_modifier=".cg")
                _store(output, total, r, o, num_rows, num_out, scales, bias, HAS_SCALES, HAS_BIAS)
            tl.store(ticket, 0)


@triton.jit
def _inputs(rows, first_row, k, num_rows, num_in):
    """[inputs k, TILE_ROWS]: of the rows from `first_row` on; zeros where there is none."""
    r = first_row + tl.arange(0, TILE_ROWS)
    at = r[None, :] * num_in + k[:, None]
    return tl.load(rows + at, mask=(r < num_rows)[None, :] & (k < num_in)[:, None], other=0.0)


@triton.jit
def _widened(codes, KIND: tl.constexpr, KEPT: tl.constexpr):
    """The codes as numbers of the rows' type, each of them exactly."""
    if KIND == NUMBERS:
        return codes
    if KIND == FP8:
        # The sign to the highest bit, exponent and fraction to where float32 has them; its exponents are 120 larger.
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -2014314496  # 0x87F00000
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(KEPT)  # 2^120
    return codes.to(tl.float32).to(KEPT)  # in two steps: the interpreter has no other way to bfloat16


@triton.jit
def _with_group(
    sums, rows, codes, group_scales, zeros, group, first_row, tile, num_rows, num_in, num_out, num_groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """The sums, and the products of one group of inputs: of its codes alone, then times its scale."""
    KEPT: tl.constexpr = rows.dtype.element_ty
    WIDTH: tl.constexpr = GROUP // 2 if KIND == CODES4 else GROUP
    i = tl.arange(0, WIDTH)
    o = tl.arange(0, TILE_OUTPUTS)
    inside = group < num_groups
    place = (tile.to(tl.int64) * num_groups + group) * (TILE_OUTPUTS * WIDTH)
    held = tl.load(codes + place + o[:, None] * WIDTH + i[None, :], mask=inside, other=0)
    low, high = held, held
    if KIND == CODES4:
        low, high = held & 15, held >> 4
    if KIND != FP8 and not HAS_ZEROS:
        MIDDLE: tl.constexpr = 8 if KIND == CODES4 else 128
        low, high = low.to(tl.int16) - MIDDLE, high.to(tl.int16) - MIDDLE
    low, high = _widened(low, KIND, KEPT), _widened(high, KIND, KEPT)
    at = group * num_out + tile * TILE_OUTPUTS + o
    known = inside & (tile * TILE_OUTPUTS + o < num_out)
    scale = tl.load(group_scales + at, mask=known, other=0.0).to(tl.float32)
    if HAS_ZEROS:
        zero = tl.load(zeros + at, mask=known, other=0.0).to(tl.float32)
        ones = tl.full([TILE_OUTPUTS, WIDTH], 1.0, tl.float32).to(KEPT)
    added = ()
    for t in tl.static_range(TILES):
        x = _inputs(rows, first_row + t * TILE_ROWS, group * GROUP + i, num_rows, num_in)
        product = tl.dot(low, x, input_precision="ieee")
        if HAS_ZEROS:
            whole = tl.dot(ones, x, input_precision="ieee")
        if KIND == CODES4:
            x = _inputs(rows, first_row + t * TILE_ROWS, group * GROUP + WIDTH + i, num_rows, num_in)
            product = tl.dot(high, x, product, input_precision="ieee")
            if HAS_ZEROS:
                whole = tl.dot(ones, x, whole, input_precision="ieee")
        if HAS_ZEROS:
            product -= whole * zero[:, None]
        added += (sums[t] + product * scale[:, None],)
    return added


@triton.jit
def _store(
    output, sums, r, o, num_rows, num_out, scales, bias, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The sums [outputs o, rows r] times the outputs' scales, and their bias, rounded once."""
    if HAS_SCALES:
        sums *= tl.load(scales + o, mask=o < num_out, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + o, mask=o < num_out, other=0.0).to(tl.float32)[:, None]
    inside = (r < num_rows)[None, :] & (o < num_out)[:, None]
    tl.store(output + r[None, :] * num_out + o[:, None], sums.to(output.dtype.element_ty), mask=inside)
