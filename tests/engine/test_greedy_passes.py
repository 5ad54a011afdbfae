"""Where only the best tokens of a step matter its pass finds them without logits, and the texts are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.models import CausalLM
from slipstream.models.cpu import rounded_head
from tests.kit.engines import MakeLLM
from tests.kit.marks import needs_kernels

pytestmark = needs_kernels

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
DRAFT_MODEL = {"method": "draft_model", "model": EMBEDDED_DRAFT}
DTYPE: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "float16", "reproducible": False}
"""Of no other test's engines, which would share their target, whose output layer is too small to be rounded."""


def texts(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers to five prompts at once."""
    return [found.outputs[0].token_ids for found in llm.generate(prompts[:5], GREEDY)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each pass of a target whether it found best tokens, every output layer rounded."""
    monkeypatch.setattr(rounded_head, "LEAST_WEIGHTS", 1)
    found: list[bool] = []
    forward: Callable[..., Any] = CausalLM.forward

    def noting(model: CausalLM, *arguments: Any, **keywords: Any) -> Any:
        output = forward(model, *arguments, **keywords)
        if model.rounds_head:  # it is a target
            found.append(output.best is not None)
        return output

    monkeypatch.setattr(CausalLM, "forward", noting)
    return found


@pytest.fixture
def expected(make_llm: MakeLLM, prompts: list[list[int]], passes: list[bool]) -> list[list[int]]:
    """Texts of passes that compute logits."""
    llm = make_llm(**DTYPE)
    llm.engine.on_checked = lambda items: None
    found = texts(llm, prompts)
    assert passes
    assert not any(passes)
    passes.clear()
    return found


@pytest.mark.parametrize(
    "speculative", [None, {"method": "ngram"}, {"method": "suffix"}, DRAFT_MODEL, {"method": "self"}]
)
def test_greedy_texts_are_those_of_logits(
    speculative: dict[str, Any] | None,
    make_llm: MakeLLM,
    prompts: list[list[int]],
    passes: list[bool],
    expected: list[list[int]],
) -> None:
    llm = make_llm(speculative, **DTYPE)
    assert llm.engine.model.executor.struct.rounded_head.linear.panels is not None
    assert texts(llm, prompts) == expected
    assert all(passes)
    assert passes


@pytest.mark.parametrize(
    "other",
    [
        SamplingParams(temperature=0.7, seed=1, max_tokens=24),
        SamplingParams(temperature=0.0, max_tokens=24, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=24, prompt_logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=24, logit_bias={5: 1.0}),
    ],
)
def test_a_request_that_needs_logits_gets_them_and_changes_no_neighbour(
    other: SamplingParams,
    make_llm: MakeLLM,
    prompts: list[list[int]],
    passes: list[bool],
    expected: list[list[int]],
) -> None:
    llm = make_llm(DRAFT_MODEL, **DTYPE)
    alone = llm.generate(prompts[5:6], other)[0].outputs[0]
    passes.clear()
    both = llm.generate(prompts[:6], [*[GREEDY] * 5, other])
    assert [found.outputs[0].token_ids for found in both[:5]] == expected
    assert both[5].outputs[0].token_ids == alone.token_ids
    assert both[5].outputs[0].logprobs == alone.logprobs
    assert not all(passes)


@pytest.mark.parametrize("method", ["token_recycling", "lookahead", "siblings"])
def test_drafters_that_read_logits_get_them(
    method: str,
    make_llm: MakeLLM,
    prompts: list[list[int]],
    passes: list[bool],
    expected: list[list[int]],
) -> None:
    llm = make_llm({"method": method}, **DTYPE)
    assert texts(llm, prompts) == expected
    assert not any(passes)


def test_classical_verifiers_get_logits(
    make_llm: MakeLLM, prompts: list[list[int]], passes: list[bool], expected: list[list[int]]
) -> None:
    llm = make_llm({**DRAFT_MODEL, "verifier": "rejection"}, **DTYPE)
    assert texts(llm, prompts) == expected
    assert not any(passes)
