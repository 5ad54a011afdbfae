"""The same engine on a GPU. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts

pytestmark = pytest.mark.gpu

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
CONVERSATIONS = [row["messages"] for row in sample_prompts()[:28]]


def answers(
    spec: dict[str, Any] | None, device: str, temperature: float, dtype: str = "float32"
) -> list[list[int]]:
    llm = LLM(speculative_config=spec, device=device, dtype=dtype)
    params = [
        SamplingParams(temperature=temperature, max_tokens=24, seed=n) for n in range(len(CONVERSATIONS))
    ]
    outputs = llm.chat(CONVERSATIONS, params)
    assert llm.engine.integrity() == []
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_gpu_says_what_a_cpu_says(temperature: float) -> None:
    on_cpu, on_gpu = (answers(None, device, temperature) for device in ("cpu", "cuda"))
    equal = sum(a == b for a, b in zip(on_cpu, on_gpu, strict=True))
    assert equal >= len(on_cpu) - 2, "but for near-ties"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "spec",
    [
        {"method": "ngram"},
        {"method": "suffix"},
        DRAFT,
        {**DRAFT, "tree_top_k": 3},
        {**DRAFT, "device": "cpu"},
    ],
    ids=["ngram", "suffix", "chain", "tree", "draft-on-cpu"],
)
def test_speculation_changes_no_text_on_a_gpu(spec: dict[str, Any], temperature: float) -> None:
    off, on = answers(None, "cuda", temperature), answers(spec, "cuda", temperature)
    equal = sum(a == b for a, b in zip(off, on, strict=True))
    assert equal >= len(off) - 1, "but for near-ties"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_answers(dtype: str) -> None:
    assert all(answers(DRAFT, "cuda", 0.0, dtype))
