"""`prediction` over HTTP: the same answer, counted as OpenAI does, beside tools and in streams."""

from __future__ import annotations

import json
from typing import Any

from serve_cases import MESSAGES
from starlette.testclient import TestClient

BODY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
PATH = "/v1/chat/completions"


def test_the_answer_is_the_same_and_the_prediction_is_counted(shared: TestClient) -> None:
    plain = shared.post(PATH, json=BODY).json()
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]):
        predicted = {"prediction": {"type": "content", "content": content}}
        answer = shared.post(PATH, json=BODY | predicted).json()
        assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 12
        assert details["rejected_prediction_tokens"] <= 2
        assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    wrong = shared.post(PATH, json=BODY | {"prediction": {"type": "content", "content": "zebra"}}).json()
    assert wrong["choices"][0]["message"] == plain["choices"][0]["message"]
    assert wrong["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_a_stream_and_a_completion_count_it_too(shared: TestClient) -> None:
    body = {"prompt": "one two three", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    text = shared.post("/v1/completions", json=body).json()["choices"][0]["text"]
    body |= {"prediction": {"type": "content", "content": text}, "n": 2}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = shared.post("/v1/completions", json=body).text.split("\n\n")
    last = json.loads(lines[-3].removeprefix("data: "))
    assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 16


def test_a_tool_call_that_was_expected(shared: TestClient) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    body = BODY | {"tools": [tool], "tool_choice": "required", "max_tokens": 80, "ignore_eos": False}
    plain = shared.post(PATH, json=body).json()
    expected = {"type": "content", "content": '{"name": "weather", "arguments": {"city": "Bern"}}'}
    answer = shared.post(PATH, json=body | {"prediction": expected}).json()
    calls = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
    assert calls == [call["function"] for call in plain["choices"][0]["message"]["tool_calls"]]
