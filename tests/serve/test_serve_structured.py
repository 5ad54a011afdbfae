"""Answers that must keep to a form: what clients ask for reaches the engine, on both endpoints, streamed or whole."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from serve_cases import MESSAGES, MODEL, counters, events
from starlette.testclient import TestClient

from slipstream import LLM, SamplingParams, StructuredOutput
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from tests.kit.threaded_host import ThreadedHost

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
DIGITS = 'start: "(" N ")"\nN: /[0-9]{3}/'
NAMED = {"type": "json_schema", "json_schema": {"name": "booking", "schema": SCHEMA, "strict": True}}

CASES: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": NAMED}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"json_schema": SCHEMA, "compact": True},
    ),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"structured_outputs": {"regex": "[a-c]{5}"}}, {"regex": "[a-c]{5}"}),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
    ({"structured_outputs": {"grammar": DIGITS}}, {"grammar": DIGITS}),
]


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize(("asked", "means"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_the_text_is_the_plain_engines(
    shared: TestClient,
    plain: LLM,
    chat_prompt: list[int],
    kind: str,
    asked: dict[str, Any],
    means: dict[str, Any] | None,
) -> None:
    sampling: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 6}
    params = SamplingParams(**sampling, structured=means)
    [expected] = plain.generate(chat_prompt, params)[0].outputs
    body = {"model": MODEL, **sampling, **asked, "stream_options": {"include_usage": True}}
    if kind == "chat":
        path, body["messages"] = "/v1/chat/completions", MESSAGES
    else:
        path, body["prompt"] = "/v1/completions", chat_prompt
    whole = shared.post(path, json=body | {"stream_options": None}).json()
    [choice] = whole["choices"]
    assert (choice["message"]["content"] if kind == "chat" else choice["text"]) == expected.text
    assert choice["finish_reason"] == expected.finish_reason
    assert whole["usage"]["completion_tokens"] == len(expected.token_ids)
    *chunks, last = events(shared.post(path, json=body | {"stream": True}).text)
    pieces = [chunk["choices"][0] for chunk in chunks]
    said = [one["delta"].get("content", "") if kind == "chat" else one["text"] for one in pieces]
    assert "".join(said) == expected.text
    assert last["usage"]["completion_tokens"] == len(expected.token_ids)


def test_answers_that_end_are_valid(shared: TestClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 200, "temperature": 1.0, "n": 4, "seed": 1}
    whole = shared.post("/v1/chat/completions", json=body | {"response_format": NAMED}).json()
    ended = [choice for choice in whole["choices"] if choice["finish_reason"] == "stop"]
    assert ended
    for choice in ended:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_several_prompts_keep_to_one_form(shared: TestClient) -> None:
    body = {"prompt": ["One", "Two"], "n": 2, "max_tokens": 9, "structured_outputs": {"regex": "[0-9]{4}"}}
    choices = shared.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == 4
    assert all(re.fullmatch("[0-9]{4}", choice["text"]) for choice in choices)


def test_what_only_the_engines_compiler_refuses_names_its_parameter(shared: TestClient) -> None:
    """A form that nothing but the empty text has is found when it meets the tokenizer."""
    structured = StructuredOutput(regex="a{0}")
    for stream in (False, True):
        body = {"prompt": "x", "structured_outputs": {"regex": structured.regex}, "stream": stream}
        response = shared.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "structured_outputs"
        assert "allows no text" in response.json()["error"]["message"]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(("regex", "reason"), [("[ac]{2}b+", "error"), ("[ac]{2}b*", "stop")])
def test_an_answer_says_whether_its_form_is_whole(
    shared: TestClient, plain: LLM, regex: str, reason: str, ignore_eos: bool
) -> None:
    only = plain.engine.tokenizer("a", add_special_tokens=False).input_ids
    body = {"structured_outputs": {"regex": regex}, "allowed_token_ids": only, "ignore_eos": ignore_eos}
    for path, asked in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):
        [choice] = shared.post(f"/v1/{path}", json=body | asked | {"max_tokens": 9}).json()["choices"]
        assert choice["finish_reason"] == reason
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) == "aa"
        streamed = shared.post(f"/v1/{path}", json=body | asked | {"max_tokens": 9, "stream": True})
        assert events(streamed.text)[-1]["choices"][0]["finish_reason"] == reason
        [cut] = shared.post(f"/v1/{path}", json=body | asked | {"max_tokens": 1}).json()["choices"]
        assert cut["finish_reason"] == "length"


def test_tokens_that_a_grammar_forces_are_counted_under_its_name() -> None:
    """The drafter knows no text and proposes nothing: nothing may be counted as if it had."""
    silent: dict[str, Any] = {"method": "slipstream.testing.stub_drafters:OracleDrafter"}
    llm = LLM(speculative_config=silent, kv_cache_bytes=40 * 2**20, max_num_seqs=4)
    host = ThreadedHost(llm.engine)
    with TestClient(create_app(host.remote, ServeConfig(), MODEL)) as client:
        asked = {"prompt": "x", "max_tokens": 60, "temperature": 0, "task": "form", "response_format": NAMED}
        assert client.post("/v1/completions", json=asked).status_code == 200
        counted = counters(client)
    host.close()
    name = "slipstream_task_draft_tokens_total"
    drafted = {key: value for key, value in counted.items() if key.startswith(name) and value}
    assert list(drafted) == [name + json.dumps({"method": "grammar", "task": "form"})]
