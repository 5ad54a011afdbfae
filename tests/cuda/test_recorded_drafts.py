"""Whole drafts that one recording draws, against the same drafts a level at a time."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.core.pending import PendingNumbers
from slipstream.draft.proposers.device_tree import DeviceTrees
from slipstream.kv.cache import KVCache
from slipstream.kv.slots import SlotMap
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor import recorded_drafts
from slipstream.models.executor.chains import Chains, Draw
from slipstream.models.executor.cuda_graph import CudaGraphExecutor
from slipstream.models.executor.recording import RecordedPass
from tests.kit.kept_trees import KeptTree, grow_by_paths

LENGTHS = (11, 6, 17)
"""Tokens of the texts; the last of each, or the last two, have no entry yet."""


@cache
def model() -> CausalLM:
    return load_model(
        EMBEDDED_DRAFT,
        dtype="float32",
        cpu_kernels="torch",
        attention_backend="slipstream.testing.recorded_graph:TritonOnCpu",
        executor="slipstream.testing.recorded_graph:RecordedExecutor",
        canary=False,
    )


def executor() -> CudaGraphExecutor:
    found = model().executor
    assert isinstance(found, CudaGraphExecutor)
    return found


def texts(rng: random.Random, number: int) -> list[list[int]]:
    return [[rng.randrange(5, 400) for _ in range(LENGTHS[n])] for n in range(number)]


def opened(cache: KVCache, own: list[list[int]], rng: random.Random) -> list[RowGroup]:
    """Have the cache hold nothing but the texts without their last tokens; the rows of these."""
    cache.pool.fill(float("nan"))
    rows = []
    for owner in range(len(LENGTHS)):
        if owner in cache.accounting:
            cache.accounting.close(owner, retain=False)
    for owner, text in enumerate(own):
        cache.accounting.open(owner, [])
        assert cache.accounting.reserve(owner, len(text) + 20)
    for owner, text in enumerate(own):
        past = len(text) - rng.choice([1, 2])
        model().forward([RowGroup(slots_of(cache, owner), 0, text[:past], [])], cache.pool)
        rows.append(RowGroup(slots_of(cache, owner), past, text[past:], [len(text) - past - 1]))
    return rows


def slots_of(cache: KVCache, owner: int) -> SlotMap:
    return cache.accounting.slots(owner)


def drawing(rng: random.Random, kind: str, length: int) -> Draw:
    keys = [rng.getrandbits(64) for _ in range(length)]
    kind = rng.choice(["greedy", "coupled", "filtered", "coldest"]) if kind == "mixed" else kind
    if kind == "greedy":
        return Draw(0.0, keys)
    if kind == "coldest":
        return Draw(0.7, keys, greedy=True)
    filters = (rng.choice([0, 5, 40]), rng.choice([0.5, 0.9]), rng.choice([0.0, 0.05]))
    return Draw(rng.uniform(0.5, 1.5), keys, *(filters if kind == "filtered" else ()))


@pytest.mark.parametrize("kind", ["greedy", "coupled", "filtered", "mixed"])
def test_a_recorded_chain_is_the_chain_that_the_host_draws(kind: str) -> None:
    rng = random.Random(kind)
    replayed, cache = executor().drafts.num_replayed, model().new_cache(512)
    for depth in (2, 4, 4, 4, 2, 4):
        own = texts(rng, rng.choice([1, 2, 3]))
        rows = opened(cache, own, rng)
        lengths = [depth, *(rng.randint(1, depth) for _ in own[1:])]
        draws = [drawing(rng, kind, length) for length in lengths]
        before = [tensor.clone() for tensor in cache.pool.tensors]
        in_turn = model().draft_chain(rows, cache.pool, Chains(draws, 300))
        expected = [tensor.clone() for tensor in cache.pool.tensors]
        for tensor, kept in zip(cache.pool.tensors, before, strict=True):
            tensor.copy_(kept)
        at_once = model().draft_chain(rows, cache.pool, Chains(draws, 300, may_pend=True))
        assert all(isinstance(chain, PendingNumbers) and chain.is_pending for chain in at_once)
        assert [list(chain) for chain in at_once] == [list(chain) for chain in in_turn]
        for ours, theirs in zip(cache.pool.tensors, expected, strict=True):
            held = slice(0, cache.pool.num_slots)  # both have left the same entries
            assert torch.allclose(ours[held], theirs[held], atol=1e-5, equal_nan=True)
    assert executor().drafts.num_replayed == replayed + 6
    assert not executor().drafts.refused


@pytest.mark.parametrize("kind", ["greedy", "coupled", "filtered", "mixed"])
@pytest.mark.parametrize("shape", [(12, 4, 3), (7, 3, 2), (3, 1, 3)])
def test_a_recorded_tree_is_the_tree_that_grows_a_pass_a_level(
    shape: tuple[int, int, int], kind: str
) -> None:
    rng = random.Random(f"{shape} {kind}")
    replayed, cache = executor().drafts.num_replayed, model().new_cache(512)
    for number in (1, 3, 1):
        own = texts(rng, number)
        rows = opened(cache, own, rng)
        firsts = [(slots_of(cache, owner), len(text)) for owner, text in enumerate(own)]
        trees: list[Any] = [KeptTree(rng, text, shape, kind) for text in own]
        trees[-1].max_nodes = max(1, shape[0] - 2)
        grower = DeviceTrees(trees, 300, firsts)
        with torch.inference_mode():
            drawn = executor().draft(ForwardBatch(rows), cache.pool, grower)
            assert drawn is not None
            grower.finish(drawn)
            recorded = [tree.grown for tree in trees]
            logits = model().forward(rows, cache.pool).logits
            grower.draw(logits, lambda level, pool=cache.pool: model().forward(level, pool).logits)
        assert recorded == [tree.grown for tree in trees]
    assert executor().drafts.num_replayed == replayed + 3


def test_drafts_that_are_not_recorded_are_counted_by_why(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, drafts = random.Random(0), executor().drafts
    own, cache = texts(rng, 1), model().new_cache(512)
    rows = opened(cache, own, rng)
    draws = [drawing(rng, "coupled", 3)]
    expected = [list(chain) for chain in model().draft_chain(rows, cache.pool, Chains(draws, 300))]
    monkeypatch.setattr(recorded_drafts, "most_wanted", lambda _: 0)
    replayed = drafts.num_replayed
    found = model().draft_chain(rows, cache.pool, Chains(draws, 300, may_pend=True))
    assert [list(chain) for chain in found] == expected
    assert drafts.num_replayed == replayed
    assert drafts.refused["too many rows"] == 1
    drafts.refused.clear()


def test_a_recording_that_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, drafts = random.Random(1), executor().drafts
    own, cache = texts(rng, 1), model().new_cache(512)
    rows = opened(cache, own, rng)
    draws = [drawing(rng, "coupled", 2)]

    class Fails(RecordedPass[torch.Tensor]):
        def replay(self, _: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no graph today\nand more")

    monkeypatch.setattr(recorded_drafts, "RecordedPass", Fails)
    expected = [list(chain) for chain in model().draft_chain(rows, cache.pool, Chains(draws, 300))]
    for _ in range(2):
        found = model().draft_chain(rows, cache.pool, Chains(draws, 300, may_pend=True))
        assert [list(chain) for chain in found] == expected
    assert drafts.refused["no graph today"] == 2
    drafts.refused.clear()
    drafts.failure = None


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["greedy", "coupled"])
def test_drafts_of_one_pass_are_drawn_from_its_rows(kind: str) -> None:
    rng, cache, depth = random.Random(kind), model().new_cache(512), 3
    for number in (3, 1, 3):
        own = texts(rng, number)
        rows = [
            replace(
                group,
                token_ids=[*group.token_ids, 7, 7],
                logit_rows=range(len(group.token_ids) - 1, len(group.token_ids) + 2),
            )
            for group in opened(cache, own, rng)
        ]
        logits = model().forward(rows, cache.pool).logits
        trees: list[Any] = [KeptTree(rng, text, (8, depth, 3), kind) for text in own]
        grower = DeviceTrees(trees, 300)
        drawn = executor().draft(ForwardBatch(rows), cache.pool, grower, at_once=True)
        assert drawn is not None
        grower.finish(drawn)
        found = [tree.grown for tree in trees]
        grow_by_paths(
            trees, 300, lambda owner, path, logits=logits: logits[owner * depth + len(path)]
        )  # fmt: skip
        assert found == [tree.grown for tree in trees]
