"""An answer that is preempted for another account has the text that it would have had alone, drafted or not."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, RequestOptions, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.schedule import shares
from tests.kit.engines import MakeLLM

DRAFTS: list[dict[str, Any] | None] = [
    None,
    {"method": "draft_model", "model": EMBEDDED_DRAFT, "tree_top_k": 2, "num_draft_nodes": 6},
    {"method": "suffix"},
]


@pytest.mark.parametrize("speculative", DRAFTS, ids=["off", "draft model", "suffix"])
def test_texts_are_those_alone_though_others_preempt_them(
    make_llm: MakeLLM,
    plain: LLM,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    speculative: dict[str, Any] | None,
) -> None:
    monkeypatch.setattr(shares, "TURN_TOKENS", 8)
    engine = make_llm(speculative, max_num_seqs=2, max_num_batched_tokens=64).engine
    tenants = ["a", "a/ann", "a", "a", "b", "c/ann", "c"]
    asked = [
        (f"{number}", prompts[number % 5], SamplingParams(temperature=0.8, seed=number, max_tokens=30))
        for number in range(len(tenants))
    ]
    expected = {
        name: plain.generate(prompt, params)[0].outputs[0].token_ids for name, prompt, params in asked
    }
    found: dict[str, list[int]] = {}
    waiting = list(zip(asked, tenants, strict=True))
    while waiting or engine.has_unfinished:
        for (name, prompt, params), tenant in waiting[:4] if len(waiting) == len(asked) else waiting[:1]:
            engine.add_request(name, prompt, params, RequestOptions(tenant=tenant))
            del waiting[0]
        for update in engine.step():
            if update.output is not None:
                found[update.request_id] = update.output.outputs[0].token_ids
    assert found == expected
    assert engine.stats().num_preemptions >= 2
