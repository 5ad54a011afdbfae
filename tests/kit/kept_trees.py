"""Trees that grow on a device, and the same ones from the logits behind each path."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slipstream.core.pending import PendingNumbers
from slipstream.core.pending_tree import PendingTree
from slipstream.draft.proposers.device_tree import DeviceTrees
from slipstream.models.rows import RowGroup
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams


class KeptTree:
    """In place of a `DraftTree`: keeps the proposal."""

    def __init__(self, rng: random.Random, text: list[int], shape: tuple[int, int, int], kind: str) -> None:
        num_nodes, depth, top_k = shape
        greedy = kind == "greedy" or (kind == "mixed" and rng.random() < 0.5)
        params = SamplingParams(
            temperature=1.0 if greedy else rng.uniform(0.5, 1.5), top_k=9 if kind == "filtered" else 0
        )
        method = "greedy" if kind == "greedy" else "coupled"
        self.shape = SimpleNamespace(top_k=top_k, method=method, num_nodes=num_nodes, depth=depth)
        self.max_nodes, self.max_depth = num_nodes, depth
        self.noise = Noise(rng.getrandbits(40), len(text), greedy)
        self.sequence = SimpleNamespace(id=0, token_ids=text)
        self.processor = SimpleNamespace(filters_only=params)
        self.proposal: PendingTree | None = None

    def take_pending(self, proposal: PendingTree, _: list[int]) -> None:
        self.proposal = proposal

    @property
    def grown(self) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        assert self.proposal is not None
        assert self.proposal.ranks is not None
        known = self.proposal.known()
        return known.token_ids, known.parents, self.proposal.ranks.tolist()


def grow_by_paths(
    trees: list[Any], vocab_size: int, logits_after: Callable[[int, list[int]], Tensor]
) -> None:
    """Grow the trees from what `logits_after` says of each path of draft tokens of each tree."""
    nothing_before = [(range(1000), 0)] * len(trees)
    fed: list[list[list[int]]] = [[] for _ in trees]

    def run(groups: list[RowGroup]) -> Tensor:
        rows = []
        for number, group in enumerate(groups):
            assert isinstance(group.drafted, PendingNumbers)
            assert group.ranks is not None
            fed[number].append(list(group.drafted.known()))
            for ranks in group.ranks.view(len(group.drafted), -1).tolist():
                path = [level[rank] for level, rank in zip(fed[number], ranks, strict=True)]
                rows.append(logits_after(number, path))
        return torch.stack(rows)

    roots = torch.stack([logits_after(number, []) for number in range(len(trees))])
    DeviceTrees(trees, vocab_size, nothing_before).draw(roots, run)
