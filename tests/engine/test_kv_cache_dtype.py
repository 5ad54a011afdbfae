"""With keys and values in any type the text depends on nothing but the type."""

from __future__ import annotations

import pytest

from slipstream import SamplingParams
from slipstream.assets import EMBEDDED_EAGLE3
from slipstream.draft.heads.eagle import EagleDrafter
from tests.kit.engines import MakeLLM, check_same_in_any_company
from tests.kit.marks import needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "float16", "int8"])
def test_the_text_is_the_same_with_drafts_in_any_batch_after_reuse_and_preemption(
    make_llm: MakeLLM, prompts: list[list[int]], cache: str
) -> None:
    check_same_in_any_company(make_llm, prompts, kv_cache_dtype=cache)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_eagle_head_holds_its_entries_as_the_target_does(
    make_llm: MakeLLM, prompts: list[list[int]], kernels: str
) -> None:
    """It drafts over them nearly as well as over float32."""
    spec = {"method": "eagle3", "model": EMBEDDED_EAGLE3}
    rates: list[float] = []
    for kept in ("float32", "bfloat16", "int8"):
        llm = make_llm(spec, kv_cache_dtype=kept, cpu_kernels=kernels)
        assert llm.engine.drafter_as(EagleDrafter).cache.pool.cache_dtype == llm.engine.model.cache_dtype
        outputs = llm.generate(prompts[:4], SamplingParams(temperature=0, max_tokens=30))
        assert llm.engine.stats().num_draft_failures == 0
        rates.append(sum(output.metrics.num_accepted_tokens for output in outputs))
    assert min(rates[1:]) > 0.8 * rates[0] > 30
