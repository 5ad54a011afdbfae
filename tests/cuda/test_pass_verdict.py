"""The walk down the trees of a pass and the gather of accepted entries: operators on a CPU, and interpreted kernels."""

from __future__ import annotations

import random

import pytest
import torch
from triton_process import interpreted
from verdict_cases import MOVING, POOLS, Trees, random_pool, random_tree

from slipstream.core.pending import PendingNumbers
from slipstream.core.pending_tree import PendingTree
from slipstream.models.cuda.verdict import move_entries, pieces, walk, word_bytes
from slipstream.models.executor.choices import OwnTokens, TokenChoices
from slipstream.sampling.params import SamplingParams


@pytest.mark.parametrize("seed", range(60))
def test_the_operator_walks_as_the_host_does(seed: int) -> None:
    trees = Trees.random(seed)
    trees.check(walk(*trees.arrays))


def test_the_trees_of_these_tests_end_in_every_way() -> None:
    """Whole paths, half ones, the second of two siblings with one token, walks that the host must do."""
    proposals, verdicts = [], []
    for seed in range(60):
        trees = Trees.random(seed)
        proposals += trees.proposals
        verdicts += trees.expected()
    found = [
        (tree, verdict) for tree, verdict in zip(proposals, verdicts, strict=True) if verdict is not None
    ]
    assert len(found) < len(verdicts)
    assert sum(list(verdict.accepted) != list(range(len(verdict.accepted))) for _, verdict in found) > 20
    assert sum(len(verdict.accepted) > 2 for _, verdict in found) > 5


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("seed", MOVING)
def test_the_operator_moves_entries_as_the_pool_does(kind: str, seed: int) -> None:
    trees = Trees.random(seed, num_trees=3)
    ours, theirs = (random_pool(kind, trees.num_slots) for _ in range(2))
    move_entries(ours.tensors, pieces(ours), walk(*trees.arrays), trees.logit_rows, trees.slots)
    before = [tensor.clone() for tensor in theirs.tensors]
    trees.gather(theirs)
    assert not any(torch.equal(old, new) for old, new in zip(before, theirs.tensors, strict=True))
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", POOLS)
def test_the_pieces_cover_an_entry_once(kind: str) -> None:
    pool = random_pool(kind, 20)
    size = word_bytes(pool.tensors)
    assert size == (1 if kind == "odd int8" else 4)
    covered = [
        address + size * (slot * stride + word)
        for address, stride, length in pieces(pool).tolist()
        for slot in range(20)
        for word in range(length)
    ]
    assert len(covered) == len(set(covered)) == pool.memory_bytes() // size
    memory = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in pool.tensors
    }
    expected = {address for begin, num in memory.items() for address in range(begin, begin + num, size)}
    assert set(covered) == expected


def test_the_kernels_interpreted() -> None:
    done = interpreted("interpreted_verdict.py")
    assert done.returncode == 0, done.stdout


def test_parents_that_only_the_device_knows_are_filled_in() -> None:
    generator = random.Random(4)
    trees = [random_tree(generator, size) for size in (5, 0, 8, 3)]
    known, pending = TokenChoices(), TokenChoices()
    for number, tree in enumerate(trees):
        own = OwnTokens([0] * (1 + len(tree)), SamplingParams())
        numbers = (PendingNumbers(torch.tensor(part)) for part in (tree.token_ids, tree.parents))
        for choices, each in ((known, tree), (pending, tree if number == 1 else PendingTree(*numbers))):
            choices.skip(2)
            choices.add(own, each)
    filled = pending.fill_in(torch.from_numpy(pending.table(40)))
    assert torch.equal(filled, torch.from_numpy(known.table(40)))
