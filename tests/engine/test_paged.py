"""A cache in shuffled pages, registered as anybody would: its texts are those of the contiguous one.

Its logits are compared with Transformers' own in tests/parity/test_families.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from test_cache_contents import SPECS, check_all, history, spec_of

from slipstream import LLM, SamplingParams
from slipstream.draft.model.draft_model import DraftModelDrafter
from slipstream.models.attention.registry import ATTENTION
from slipstream.testing.paged import PAGE, PagedAccounting, PagedBackend
from tests.kit.engines import MakeLLM

TOLERANCE = 1e-3
"""Tolerance of an entry: PyTorch's attention gives a row other last bits in another batch."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    ATTENTION.register("paged", PagedBackend)
    yield
    ATTENTION.unregister("paged")


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """Tokens, and how many of them were accepted draft tokens: features of the wrong slots would change these alone."""
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=16, ignore_eos=True)
        for number, temperature in enumerate([0.0, 0.9] * (len(prompts) // 2))
    ]
    return [
        (list(output.outputs[0].token_ids), output.metrics.num_accepted_tokens)
        for output in llm.generate(prompts, params)
    ]


@pytest.mark.parametrize("name", SPECS)
def test_texts_are_those_of_contiguous_slots(make_llm: MakeLLM, prompts: list[list[int]], name: str) -> None:
    """Several sequences, chains and trees, and prompts that share a prefix."""
    chosen = [prompt[:60] for prompt in prompts[:4]]
    asked = [*chosen, *chosen[:2]]
    found = {}
    for backend in ("packed", "paged"):
        llm = make_llm(spec_of(name), attention_backend=backend, max_num_batched_tokens=40)
        assert llm.engine.model.backend.layout.unit == (PAGE if backend == "paged" else 64)
        found[backend] = answers(llm, asked)
        if isinstance(llm.engine.drafter, DraftModelDrafter):
            paged = isinstance(llm.engine.drafter.cache.accounting, PagedAccounting)
            assert paged == (backend == "paged"), "the draft model's own cache"
        again = llm.generate(asked[0], SamplingParams(temperature=0.0, max_tokens=4))[0]
        assert again.metrics.num_cached_tokens == len(asked[0]) - 1
    assert found["paged"] == found["packed"]


@pytest.mark.parametrize("name", ["off", "tree", "eagle3", "dflash", "layer_skip"])
def test_entries_are_those_of_their_text(prompts: list[list[int]], name: str) -> None:
    """Preemption, eviction, sharing and copies of pages in a random history; every entry is then computed anew."""
    per_token = LLM(kv_cache_bytes=2**22).engine.model.kv_bytes_per_token
    llm = LLM(
        speculative_config=spec_of(name),
        attention_backend="paged",
        kv_cache_bytes=int(640 * per_token * (1 if name == "off" else 1.3)),
        max_model_len=224,
        max_num_seqs=6,
        max_num_batched_tokens=80,
    )
    assert history(llm.engine, random.Random(1), prompts, TOLERANCE) > 200


def test_a_page_that_is_not_the_sequences_own_is_found(prompts: list[list[int]]) -> None:
    """The check itself."""
    engine = LLM(kv_cache_bytes=2**22, attention_backend="paged").engine
    history(engine, random.Random(3), prompts, TOLERANCE)
    held = max(engine.runner.cache.accounting.contents(), key=lambda held: len(held.slots))
    slots = torch.tensor(held.slots)
    assert (slots.diff() != 1).sum() >= len(slots) // PAGE - 1
    keys = engine.runner.cache.pool.keys[1]
    keys[:, slots[-1]] = keys[:, slots[0]]
    with pytest.raises(AssertionError, match="are not those of its text"):
        check_all(engine, TOLERANCE)
