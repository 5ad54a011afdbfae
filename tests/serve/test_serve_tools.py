"""Tools: what the model is shown, what it may call, and what clients get, streamed or whole."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI
from serve_cases import MESSAGES, MODEL, MakeApp, events
from starlette.testclient import TestClient

from slipstream import LLM
from slipstream.serve.api.schema import ChatBody
from slipstream.serve.tools.formats import FORMATS, ToolFormat, tool_format
from slipstream.serve.tools.tools import tool_use
from slipstream.text import template_bound

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NEWS = {
    "type": "object",
    "properties": {"topics": {"type": "array", "items": {"enum": ["sport", "arts"]}, "maxItems": 2}},
    "required": ["topics"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_news": NEWS}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "Look it up.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
BODY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 120}
NEWS_ONLY = {"type": "function", "function": {"name": "get_news"}}

TRAVEL = ToolFormat(
    "travel",
    mark='{"service": "',
    head='{"service": "Travel_1", "method": "',
    middle='", "parameters": ',
    tail="}",
    between="\n",
)
"""How the embedded pair writes calls: what it was trained on begins like this."""


def check_calls(message: dict[str, Any]) -> list[str]:
    """The names of the calls, which must all be right."""
    for call in message["tool_calls"]:
        assert call.keys() == {"id", "type", "function"}
        assert call["type"] == "function"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
    return [call["function"]["name"] for call in message["tool_calls"]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("choice", "parallel"), [("required", False), ("required", True), (NEWS_ONLY, True)], ids=str
)
def test_calls_that_must_come_are_right(shared: TestClient, choice: Any, parallel: bool, seed: int) -> None:
    body = {**BODY, "tool_choice": choice, "parallel_tool_calls": parallel, "seed": seed}
    [answer] = shared.post(PATH, json=body).json()["choices"]
    message = answer["message"]
    assert message["content"] is None
    if answer["finish_reason"] == "length":
        message["tool_calls"].pop()
        assert parallel
    else:
        assert answer["finish_reason"] == "tool_calls"
        assert message["tool_calls"]
    names = check_calls(message)
    if choice == NEWS_ONLY:
        assert names == ["get_news"]
    elif not parallel:
        assert len(names) == 1


def test_more_than_one_call_may_come(shared: TestClient) -> None:
    body = {**BODY, "tool_choice": "required", "n": 4, "max_tokens": 200, "seed": 1}
    choices = shared.post(PATH, json=body).json()["choices"]
    assert max(len(choice["message"]["tool_calls"]) for choice in choices) > 1
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("choice", ["auto", "required", NEWS_ONLY], ids=str)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3, "n": 2}], ids=str)
def test_a_stream_is_the_whole_answer_in_pieces(
    shared: TestClient, choice: Any, sampling: dict[str, Any]
) -> None:
    body = {**BODY, **sampling, "tool_choice": choice, "return_token_ids": True}
    body |= {"logprobs": True, "top_logprobs": 1}
    whole = shared.post(PATH, json=body).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(shared.post(PATH, json=body).text)
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for expected in whole["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == expected["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        content = "".join(one["delta"].get("content") or "" for one in mine)
        assert (content or None) == expected["message"]["content"]
        calls: list[list[str]] = []
        for one in mine:
            for part in one["delta"].get("tool_calls", []):
                if part["index"] == len(calls):
                    assert part["id"]
                    assert part["type"] == "function"
                    calls.append([part["function"]["name"], ""])
                else:
                    assert part.keys() == {"index", "function"}
                calls[part["index"]][1] += part["function"]["arguments"]
        wanted = [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in expected["message"].get("tool_calls", [])
        ]
        assert calls == wanted
        assert [one["finish_reason"] for one in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == expected["finish_reason"]
        tokens = [token for one in mine for token in one["token_ids"]]
        assert tokens == expected["token_ids"]
        entries = [entry for one in mine for entry in (one["logprobs"] or {"content": []})["content"]]
        assert len(entries) == len(expected["logprobs"]["content"]) == len(tokens)
    counted = sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert counted == whole["usage"]["completion_tokens"]


@pytest.fixture
def travelling(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    app = make_app()
    monkeypatch.setattr(app.state.service.tokens, "tool_format", TRAVEL)
    return app


def test_the_model_chooses_between_text_and_calls(travelling: FastAPI) -> None:
    """Nothing makes it call but what it has learnt; where it begins to, the rest is right."""
    asked = {"hotels": [{"role": "user", "content": "Show me hotels in London."}], "sql": MESSAGES}
    with TestClient(travelling) as client:
        for stream in (False, True):
            found = {}
            for task, messages in asked.items():
                body = {**BODY, "messages": messages, "temperature": 0, "stream": stream}
                body["parallel_tool_calls"] = False
                response = client.post(PATH, json=body)
                if stream:
                    choices = [chunk["choices"][0] for chunk in events(response.text)]
                    found[task] = any("tool_calls" in one["delta"] for one in choices)
                    assert choices[-1]["finish_reason"] == ("tool_calls" if found[task] else "stop")
                else:
                    [choice] = response.json()["choices"]
                    found[task] = "tool_calls" in choice["message"]
                    if found[task]:
                        assert check_calls(choice["message"])[0] in SCHEMAS
                    else:
                        assert choice["message"]["content"]
            assert found == {"hotels": True, "sql": False}


def test_no_tools_may_be_called(shared: TestClient, chat_prompt: list[int]) -> None:
    body = {**BODY, "tool_choice": "none", "temperature": 0, "return_token_ids": True}
    answer = shared.post(PATH, json=body).json()
    assert answer["prompt_token_ids"] == chat_prompt, "tools that may not be called are not shown"
    plain = {key: value for key, value in body.items() if key not in ("tools", "tool_choice")}
    assert shared.post(PATH, json=plain).json()["choices"] == answer["choices"]


def test_a_form_or_a_call(shared: TestClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    seen = set()
    for seed in range(12):
        body = {**BODY, "response_format": form, "seed": seed, "temperature": 1.5}
        [choice] = shared.post(PATH, json=body).json()["choices"]
        if choice["finish_reason"] == "tool_calls":
            check_calls(choice["message"])
        elif choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        seen.add(choice["finish_reason"])
    assert "stop" in seen
    assert "tool_calls" in seen


def test_forms_that_are_json_exclude_json_answers(make_app: MakeApp) -> None:
    form = {"type": "json_object"}
    with TestClient(make_app(tool_call_parser="llama3_json")) as client:
        refused = client.post(PATH, json={**BODY, "response_format": form})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format"
        for choice in ("none", "required"):
            body = {**BODY, "response_format": form, "tool_choice": choice}
            assert client.post(PATH, json=body).status_code == 200


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_format_by_its_option(make_app: MakeApp, plain: LLM, form: ToolFormat) -> None:
    with TestClient(make_app(tool_call_parser=form.name)) as client:
        body = {**BODY, "tool_choice": "required", "parallel_tool_calls": False, "return_token_ids": True}
        answer = client.post(PATH, json=body | {"seed": 2}).json()
    [choice] = answer["choices"]
    [name] = check_calls(choice["message"])
    text = plain.engine.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert text == form.written([(name, choice["message"]["tool_calls"][0]["function"]["arguments"])])
    assert choice["finish_reason"] == "tool_calls"
    shown = plain.engine.tokenizer.decode(answer["prompt_token_ids"])
    assert form.written([("FUNCTION", '{"PARAMETER": "VALUE"}')]) in shown


def test_an_answer_that_was_cut_off_has_no_end(shared: TestClient) -> None:
    body = {**BODY, "tool_choice": NEWS_ONLY, "max_tokens": 25, "temperature": 0}
    [choice] = shared.post(PATH, json=body).json()["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_news"
    assert call["function"]["arguments"].startswith("{")
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(call["function"]["arguments"])


def history(content: str | None = None, arguments: str = '{"city": "Rome"}') -> list[dict[str, Any]]:
    """A conversation in which a tool was called."""
    call = {"name": "get_weather", "arguments": arguments}
    return [
        *MESSAGES,
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "17 degrees"},
    ]


def prompt_of(client: TestClient, plain: LLM, **values: Any) -> str:
    body = {**BODY, "max_tokens": 1, "return_token_ids": True, **values}
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return str(plain.engine.tokenizer.decode(response.json()["prompt_token_ids"]))


def test_a_template_without_tools_gets_them_in_the_text(shared: TestClient, plain: LLM) -> None:
    text = prompt_of(shared, plain, messages=history("Wait."))
    assert text.startswith("<|system|>You can call these functions:\n")
    for one in TOOLS:
        assert json.dumps(one) in text
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert f"<|assistant|>Wait.{call}<|end|><|tool|>17 degrees<|end|><|assistant|>" in text
    mine = prompt_of(shared, plain, messages=[{"role": "system", "content": "Be brief."}, *MESSAGES])
    assert mine.startswith("<|system|>Be brief.\n\nYou can call these functions:\n")
    without = prompt_of(shared, plain, messages=history(), tools=None)
    assert f"<|assistant|>{call}<|end|>" in without
    assert "You can call" not in without


@pytest.mark.parametrize("arguments", ["", " \n", "{}"])
def test_no_arguments_are_an_empty_object(shared: TestClient, plain: LLM, arguments: str) -> None:
    """As clients that join a stream's pieces send them back."""
    text = prompt_of(shared, plain, messages=history(arguments=arguments))
    assert '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>' in text


TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){{ c.id }}"
    "{% endfor %}{{ m.tool_call_id }}{% endfor %}<tool_call>"
)


def test_a_template_that_knows_tools_gets_them(
    make_app: MakeApp, drafting: LLM, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting.engine.tokenizer, "chat_template", TEMPLATE)
    with TestClient(make_app()) as client:
        text = prompt_of(client, plain, messages=history())
    question = MESSAGES[0]["content"]
    expected = f"[get_weather][get_news]<user>{question}<assistant>get_weather(Rome)abcdefghi"
    assert text == f"{expected}<tool>17 degreesabcdefghi<tool_call>"


def test_a_template_without_an_end_fails_its_request_and_the_server_goes_on(
    make_app: MakeApp, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(template_bound, "MAX_STEPS", 20_000)
    asked = {"messages": MESSAGES, "max_tokens": 1}
    with TestClient(make_app()) as client:
        with monkeypatch.context() as changed:
            changed.setattr(drafting.engine.tokenizer, "chat_template", endless)
            refused = client.post("/v1/chat/completions", json=asked)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "has no end" in refused.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json=asked).status_code == 200


@pytest.mark.parametrize("strict", [True, False])
def test_strict_closes_the_objects_that_list_their_names(strict: bool) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "string"}}}
    free = {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}
    parts = {"anyOf": [inner], "properties": {"c": {}}}
    given = {"properties": {"a": {"type": "array", "items": inner}, "free": free, "parts": parts}}
    function = {"name": "f", "parameters": given, "strict": strict}
    body = ChatBody.model_validate({"messages": [], "tools": [{"type": "function", "function": function}]})
    use = tool_use(body, tool_format("hermes", ""))
    assert use is not None
    schema = json.loads(use.schemas[0])
    assert ("additionalProperties" in schema) is strict
    closed = inner | {"additionalProperties": False}
    assert schema["properties"]["a"]["items"] == (closed if strict else inner)
    assert schema["properties"]["free"] == free
    assert schema["properties"]["parts"] == parts
    assert use.tools[0]["function"]["parameters"] == given
