"""With keys and values in any type the text depends on nothing but the type."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.draft.heads.eagle import EagleDrafter
from slipstream.models.cpu import native
from tests.kit.engines import MakeLLM

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason="bits depend on the batch without the kernels"
)

TREE = {"method": "draft_model", "model": EMBEDDED_DRAFT, "tree_top_k": 3, "num_draft_nodes": 10}


def texts(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=60, ignore_eos=True) for i in range(len(prompts))
    ]
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "float16", "int8"])
def test_the_text_is_the_same_with_drafts_in_any_batch_after_reuse_and_preemption(
    make_llm: MakeLLM, prompts: list[list[int]], cache: str
) -> None:
    chosen = sorted(prompts, key=len)[:4]
    plain = make_llm(kv_cache_dtype=cache, max_num_seqs=1, enable_prefix_caching=False)
    expected = texts(plain, chosen)
    drafted = make_llm(TREE, kv_cache_dtype=cache, max_num_batched_tokens=37)
    assert texts(drafted, chosen) == expected
    assert texts(drafted, chosen) == expected, "after reuse of its own prefixes"
    needed = sum(map(len, chosen)) + 30 * len(chosen)  # half of what they come to
    per_token = drafted.engine.memory_plan.kv_bytes_per_token
    tight = make_llm(
        TREE,
        kv_cache_dtype=cache,
        kv_cache_bytes=needed * per_token,
        max_model_len=max(map(len, chosen)) + 61,
    )
    assert texts(tight, chosen) == expected
    assert tight.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("cache", ["bfloat16", "int8"])
def test_an_eagle_head_holds_its_entries_as_the_target_does(
    make_llm: MakeLLM, prompts: list[list[int]], cache: str, kernels: str
) -> None:
    """It drafts over them nearly as well as over float32."""
    spec = {"method": "eagle3", "model": EMBEDDED_EAGLE3}
    rates: list[float] = []
    for kept in (cache, "float32"):
        llm = make_llm(spec, kv_cache_dtype=kept, cpu_kernels=kernels)
        assert llm.engine.drafter_as(EagleDrafter).cache.pool.cache_dtype == llm.engine.model.cache_dtype
        outputs = llm.generate(prompts[:6], SamplingParams(temperature=0, max_tokens=40))
        assert llm.engine.stats().num_draft_failures == 0
        rates.append(sum(output.metrics.num_accepted_tokens for output in outputs))
    assert rates[0] > 0.8 * rates[1] > 60
