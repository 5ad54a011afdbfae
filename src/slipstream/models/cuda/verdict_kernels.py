"""The walk down drafted trees along the chosen tokens, and the gather of the accepted entries, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def walk_trees(
    tokens, token_ids, logit_rows, positions, parents, sizes, verdicts, num_wanted, BLOCK: tl.constexpr,
):  # fmt: skip
    """The verdict about the tree whose root is wanted row `program_id(0)`; see `verdict.walk` for the arrays.

    A tree has at most BLOCK rows. Of several children with the chosen token the first is taken; they come behind their
    parents, so that the walk ends whatever the arrays say.
    """
    root = tl.program_id(0)
    size = tl.load(sizes + root)
    tl.store(verdicts + 4 * num_wanted + root, tl.load(tokens + root))
    row = tl.arange(0, BLOCK)
    inside = row < size
    own = tl.load(tokens + root + row, mask=inside, other=-1)
    parent = tl.load(parents + root + row, mask=inside, other=-2)
    computed = tl.load(logit_rows + root + row, mask=inside, other=0)
    drafted = tl.load(token_ids + computed, mask=inside, other=-2)
    count = 0
    token = tl.sum(tl.where(row == 0, own, 0), 0)
    child = tl.min(tl.where((parent == 0) & (drafted == token) & (row > 0), row, BLOCK), 0)
    while child < BLOCK:
        tl.store(verdicts + 3 * num_wanted + root + count, (child - 1).to(tl.int64))
        count += 1
        token = tl.sum(tl.where(row == child, own, 0), 0)
        child = tl.min(tl.where((parent == child) & (drafted == token) & (row > child), row, BLOCK), 0)
    length = tl.load(positions + tl.load(logit_rows + root)) + 1 + count
    tl.store(verdicts + root, tl.where(size == 0, 0, tl.where(token < 0, -1, count)).to(tl.int64))
    tl.store(verdicts + num_wanted + root, token)
    tl.store(verdicts + 2 * num_wanted + root, length)


@triton.jit
def move_pieces(
    pieces, verdicts, logit_rows, slots, num_pieces, num_wanted,
    PIECES: tl.constexpr, WORDS: tl.constexpr, WORD_BYTES: tl.constexpr,
):  # fmt: skip
    """Moves the accepted nodes' entries of the tree at wanted row `program_id(0)`, of PIECES pieces of an entry.

    pieces int64 [num_pieces, 3]: the address of the piece in slot 0, and in words from slot to slot and how many.
    A node lies at or behind the place that its entry moves to, and the places are taken in order: no entry is
    overwritten before it is read, and a program's threads share none.
    """
    root = tl.program_id(0)
    count = tl.load(verdicts + root).to(tl.int32)
    if count > 0:
        piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
        is_piece = piece < num_pieces
        address = tl.load(pieces + 3 * piece, mask=is_piece, other=0)
        stride = tl.load(pieces + 3 * piece + 1, mask=is_piece, other=0)
        length = tl.load(pieces + 3 * piece + 2, mask=is_piece, other=0)
        word = tl.arange(0, WORDS)
        inside = word[None, :] < length[:, None]
        begin = address.to(tl.pointer_type(tl.int32 if WORD_BYTES == 4 else tl.int8))
        first = tl.load(logit_rows + root) + 1
        for depth in range(count):
            node = tl.load(verdicts + 3 * num_wanted + root + depth)
            if node != depth:
                source = tl.load(slots + first + node) * stride
                place = tl.load(slots + first + depth) * stride
                held = tl.load(begin[:, None] + source[:, None] + word[None, :], mask=inside)
                tl.store(begin[:, None] + place[:, None] + word[None, :], held, mask=inside)
