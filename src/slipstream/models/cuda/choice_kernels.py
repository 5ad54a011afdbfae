"""The choice of a token a row in Triton: argmax of logits over temperature, plus position-keyed Gumbel noise.

The noise is `sampling.noise`'s: token t has output number t of splitmix64 started at the row's key, in integers that
wrap, so its bits are equal on every device; two logarithms in float64 follow.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
ULP = tl.constexpr(2.0**-53)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def choose_in_blocks(
    logits, keys, temperatures, best, best_ids, logits_row, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best token of row `program_id(0)` in block `program_id(1)` of the vocabulary, the lowest id among equals.

    logits [rows, vocab_size] by its stride, keys int64 and temperatures float32 [rows]; temperature 0 is greedy. best
    float64 and best_ids int32 [rows, blocks]. A row with a NaN has the NaN's id, as `argmax` has it.
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    at = row.to(tl.int64) * logits_row + token
    score = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature != 0.0:
        score = tl.div_rn(score, temperature)
    exact = score.to(tl.float64)
    if temperature != 0.0:
        word = tl.load(keys + row).to(tl.uint64, bitcast=True) + (token + 1).to(tl.uint64) * GOLDEN
        word = (word ^ (word >> 30)) * FIRST
        word = (word ^ (word >> 27)) * SECOND
        word = word ^ (word >> 31)
        exact += -tl.log(-tl.log(((word >> 11) | 1).to(tl.float64) * ULP))
    exact = tl.where(exact == exact, exact, float("inf"))  # a NaN wins
    exact = tl.where(inside, exact, float("-inf"))
    top = tl.max(exact, 0)
    place = row * tl.num_programs(1) + block
    tl.store(best + place, top)
    tl.store(best_ids + place, tl.min(tl.where((exact == top) & inside, token, NO_TOKEN), 0))


@triton.jit
def choose_among_blocks(best, best_ids, tokens, num_blocks, BLOCK: tl.constexpr):
    """The best token of row `program_id(0)`, int64, of those of its blocks."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    inside = block < num_blocks
    score = tl.load(best + row * num_blocks + block, mask=inside, other=float("-inf"))
    ids = tl.load(best_ids + row * num_blocks + block, mask=inside, other=NO_TOKEN)
    token = tl.min(tl.where((score == tl.max(score, 0)) & inside, ids, NO_TOKEN), 0)
    tl.store(tokens + row, token.to(tl.int64))
