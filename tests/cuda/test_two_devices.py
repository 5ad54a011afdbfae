"""A draft model on another CUDA device than the target, as far as a CPU shows it: `meta` stands for the target's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.core.pending import PendingNumbers
from slipstream.draft.model.draft_model import DraftModelDrafter
from slipstream.draft.proposers.device_tree import DeviceTrees
from slipstream.draft.proposers.own_cache import CachedDrafter
from slipstream.models.executor import levels
from slipstream.models.executor.chains import Chains, Draw
from slipstream.models.executor.recording import CudaGraph
from tests.kit.kept_trees import KeptTree

OTHER = torch.device("meta")


@pytest.mark.parametrize(
    ("own", "target", "pends"),
    [
        ("cuda:1", "cuda:0", True),
        ("cuda:0", "cuda:0", True),
        ("cpu", "cpu", True),
        ("cpu", "cuda:0", False),
        ("cuda:0", "cpu", False),
    ],
)
def test_drafts_pend_where_they_are_brought_without_a_wait(own: str, target: str, pends: bool) -> None:
    drafter: Any = object.__new__(DraftModelDrafter)
    drafter.device = torch.device(own)
    CachedDrafter.let_pend(drafter, torch.device(target))
    assert drafter.may_pend == pends
    assert drafter.pends_on == (torch.device(target) if pends else None)


def test_chains_lie_on_the_targets_device() -> None:
    chains = Chains([Draw(0.0, [0] * 3), Draw(0.0, [0])], 10, True, OTHER)
    first, second = chains.pending(torch.zeros(3, 4, dtype=torch.int64))
    assert (len(first), len(second)) == (3, 1)
    assert first.tensor.device == second.tensor.device == OTHER


def test_marginals_are_drawn_on_the_device_of_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels are launched on the current device, which may be another."""
    current: list[torch.device] = []
    chosen: list[list[torch.device]] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def choose(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        chosen.append([*current])
        return logits.argmax(-1)

    monkeypatch.setattr(levels, "on_device", on_device)
    monkeypatch.setattr(levels, "choose", choose)
    shape, logits = levels.ChainsShape(2, 10, False), torch.randn(6, 10)
    levels.draw_marginals(shape, torch.zeros(shape.num_numbers, 3, dtype=torch.int64), logits)
    assert chosen == [[logits.device]] * 2


def test_trees_lie_on_the_targets_device() -> None:
    tree: Any = KeptTree(random.Random(0), [1, 2], (4, 2, 2), "greedy")
    trees = DeviceTrees([tree], 10, onto=OTHER)
    levels = trees.shape.levels(torch.zeros(trees.shape.num_numbers, 1, dtype=torch.int64))
    for count in (1, *trees.shape.fed):
        levels.take(torch.randn(count, 10))
    trees.finish(levels.drawn())
    assert tree.proposal is not None
    assert isinstance(tree.proposal.token_ids, PendingNumbers)
    assert isinstance(tree.proposal.parents, PendingNumbers)
    assert tree.proposal.token_ids.tensor.device == OTHER
    assert tree.proposal.parents.tensor.device == OTHER
    assert tree.proposal.ranks.device == OTHER


def test_each_device_records_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch records one of the first device unless it is told another."""
    device, streams = 0, []

    def graph(_: Any, pool: Any, stream: Any, mode: str) -> AbstractContextManager[None]:
        streams.append((pool, stream))
        assert mode == "thread_local"
        return nullcontext()

    cuda = torch.cuda
    monkeypatch.setattr(CudaGraph, "pools", {})
    monkeypatch.setattr(cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: f"pool of {device}")
    monkeypatch.setattr(cuda, "Stream", lambda: f"stream of {device}")
    monkeypatch.setattr(cuda, "current_device", lambda: device)
    monkeypatch.setattr(cuda, "current_stream", lambda: None)
    monkeypatch.setattr(cuda, "graph", graph)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    for number in (0, 1, 0):
        device = number
        assert CudaGraph().record(lambda: "computed") == "computed"
        assert streams[-1] == (f"pool of {number}", f"stream of {number}")
