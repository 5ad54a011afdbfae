"""Trees that grow on a device, against a beam search in plain Python, with a made-up model that reads the path."""

from __future__ import annotations

import math
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.pending import PendingNumbers
from slipstream.core.pending_tree import PendingTree
from slipstream.core.proposal import ROOT
from slipstream.draft.proposers.device_tree import DeviceTrees, level_widths
from slipstream.models.rows import RowGroup
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor

VOCAB = 13


def logits_after(path: tuple[int, ...], seed: int) -> Tensor:
    """The made-up model: what follows a path of draft tokens."""
    key = hash((seed, path)) % 2**31
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(key)) * 2


class Recorded:
    """In place of a `DraftTree`: keeps the proposal."""

    def __init__(self, seed: int, num_nodes: int, depth: int, top_k: int, temperature: float) -> None:
        is_greedy = temperature == 0
        params = SamplingParams(temperature=temperature or 1.0, top_k=7 if temperature > 1 else 0)
        method = "greedy" if is_greedy else "coupled"
        self.shape = SimpleNamespace(top_k=top_k, method=method, num_nodes=num_nodes, depth=depth)
        self.max_nodes, self.max_depth = num_nodes, depth
        self.noise = Noise(seed, 5, is_greedy)
        self.sequence = SimpleNamespace(id=0, token_ids=[1] * 5)
        self.processor = SimpleNamespace(filters_only=params)
        self.proposal: PendingTree | None = None
        self.fed: list[int] = []

    def take_pending(self, proposal: PendingTree, fed: list[int]) -> None:
        self.proposal, self.fed = proposal, fed


def beams(tree: Recorded, seed: int, widths: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """The paths of each level, best first."""
    levels: list[list[tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for level, width in enumerate(widths):
        grown = []
        for score, path in frontier:
            processor = LogitsProcessor(tree.processor.filters_only, (), (), (), VOCAB)
            log_probs = processor.log_probs(logits_after(path, seed)[None], [], [[]])
            log_probs = tree.noise.perturb(log_probs, [5 + level])[0].log_softmax(-1)
            for token_id in log_probs.topk(tree.shape.top_k).indices.tolist():
                grown.append((score + float(log_probs[token_id]), (*path, token_id)))
        best = sorted(grown, key=lambda each: -each[0])[:width]
        levels.append([path for _, path in best])
        frontier = best[: tree.shape.top_k]
    return levels


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
@pytest.mark.parametrize(
    ("num_nodes", "depth", "top_k"), [(12, 4, 3), (9, 3, 2), (5, 4, 3), (30, 5, 4), (2, 1, 3)]
)
def test_a_tree_is_what_a_beam_search_finds(
    num_nodes: int, depth: int, top_k: int, temperature: float
) -> None:
    seeds = [3, 4]
    trees: list[Any] = [Recorded(seed, num_nodes, depth, top_k, temperature) for seed in seeds]
    slots, past = [range(0, 64), range(100, 164)], 7
    grower = DeviceTrees(trees, VOCAB, [(own, past) for own in slots])
    widths = level_widths(num_nodes, depth, top_k)
    expected = [beams(tree, seed, widths) for tree, seed in zip(trees, seeds, strict=True)]
    fed = [min(top_k, width) for width in widths[:-1]]
    stored = list(accumulate(fed, initial=0))
    calls = 0

    def run(groups: list[RowGroup]) -> Tensor:
        """Read each row's path as attention does: through the entries that it sees."""
        nonlocal calls
        calls += 1
        rows = []
        for number, group in enumerate(groups):
            group.check()
            own = expected[number][calls - 1][: fed[calls - 1]]
            assert isinstance(group.drafted, PendingNumbers)
            assert list(group.drafted.known()) == [path[-1] for path in own]
            assert group.tail_seen is not None
            assert group.ranks is not None
            seen = torch.tensor(group.tail_seen) + group.ranks.view(len(own), calls)
            for path, entries in zip(own, seen.tolist(), strict=True):
                above = [
                    expected[number][level][entry - stored[level]] for level, entry in enumerate(entries)
                ]
                assert above == [path[: level + 1] for level in range(calls)]
                rows.append(logits_after(path, seeds[number]))
        return torch.stack(rows)

    trees[1].max_nodes, trees[1].max_depth = max(num_nodes - 2, 1), max(depth - 1, 1)
    grower.draw(torch.stack([logits_after((), seed) for seed in seeds]), run)
    for tree, levels in zip(trees, expected, strict=True):
        proposal = tree.proposal
        assert proposal is not None
        known = proposal.known()
        assert len(known) == min(tree.max_nodes, sum(widths[: tree.max_depth]))
        assert known.depths == proposal.depths
        paths = [tuple(known.token_ids[node] for node in known.path(end)) for end in range(len(known))]
        assert paths == [path for level in levels for path in level][: len(known)]
        ranks = proposal.ranks.tolist()
        for node, first in enumerate(proposal.first_paths()):
            assert [begin + ranks.pop(0) for begin in first] == known.path(node)
    assert calls == len(widths) - 1


def test_levels_share_the_nodes() -> None:
    assert level_widths(12, 4, 3) == (3, 3, 3, 3)
    assert level_widths(30, 5, 4) == (4, 7, 7, 6, 6)
    assert level_widths(2, 4, 3) == (1, 1)
    assert level_widths(100, 2, 3) == (3, 9), "as many as there are"


def test_a_tree_with_a_row_that_is_not_finite_says_so() -> None:
    trees: list[Any] = [Recorded(seed, 6, 2, 3, 0.0) for seed in (1, 2)]
    grower = DeviceTrees(trees, VOCAB, [(range(20), 1), (range(20, 40), 1)])
    damaged = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    damaged[4, 3] = math.nan
    grower.draw(damaged[:2].clone(), lambda _: damaged)
    sound, sick = (tree.proposal.known() for tree in trees)
    assert min(sound.token_ids) >= 0
    assert set(sick.token_ids) == {-1}
    assert sound.parents[:3] == (ROOT,) * 3
