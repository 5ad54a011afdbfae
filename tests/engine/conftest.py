"""A small real model for the engine's tests: the embedded pair, loaded once for each configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream import LLM
from slipstream.assets import sample_prompts
from slipstream.text.prompts import encode_chat
from tests.kit.engines import MakeLLM


@pytest.fixture
def make_llm() -> Iterator[MakeLLM]:
    """Makes engines on the embedded target, and checks the invariants of each when the test is over."""
    made: list[LLM] = []

    def make(speculative_config: dict[str, Any] | None = None, **options: Any) -> LLM:
        options.setdefault("kv_cache_bytes", 64 * 2**20)
        made.append(LLM(speculative_config=speculative_config, **options))
        return made[-1]

    yield make
    for llm in made:
        assert llm.engine.integrity() == []


@pytest.fixture(scope="session")
def plain() -> LLM:
    """Speculation off."""
    return LLM(kv_cache_bytes=64 * 2**20)


@pytest.fixture(scope="session")
def prompts(plain: LLM) -> list[list[int]]:
    """28 chat prompts as token ids, four a task."""
    return [encode_chat(plain.engine.tokenizer, row["messages"]) for row in sample_prompts()[:28]]
