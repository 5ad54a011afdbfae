"""Two kernels that do next to nothing, in Triton: one to count launches with, one that only reads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tick(numbers, PDL: tl.constexpr):
    """Adds one to the number of program `program_id(0)`. With PDL the next kernel may begin to start at once, and this
    one waits for the one before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = numbers + tl.program_id(0)
    tl.store(place, tl.load(place) + 1)


@triton.jit
def read_only(numbers, sums, num_blocks, BLOCK: tl.constexpr):
    """Reads `num_blocks` blocks a program, and stores one number."""
    total = tl.zeros([BLOCK], tl.int32)
    for turn in range(num_blocks):
        block = (tl.program_id(0) + turn * tl.num_programs(0)).to(tl.int64)
        total ^= tl.load(numbers + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
