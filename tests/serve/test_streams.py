"""Streams: framed as OpenAI's, equal to the engine's own text, and counted exactly."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import MESSAGES, MODEL, QUESTION, MakeApp, counters, events
from starlette.testclient import TestClient

from slipstream import LLM, SamplingParams

CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "stream": True}


def own_text(plain: LLM, prompt: list[int], **params: Any) -> Any:
    """What the engine without speculation says."""
    return plain.generate(prompt, SamplingParams(**params))[0]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 11, "n": 2}], ids=str)
def test_a_chat_streams_the_engines_own_text(
    client: TestClient, plain: LLM, chat_prompt: list[int], sampling: dict[str, Any]
) -> None:
    body = {**CHAT, **sampling, "stream_options": {"include_usage": True}, "return_token_ids": True}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    expected = own_text(plain, chat_prompt, max_tokens=40, **sampling)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    for answer in expected.outputs:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == answer.index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == answer.text
        assert [token for choice in mine for token in choice["token_ids"]] == answer.token_ids
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [answer.finish_reason]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == sum(len(answer.token_ids) for answer in expected.outputs)
    assert usage["prompt_tokens"] == len(chat_prompt)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
