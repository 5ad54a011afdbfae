"""The end of a pass that chooses its own tokens: the choice, the walk down the drafted trees, the accepted entries.

`slipstream::walk` and `slipstream::move_entries` run in Triton on a CUDA device; on a CPU in PyTorch, or in Triton's
interpreter where TRITON_INTERPRET is 1: for tests. All is read from tensors at fixed places, so a pass can be recorded
to its end, and who drafts on the device may write token ids and parents there.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.kv.upload import upload
from slipstream.models.batch import BatchTensors
from slipstream.models.cuda.choice import choose
from slipstream.models.cuda.filters import filtered, limits
from slipstream.models.cuda.triton_use import runs_triton
from slipstream.models.executor.base import PassOutput
from slipstream.models.executor.choices import NUM_ROWS, PassVerdicts

PIECE_BYTES = 256
"""The most of an entry that is one piece of a program's work."""
NUM_PIECES = 16
"""Pieces of a program."""

_pieces: weakref.WeakKeyDictionary[KVPool, Tensor] = weakref.WeakKeyDictionary()


def conclude(output: PassOutput, table: Tensor, batch: BatchTensors, pool: KVPool) -> PassOutput:
    """The output with verdicts, without hidden states where the pool keeps them. The accepted nodes' entries, features
    included, have moved behind the text.

    `table` is that of `TokenChoices`, and `batch` what the pass computed.
    """
    keys, temperatures, parents, sizes = table[:NUM_ROWS]
    logits, temperatures = output.logits, temperatures.view(torch.float64).float()
    if len(table) == NUM_ROWS:
        tokens = choose(logits, keys, temperatures)
    else:
        logits, short = filtered(logits, temperatures, *limits(table[NUM_ROWS:]))
        tokens = choose(logits, keys, temperatures).masked_fill(short, -1)
    verdicts: Tensor = walk(tokens, batch.token_ids, batch.logit_rows, batch.positions, parents, sizes)
    keeps = pool.features.shape[1] > 0
    if keeps:
        pool.features[batch.slots] = torch.cat(list(output.hidden.values()), dim=-1)
    move_entries(pool.tensors, pieces(pool), verdicts, batch.logit_rows, batch.slots)
    return PassOutput(output.logits, {} if keeps else output.hidden, verdicts)


def pieces(pool: KVPool) -> Tensor:
    """int64 [pieces, 3] on the pool's device: where each piece of slot 0's entry lies, and in words how far the next
    slot's is and how long it is. A word has 4 bytes, or 1 where an entry is not made of such."""
    if pool not in _pieces:
        size = word_bytes(pool.tensors)
        rows = []
        for tensor in pool.tensors:
            entry = tensor.stride(0) * tensor.element_size()  # in one piece of memory, from slot to slot
            for plane in range(tensor.nbytes // (entry * len(tensor))):
                address = tensor.data_ptr() + plane * entry * len(tensor)
                rows += [
                    (address + begin, entry // size, min(PIECE_BYTES, entry - begin) // size)
                    for begin in range(0, entry, PIECE_BYTES)
                ]
        _pieces[pool] = upload(np.array(rows, np.int64), pool.features.device)
    return _pieces[pool]


def word_bytes(tensors: list[Tensor]) -> int:
    """The bytes in which entries are moved."""
    return 4 if all(tensor.stride(0) * tensor.element_size() % 4 == 0 for tensor in tensors) else 1


@torch.library.custom_op("slipstream::walk", mutates_args=())
def walk(
    tokens: Tensor, token_ids: Tensor, logit_rows: Tensor, positions: Tensor, parents: Tensor, sizes: Tensor
) -> Tensor:
    """The verdicts, `PassVerdicts`, int64 [5, wanted], about the trees of a pass; all arguments are int64.

    tokens [wanted]: what was chosen in each wanted row, -1 for nothing. token_ids and positions [rows] and logit_rows
    [wanted] are those of the pass. parents and sizes [wanted] are those of `TokenChoices`.
    """
    if not runs_triton(tokens):
        return _walk_in_pytorch(tokens, token_ids, logit_rows, positions, parents, sizes)
    from triton import next_power_of_2

    from slipstream.models.cuda.verdict_kernels import walk_trees

    num_wanted = len(tokens)
    verdicts = tokens.new_empty(len(PassVerdicts._fields), num_wanted)
    walk_trees[(num_wanted,)](
        tokens, token_ids, logit_rows, positions, parents, sizes, verdicts,
        num_wanted, next_power_of_2(num_wanted), num_warps=1,
    )  # fmt: skip
    return verdicts


@walk.register_fake
def _(tokens: Tensor, *_: Tensor) -> Tensor:
    return tokens.new_empty(len(PassVerdicts._fields), len(tokens))


def _walk_in_pytorch(
    tokens: Tensor, token_ids: Tensor, logit_rows: Tensor, positions: Tensor, parents: Tensor, sizes: Tensor
) -> Tensor:
    verdicts = tokens.new_zeros(len(PassVerdicts._fields), len(tokens))
    counts, last_tokens, lengths, nodes, chosen = verdicts
    chosen[:], drafted = tokens, token_ids[logit_rows]
    for root in range(len(tokens)):
        size, row, count = int(sizes[root]), 0, 0
        if not size:
            continue
        for child in range(1, size):  # behind their parents
            if parents[root + child] == row and drafted[root + child] == tokens[root + row]:
                nodes[root + count] = child - 1
                row, count = child, count + 1
        counts[root] = count if tokens[root + row] >= 0 else -1
        last_tokens[root] = tokens[root + row]
        lengths[root] = positions[logit_rows[root]] + 1 + count
    return verdicts


@torch.library.custom_op("slipstream::move_entries", mutates_args=("tensors",))
def move_entries(
    tensors: list[Tensor], pieces: Tensor, verdicts: Tensor, logit_rows: Tensor, slots: Tensor
) -> None:
    """Moves the entries of each tree's accepted nodes behind those of its text, in all `tensors` of a pool.

    verdicts are those of `walk`, pieces those of the pool. The rows of a tree follow their root in the pass.
    """
    if not runs_triton(pieces):
        _move_in_pytorch(tensors, verdicts, logit_rows, slots)
        return
    from slipstream.models.cuda.verdict_kernels import move_pieces

    size, num_wanted = word_bytes(tensors), verdicts.shape[1]
    move_pieces[(num_wanted, -(-len(pieces) // NUM_PIECES))](
        pieces, verdicts, logit_rows, slots, len(pieces), num_wanted,
        NUM_PIECES, PIECE_BYTES // size, size, num_stages=1,
    )  # fmt: skip


@move_entries.register_fake
def _(*_: object) -> None:
    return None


def _move_in_pytorch(tensors: list[Tensor], verdicts: Tensor, logit_rows: Tensor, slots: Tensor) -> None:
    counts, nodes = verdicts[0], verdicts[3]
    for root in range(len(counts)):
        first = int(logit_rows[root]) + 1
        for depth in range(int(counts[root])):
            source, place = slots[first + nodes[root + depth]], slots[first + depth]
            for tensor in tensors:
                tensor[int(place)] = tensor[int(source)]
