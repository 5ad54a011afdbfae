"""Run by `test_pass_verdict.py` in a process with TRITON_INTERPRET=1: walk and gather, interpreted."""

from __future__ import annotations

import interpreter
import pytest
import torch
from verdict_cases import MOVING, POOLS, Trees, random_pool

from slipstream.models.cuda.verdict import move_entries, pieces, walk

interpreter.mend()


@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_walks_as_the_host_does(seed: int) -> None:
    trees = Trees.random(seed)
    trees.check(walk(*trees.arrays))


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("seed", MOVING[:2])
def test_the_kernel_moves_entries_as_the_pool_does(kind: str, seed: int) -> None:
    trees = Trees.random(seed, num_trees=3)
    ours, theirs = (random_pool(kind, trees.num_slots) for _ in range(2))
    packed = walk(*trees.arrays)
    move_entries(ours.tensors, pieces(ours), packed, trees.logit_rows, trees.slots)
    trees.gather(theirs)
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert torch.equal(mine, other)
