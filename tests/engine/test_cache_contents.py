"""Random histories of an engine; behind each, every entry that the caches call valid is computed anew and compared.

Keys and values depend on all tokens before them, so one entry of another text, of a rejected node or of a neighbour
shows as other bits. Accounting alone is tested as a state machine in tests/unit/kv/test_kv_accounting.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.core.request import RequestOptions
from slipstream.draft.model.draft_model import DraftModelDrafter
from slipstream.draft.proposers.block import BlockDrafter, entry_shapes
from slipstream.engine.engine import Engine
from slipstream.kv.cache import KVCache
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup
from slipstream.models.batch import ForwardBatch
from tests.kit.block_heads import block_head
from tests.kit.marks import needs_kernels

pytestmark = needs_kernels

BLOCK_HEAD = "a random head"
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
SPECS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "ngram": {"method": "ngram"},
    "chain": DRAFT,
    "tree": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 10},
    "eagle3": {
        "method": "eagle3",
        "model": EMBEDDED_EAGLE3,
    },  # keeps features of the target beside its entries
    "dflash": {"method": "dflash", "model": BLOCK_HEAD},
    "layer_skip": {"method": "layer_skip", "exit_layer": 4},  # writes to the target's own cache
    "cascade": {"method": "cascade", "draft": {"method": "ngram"}},  # as does an int8 copy of the target
    "lookahead": {"method": "lookahead"},
}


def spec_of(name: str) -> dict[str, Any] | None:
    """One of `SPECS`, with a head that is written when it is needed."""
    spec = SPECS[name]
    if spec is None or spec.get("model") != BLOCK_HEAD:
        return spec
    return {**spec, "model": block_head("anchor")}


NUM_STEPS = 30
NUM_SLOTS = 640
"""For up to six requests of up to 200 tokens: preemption, eviction and moves come up all the time."""


def check_entries(
    lm: CausalLM, cache: KVCache, feature_layers: tuple[int, ...] = (), tolerance: float = 0.0
) -> int:
    """Every valid entry has the bits that its text alone gives it; returns how many there were."""
    contents = [held for held in cache.accounting.contents() if held.token_ids]
    for entries in contents:
        length = len(entries.token_ids)
        width = len(feature_layers) * lm.hidden_size
        fresh = KVPool(lm.shapes, length, lm.dtype, lm.device, width, lm.cache_dtype)
        hidden = lm.forward([RowGroup(fresh.slots, 0, entries.token_ids, [])], fresh, feature_layers).hidden
        if feature_layers:
            fresh.features.copy_(torch.cat([hidden[layer] for layer in feature_layers], dim=-1))
        held = list(entries.slots)
        assert len(held) == length
        for ours, theirs in zip(cache.pool.tensors, fresh.tensors, strict=True):
            equal = (ours[held].float() - theirs.float()).abs() <= tolerance
            differs = (~equal).reshape(length, -1).any(dim=1).nonzero().flatten().tolist()
            assert differs == [], f"entries {differs} of {entries} are not those of its text"
    return sum(len(entries.token_ids) for entries in contents)


def check_all(engine: Engine, tolerance: float = 0.0) -> int:
    assert engine.integrity() == []
    num = check_entries(engine.model, engine.runner.cache, engine.runner.feature_layers, tolerance)
    if isinstance(engine.drafter, DraftModelDrafter):
        num += check_entries(engine.drafter.model, engine.drafter.cache, (), tolerance)
    if isinstance(engine.drafter, BlockDrafter):
        num += check_context(engine.model, engine.drafter, tolerance)
    return num


def check_context(lm: CausalLM, drafter: BlockDrafter, tolerance: float) -> int:
    """As `check_entries`, of entries that are made of the target's features; returns how many there were."""
    contents = [held for held in drafter.cache.accounting.contents() if held.token_ids]
    for entries in contents:
        length, layers = len(entries.token_ids), drafter.traits.feature_layers
        pool = KVPool(lm.shapes, length, lm.dtype, lm.device, 0, lm.cache_dtype)
        rows = [RowGroup(pool.slots, 0, entries.token_ids, [])]
        hidden = lm.forward(rows, pool, layers).hidden
        fresh = KVPool(entry_shapes(drafter.block), length, lm.dtype, lm.device, 0, lm.cache_dtype)
        features = torch.cat([hidden[layer] for layer in layers], dim=-1)
        drafter.executor.store(ForwardBatch(rows), fresh, features)
        for ours, theirs in zip(drafter.cache.pool.tensors, fresh.tensors, strict=True):
            differs = (ours[list(entries.slots)].float() - theirs.float()).abs() > tolerance
            assert not differs.any(), f"{entries} are not those of its text"
    return sum(len(entries.token_ids) for entries in contents)


def history(engine: Engine, rng: random.Random, prompts: list[list[int]], tolerance: float = 0.0) -> int:
    """Requests come, step, and go or are aborted, in any order; returns how many entries were compared."""
    names: list[str] = []
    for number in range(NUM_STEPS):
        if rng.random() < 0.4 and len(names) < 40:
            prompt = rng.choice(prompts)
            names.append(f"{number}")
            params = SamplingParams(
                temperature=rng.choice([0.0, 0.9]),
                seed=number,
                max_tokens=rng.randint(1, 40),
                n=rng.choice([1, 1, 2]),
            )
            engine.add_request(
                names[-1], prompt[: rng.randint(1, 160)], params, RequestOptions(tenant=rng.choice(["", "a"]))
            )
        if names and rng.random() < 0.1:
            engine.abort(rng.choice(names))
        for _ in range(rng.randint(1, 4)):
            engine.step()
    num = check_all(engine, tolerance)
    while engine.has_unfinished:
        engine.step()
    return num + check_all(engine, tolerance)


CASES = [
    *((name, "auto") for name in SPECS),
    *(("off", "int8"), ("chain", "float32"), ("tree", "bfloat16"), ("tree", "int8"), ("layer_skip", "int8")),
]
"""What drafts, and how keys and values are held."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def engine(request: pytest.FixtureRequest) -> Engine:
    spec, cache = spec_of(request.param[0]), request.param[1]
    plain = LLM(kv_cache_bytes=64 * 2**20, kv_cache_dtype=cache).engine
    per_token = plain.model.kv_bytes_per_token
    if spec is not None:
        drafter = LLM(speculative_config=spec, kv_cache_bytes=64 * 2**20, kv_cache_dtype=cache).engine.drafter
        per_token += drafter.traits.kv_bytes_per_token
        per_token += len(drafter.traits.feature_layers) * plain.model.hidden_size * plain.model.dtype.itemsize
    return LLM(
        speculative_config=spec,
        kv_cache_bytes=NUM_SLOTS * per_token,
        kv_cache_dtype=cache,
        max_model_len=224,
        max_num_seqs=6,
        max_num_batched_tokens=80,
    ).engine


def test_entries_are_those_of_their_text(engine: Engine, prompts: list[list[int]]) -> None:
    assert history(engine, random.Random(1), prompts) > 200


@pytest.mark.long
def test_entries_are_those_of_their_text_in_many_histories(engine: Engine, prompts: list[list[int]]) -> None:
    rng = random.Random(2)
    assert sum(history(engine, rng, prompts) for _ in range(15)) > 2500


def test_a_moved_neighbour_is_found(prompts: list[list[int]]) -> None:
    """The check itself: one number in one entry is enough."""
    engine = LLM(kv_cache_bytes=4 * 2**20, kv_cache_dtype="float32").engine
    history(engine, random.Random(3), prompts)
    held = next(held for held in engine.runner.cache.accounting.contents() if held.token_ids)
    engine.runner.cache.pool.values[2][0, held.slots[len(held.slots) // 2], 3] += 1e-6
    with pytest.raises(AssertionError, match="are not those of its text"):
        check_all(engine)
