"""What tests of the engine ask for by name: a maker of engines, and the drafter that knows the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT

ORACLE = "slipstream.testing.stub_drafters:OracleDrafter"

TREE = {"method": "draft_model", "model": EMBEDDED_DRAFT, "tree_top_k": 3, "num_draft_nodes": 10}

MakeLLM = Callable[..., LLM]


def sampled_texts(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Sixty tokens each."""
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=60, ignore_eos=True) for i in range(len(prompts))
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def check_same_in_any_company(make_llm: MakeLLM, prompts: list[list[int]], **options: Any) -> None:
    """With these options the text is the same with drafts, in a batch, after reuse and after preemption."""
    chosen = sorted(prompts, key=len)[:4]
    plain = make_llm(**options, max_num_seqs=1, enable_prefix_caching=False)
    expected = sampled_texts(plain, chosen)
    drafted = make_llm(TREE, **options, max_num_batched_tokens=37)
    assert sampled_texts(drafted, chosen) == expected
    assert sampled_texts(drafted, chosen) == expected, "after reuse of its own prefixes"
    needed = sum(map(len, chosen)) + 30 * len(chosen)  # half of what the answers come to
    room = needed * drafted.engine.memory_plan.kv_bytes_per_token
    tight = make_llm(TREE, **options, kv_cache_bytes=room, max_model_len=max(map(len, chosen)) + 61)
    assert sampled_texts(tight, chosen) == expected
    assert tight.engine.stats().num_preemptions > 0
