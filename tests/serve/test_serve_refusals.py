"""Every refusal has OpenAI's shape and its own status, and comes before any 200."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from serve_cases import MESSAGES, MODEL, MakeApp
from starlette.testclient import TestClient

from slipstream.errors import ConfigError
from slipstream.serve.api.errors import MAX_MESSAGE, MAX_NAME
from slipstream.serve.api.unsupported import HARMLESS, IGNORED, UNSUPPORTED
from slipstream.serve.config import ServeConfig
from slipstream.serve.logs import MAX_PATH, JsonFormatter
from slipstream.serve.network.json_body import num_parts

CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
TEXT = {"model": MODEL, "prompt": "Once", "max_tokens": 4}
JSON = {"Content-Type": "application/json"}
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error, whose shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def schema(value: Any) -> dict[str, Any]:
    """Asks for JSON under a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def nested(depth: int) -> dict[str, Any]:
    """A schema of arrays in arrays."""
    return {} if depth == 0 else {"type": "array", "items": nested(depth - 1)}


BAD = [
    ("chat", {"temperature": -1}, "temperature", "within [0, 1e+06]"),
    ("chat", {"temperature": "warm"}, "temperature", "valid number"),
    ("chat", {"temperature": "0.5"}, "temperature", "valid number"),
    ("chat", {"temprature": 0.5}, "temprature", "did you mean temperature?"),
    ("chat", {"top_p": 0}, "top_p", "above 0"),
    ("chat", {"top_k": -2}, "top_k", "at least -1"),
    ("chat", {"min_p": 2}, "min_p", "within [0, 1]"),
    ("chat", {"seed": -(2**63) - 1}, "seed", "at least -9223372036854775808"),
    ("chat", {"n": 0}, "n", "at least 1"),
    (
        "chat",
        {"allowed_token_ids": [1] * 5000},
        "allowed_token_ids",
        "holds 5000 ids, but the model has 4096",
    ),
    (
        "text",
        {"stop_token_ids": [1] * 5000},
        "stop_token_ids",
        "holds 5000 ids, but the model has 4096",
    ),
    ("chat", {"n": 10000}, "n", "at once"),
    ("chat", {"best_of": 2}, "best_of", "not supported"),
    ("chat", {"max_tokens": 0}, "max_tokens", "at least 1"),
    ("chat", {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ("chat", {"max_completion_tokens": 5}, "max_tokens", "different things"),
    ("chat", {"max_tokens": 100000}, "max_tokens", "shorten"),
    ("chat", {"min_tokens": 9}, "min_tokens", "at most max_tokens"),
    ("chat", {"presence_penalty": 3}, "presence_penalty", "within [-2, 2]"),
    ("chat", {"frequency_penalty": -3}, "frequency_penalty", "within [-2, 2]"),
    ("chat", {"repetition_penalty": 0}, "repetition_penalty", "within [0.0001, 10000]"),
    ("chat", {"logit_bias": {"999999": 1}}, "logit_bias", "token id 999999"),
    ("chat", {"logit_bias": {"5": 101}}, "logit_bias", "within [-100, 100]"),
    ("chat", {"logit_bias": {"five": 1}}, "logit_bias", "five"),
    ("chat", {"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ("chat", {"stop": [""]}, "stop", "not empty"),
    ("chat", {"stop_token_ids": [4096]}, "stop_token_ids", "token id 4096"),
    ("chat", {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "logprobs", "at most 20"),
    ("text", {"logprobs": 21}, "logprobs", "at most 20"),
    ("text", {"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ("text", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
    ("text", {"stream_options": {"include_usage": True}}, "stream_options", "set stream"),
    (
        "text",
        {"stream": True, "stream_options": {"include_usag": True}},
        "stream_options.include_usag",
        "did you mean include_usage?",
    ),
    ("text", {"suffix": "end"}, "suffix", "not supported"),
    ("text", {"prompt": []}, "prompt", "empty"),
    ("text", {"prompt": [4096]}, "prompt", "0 to 4095"),
    ("text", {"prompt": [-1]}, "prompt", "0 to 4095"),
    ("text", {"prompt": [1, "a"]}, "prompt", "list of token ids"),
    ("text", {"prompt": 5}, "prompt", "must be a string"),
    ("text", {"prompt": "word " * 3000}, "prompt", "shorten it"),
    ("chat", {"messages": []}, "messages", "empty"),
    ("chat", {"messages": [{"role": "user"}]}, "messages", "message"),
    ("chat", {"messages": [{"content": "hi"}]}, "messages.0.role", "missing"),
    ("chat", {"messages": "hi"}, "messages", "list"),
    ("chat", {"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", "shorten it"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
        "text only",
    ),
    ("chat", {"response_format": {"type": "json"}}, "response_format.type", "'json_object'"),
    ("chat", {"response_format": {}}, "response_format.type", "missing"),
    ("text", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        "text",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "missing",
    ),
    ("chat", schema({"type": "strin"}), "response_format", "Invalid type: strin"),
    ("text", schema({"not": {}}), "response_format", "cannot be used"),
    ("chat", schema({"enum": []}), "response_format", "cannot be used"),
    ("chat", schema(False), "response_format.json_schema.schema", "allows nothing"),
    ("chat", schema(nested(150)), None, "nested deeper"),
    ("text", {"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ("text", {"structured_outputs": {"regex": ""}}, "structured_outputs", "not empty"),
    ("text", {"structured_outputs": {"grammar": "start: gone"}}, "structured_outputs", "gone"),
    ("text", {"structured_outputs": {"choice": []}}, "structured_outputs", "not empty"),
    ("text", {"structured_outputs": {"json": "{"}}, "structured_outputs", "not valid JSON"),
    ("text", {"structured_outputs": {"json": "[" * 9999}}, "structured_outputs", "not valid JSON"),
    ("text", {"structured_outputs": {}}, "structured_outputs", "exactly one of json"),
    ("text", {"structured_outputs": {"json_object": True, "regex": "a"}}, "structured_outputs", "one of"),
    (
        "text",
        {"structured_outputs": {"jso": {}}},
        "structured_outputs.jso",
        "did you mean json?",
    ),
    (
        "chat",
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "give one of them",
    ),
    ("chat", {"structured_outputs": {"regex": "a"}, "tools": [tool()]}, "structured_outputs", "exclude"),
    ("chat", {"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
    ("chat", {"tools": [{"type": "custom", "function": {}}]}, "tools.0.type", "'function'"),
    ("chat", {"tools": [tool(name="a b")]}, "tools.0.function.name", "pattern"),
    ("chat", {"tools": [tool(parameter={})]}, "tools.0.function.parameter", "did you mean parameters?"),
    ("chat", {"tools": [tool(), tool()]}, "tools", "two functions called 'f'"),
    ("chat", {"tools": [tool()] * 129}, "tools", "at most 128"),
    (
        "chat",
        {"tools": [tool(), tool(name="g", parameters={"type": "array"})]},
        "tools.1.function.parameters",
        "must be 'object'",
    ),
    (
        "chat",
        {"tools": [tool(parameters={"properties": {"a": {"type": "str"}}})]},
        "tools.0.function.parameters",
        "Invalid type: str",
    ),
    ("chat", {"tool_choice": "required"}, "tool_choice", "no tools"),
    ("chat", {"tool_choice": "any", "tools": [tool()]}, "tool_choice", "must be 'none', 'auto'"),
    ("chat", {"tool_choice": named("g"), "tools": [tool()]}, "tool_choice", "not among the tools"),
    ("chat", {"tool_choice": named("g")}, "tool_choice", "no tools"),
    ("chat", {"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice", "must be 'none'"),
    ("text", {"tools": [tool()]}, "tools", "is for /v1/chat/completions"),
    ("text", {"top_logprobs": 1}, "top_logprobs", "is for /v1/chat/completions"),
    ("chat", {"echo": True}, "echo", "is for /v1/completions"),
    ("chat", {"topP": 0.5}, "topP", "did you mean top_p?"),
    ("chat", {"messagess": []}, "messagess", "did you mean messages?"),
    ("text", {"mirostat_mode": 2}, "mirostat_mode", "does not sample so"),
    ("text", {"typical_p": 0.9}, "typical_p", "does not sample so"),
    ("text", {"use_beam_search": True}, "use_beam_search", "no beam search"),
    ("text", {"use_beam_search": 0}, "use_beam_search", "no beam search"),
    ("text", {"max_completion_tokens": 5}, "max_tokens", "different things"),
    ("chat", {"chat_id\r\nX-Forged: 1": "a"}, "chat_id\r\nX-Forged: 1", "unknown parameter"),
    ("chat", {f"x{number}z": 1 for number in range(65)}, "x64z", "unknown parameter"),
    (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages.0.tool_calls.0.function.arguments",
        "missing",
    ),
    (
        "chat",
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [called("[1]")]}]},
        "messages.1.tool_calls",
        "JSON object",
    ),
    ("chat", {"speculation": {"method": "eagle3"}}, "speculation.method", "'draft_model' or 'off'"),
    ("chat", {"speculation": {"max_tokens": -1}}, "speculation.max_tokens", "at least 0"),
    ("chat", {"speculation": {"enable": True}}, "speculation.enable", "did you mean enabled?"),
    ("chat", {"task": "x" * 129}, "task", "at most 128"),
    ("chat", {"stop": ["x"] * 65}, "stop", "at most 64"),
    ("chat", {"bad_words": ["x"] * 257}, "bad_words", "at most 256"),
    (
        "chat",
        {"chat_template_kwargs": {"chat_template": "x"}},
        "messages",
        "'chat_template' cannot be set as a variable",
    ),
    (
        "chat",
        {"chat_template_kwargs": {"tokenize": False}},
        "messages",
        "'tokenize' cannot be set as a variable",
    ),
    ("text", {"user": "x" * 513}, "user", "at most 512"),
    ("chat", {"speculation": True}, "speculation", "speculation must be an object"),
    ("chat", {"service_tier": "flex"}, "service_tier", '"auto" or "default"'),
    ("chat", {"modalities": ["text", "audio"]}, "modalities", '["text"]'),
    ("chat", {"functions": [{}]}, "functions", "give tools"),
    ("text", {"guided_regex": "a"}, "guided_regex", "structured_outputs.regex"),
    ("text", {"priority": 3}, "priority", "no priorities"),
    ("chat", {"reasoning_effort": "low"}, "reasoning_effort", "chat_template_kwargs"),
    ("chat", {"prediction": "text"}, "prediction", '{"type": "content", "content": ...}'),
    (
        "chat",
        {"prediction": {"type": "content", "content": 5}},
        "prediction.content",
        "with a string or a list",
    ),
    (
        "chat",
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        "prediction.content",
        '{"type": "text", "text": ...}',
    ),
    ("chat", {"prediction": {"type": "content", "content": ""}}, "prediction", "is empty"),
    ("chat", {"prediction": {"type": "content", "content": "a word " * 5000}}, "prediction", "shorten it"),
    ("chat", {"prompt": "hi"}, "prompt", "is for /v1/completions"),
    ("text", {"messages": MESSAGES}, "messages", "is for /v1/chat/completions"),
    ("chat", {"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role", "'user', 'assistant'"),
    (
        "chat",
        {"messages": [*MESSAGES, {"role": "tool", "content": "17"}]},
        "messages.1.tool_call_id",
        "names the call",
    ),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("kind", "extra", "param", "says"), BAD, ids=lambda value: str(value)[:40])
def test_bad_values(
    shared: TestClient, kind: str, extra: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    body = {**(CHAT if kind == "chat" else TEXT), **extra}
    if stream and not {"stream_options", "prompt_logprobs"} & extra.keys():
        body["stream"] = True
    error = error_of(shared.post(PATHS[kind], json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]
    assert error["code"]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"messages": ', "not valid JSON"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b"\xff\xfe{", "is UTF-16; send it as UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16-le"), "is UTF-16-LE; send it as UTF-8"),
        ('{"prompt": "a"}'.encode("utf-32"), "is UTF-32; send it as UTF-8"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8: invalid continuation byte at byte 15"),
        (b"[" * 9000, "not valid JSON"),
        (b"[" * 100000, "more than 20,000 objects, lists and names"),
        (b'{"prompt": "a", "x": [' + b"{}," * 20000 + b"{}]}", "more than 20,000 objects, lists and names"),
        (b'{"prompt": "a", "logit_bias": {' + b'"1":1,' * 20000 + b'"2":1}}', "more than 20,000 objects"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 4300 + b"}", "more than 300 digits"),
        (b'{"prompt": "a", "logit_bias": {"' + b"9" * 4500 + b'": 1}}', "logit_bias token ids"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "stop": "\\uDC00"}', "surrogate"),
        (b'{"prompt": "a", "temperature": NaN}', "finite"),
        (b'{"prompt": "a", "temperature": 1e999}', "finite"),
        (b'{"prompt": "a", "seed": 99999999999999999999}', "at most"),
        (b"{}", "prompt is missing"),
        (b'{"prompt": "a", "x[y]": 1}', "unknown parameter 'x[y]'"),
        (b'{"prompt": "a", "speculation": {"str": 1}}', "unknown parameter 'speculation.str'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_bodies(shared: TestClient, raw: bytes, says: str) -> None:
    assert says in error_of(shared.post("/v1/completions", content=raw, headers=JSON), 400)["message"]


def test_brackets_within_strings_are_no_objects() -> None:
    text = '[{:"\\' * 9000  # as JSON the quotes and backslashes are escaped
    assert num_parts(json.dumps({"prompt": text * 2, "x": [{}]}).encode()) == 5
    assert num_parts(json.dumps({text: [text, [], ":]"]}).encode()) == 4


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_what_no_response_could_repeat_is_refused(shared: TestClient, number: bytes, stream: bytes) -> None:
    tool = b'{"type": "function", "name": "f", "parameters": {"maximum": %s}}' % number
    body = b'{"input": "a", "tool_choice": "none", "stream": %s, "tools": [%s]}' % (stream, tool)
    error = error_of(shared.post("/v1/responses", content=body, headers=JSON), 400)
    assert error["code"] == "invalid_json"
    assert "finite" in error["message"]


def test_refusals_and_log_lines_repeat_no_more_than_the_beginning(
    shared: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    long = "x" * 300_000
    bodies = [{"model": long}, {long: 1}, {"speculation": {long: 1}}, {"speculation": {"method": long}}]
    for body in bodies:
        status = 404 if "model" in body else 400
        error = error_of(shared.post("/v1/completions", json={"prompt": "a"} | body), status)
        assert len(error["message"]) <= MAX_MESSAGE
        assert len(error["param"]) <= MAX_NAME
    error_of(shared.get(f"/v1/{long[:60000]}"), 404)
    lines = [JsonFormatter().format(record) for record in caplog.records if record.name.endswith("access")]
    assert len(lines) == len(bodies) + 1
    assert max(map(len, lines)) < MAX_MESSAGE + MAX_PATH + 1000


@pytest.mark.parametrize("half", [b"\xed\xa0\x80", b"\\ud800", b"\\uDFFF"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": "a%s"}'),
        ("/v1/completions", b'{"prompt": ["a", "%s"]}'),
        ("/v1/completions", b'{"prompt": "a", "bad_words": ["%s"]}'),
        ("/v1/completions", b'{"prompt": "a", "stop": "%s", "stream": true}'),
        ("/v1/completions", b'{"prompt": "a", "structured_outputs": {"regex": "%s"}}'),
        ("/v1/completions", b'{"prompt": "a", "structured_outputs": {"choice": ["%s"]}}'),
        ("/v1/completions", b'{"prompt": "a", "metadata": {"%s": 1}}'),
        ("/v1/completions", b'{"prompt": "a", "task": "%s"}'),
        ("/v1/completions", b'{"prompt": "a", "%s": 1}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "%s"}]}'),
        ("/v1/chat/completions", b'{"messages": [], "tools": [{"type": "function", "description": "%s"}]}'),
        ("/tokenize", b'{"prompt": "%s"}'),
        ("/detokenize", b'{"tokens": [], "model": "%s"}'),
        ("/dashboard/acknowledge", b'{"kind": "%s"}'),
    ],
)
def test_half_a_character_is_refused_in_every_string(
    shared: TestClient, path: str, body: bytes, half: bytes
) -> None:
    error = error_of(shared.post(path, content=body % half, headers=JSON), 400)
    assert error["code"] == "invalid_json"
    assert "half of a surrogate pair" in error["message"]


def test_half_a_character_in_the_arguments_of_a_call_is_refused(shared: TestClient) -> None:
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    body = {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]}
    error = error_of(shared.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == "messages.1.tool_calls"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_pairs_of_surrogates_are_characters(shared: TestClient, mark: bytes) -> None:
    raw = mark + b'{"prompt": "\\ud83d\\ude00", "max_tokens": 2}'
    assert shared.post("/v1/completions", content=raw, headers=JSON).status_code == 200


def test_codes_tell_a_context_overrun_from_a_bad_value(shared: TestClient) -> None:
    long = {"prompt": "word " * 3000}
    limit = shared.get("/v1/models").json()["data"][0]["max_model_len"]
    for extra in (long, {"max_tokens": 100000}):
        error = error_of(shared.post("/v1/completions", json={**TEXT, **extra}), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(
            f"This model's maximum context length is {limit} tokens. However, "
        )


def test_routes(shared: TestClient) -> None:
    assert error_of(shared.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(shared.get("/nothing"), 404)["type"] == "invalid_request_error"
    response = shared.get("/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    error_of(shared.post("/v1/models", json={}), 405)
    for path in ("/docs", "/redoc"):
        error_of(shared.get(path), 404)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/completions/", "/v1/completions"),
    ],
)
def test_wrong_paths_name_the_right_one(shared: TestClient, path: str, meant: str) -> None:
    error = error_of(shared.post(path, json=TEXT), 404)
    assert error["message"].endswith(f"did you mean {meant}?")
    assert "did you mean" not in error_of(shared.post("/v1/embeddings", json={}), 404)["message"]


FRONT_END = {"chat_id": "c-1", "session_id": None, "title": {"a": [1]}, "background_tasks": {}}
"""What chat front ends send beside OpenAI's parameters."""


@pytest.mark.parametrize("strict", [False, True])
def test_hints_for_caches_are_ignored_and_reported(make_app: MakeApp, strict: bool) -> None:
    """In tools, in messages of every role and in their parts; a property of that name in a schema is one."""
    hint = {"cache_control": {"type": "ephemeral"}}
    schema = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    text = {"type": "text", "text": "Be brief."}
    plain = [{"role": "system", "content": [text]}, {"role": "user", "content": "hi"}]
    hinted = [{"role": "system", "content": [text | hint]}, {"role": "user", "content": "hi"} | hint]
    asked = {"max_tokens": 1, "return_token_ids": True}
    with TestClient(make_app(strict_parameters=strict)) as client:
        wanted = client.post(PATHS["chat"], json=asked | {"messages": plain, "tools": [tool]})
        assert wanted.status_code == 200
        within = {"type": "function", "function": tool["function"] | hint}
        for tools, place in (([tool | hint], "tools"), ([within], "tools.function")):
            answer = client.post(PATHS["chat"], json=asked | {"messages": hinted, "tools": tools})
            if strict:
                assert error_of(answer, 400)["code"] == "unknown_parameter"
                continue
            assert answer.json()["prompt_token_ids"] == wanted.json()["prompt_token_ids"]
            names = answer.headers["x-slipstream-ignored"].split(", ")
            assert sorted(names) == sorted(
                [f"{place}.cache_control", "messages.cache_control", "messages.content.cache_control"]
            )
        if not strict:
            item = {"role": "user", "content": [{"type": "input_text", "text": "hi"} | hint]}
            answer = client.post("/v1/responses", json={"input": [item], "max_output_tokens": 1})
            assert answer.headers["x-slipstream-ignored"] == "input.content.cache_control"


def test_names_of_front_ends_are_ignored_and_reported(make_app: MakeApp) -> None:
    with TestClient(make_app()) as client:
        for kind, body in (("chat", CHAT), ("text", TEXT)):
            for stream in (False, True):
                plain = client.post(PATHS[kind], json={**body, "temperature": 0, "stream": stream})
                assert "x-slipstream-ignored" not in plain.headers
                extra = {"temperature": 0, "stream": stream, **FRONT_END, "store": True}
                answer = client.post(PATHS[kind], json={**body, **extra})
                assert answer.status_code == 200
                assert answer.headers["x-slipstream-ignored"] == "chat_id, title, background_tasks, store"
                if not stream:
                    assert answer.json()["choices"] == plain.json()["choices"]
    with TestClient(make_app(strict_parameters=True)) as client:
        error = error_of(client.post(PATHS["chat"], json={**CHAT, **FRONT_END}), 400)
        assert (error["message"], error["code"]) == ("unknown parameter 'chat_id'", "unknown_parameter")
        assert (
            "must be false"
            in error_of(client.post(PATHS["chat"], json={**CHAT, "store": True}), 400)["message"]
        )
        assert client.post(PATHS["chat"], json={**CHAT, "session_id": None}).status_code == 200


@pytest.mark.parametrize(
    "extra",
    [
        {"best_of": 1},
        {"best_of": 2, "n": 2},
        {"use_beam_search": False},
        {"add_generation_prompt": True, "continue_final_message": False},
        {"priority": 0},
        {"priority": 0.0},
        {"spaces_between_special_tokens": True},
        {"spaces_between_special_tokens": False},
        {"reasoning_effort": "none"},
        {"store": False},
        {"max_tokens": None, "max_completion_tokens": 4},
        {"max_completion_tokens": 4},
        dict.fromkeys(UNSUPPORTED),
        {name: HARMLESS[name][0] for name in UNSUPPORTED if HARMLESS[name]},
        dict.fromkeys(("anything", "else", "max_token", "a b")),
    ],
    ids=lambda extra: "-".join(extra)[:40],
)
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_neutral_values_change_nothing(shared: TestClient, kind: str, extra: dict[str, Any]) -> None:
    body = {**(CHAT if kind == "chat" else TEXT), "temperature": 0}
    elsewhere = (
        {"prompt": None, "echo": False, "suffix": "", "top_logprobs": 0, "add_special_tokens": False}
        if kind == "chat"
        else {"messages": None, "tools": [], "tool_choice": "none", "top_logprobs": 0}
    )
    answer = shared.post(PATHS[kind], json={**body, **extra, **elsewhere})
    assert answer.status_code == 200, answer.text
    assert "x-slipstream-ignored" not in answer.headers
    assert answer.json()["choices"][0] == shared.post(PATHS[kind], json=body).json()["choices"][0]


def test_negative_seeds(shared: TestClient) -> None:
    def seed_of(seed: int) -> int:
        return int(shared.post(PATHS["text"], json={**TEXT, "seed": seed}).headers["x-slipstream-seed"])

    assert seed_of(-2) == 2**63 - 2
    assert seed_of(-(2**63)) == 0
    assert seed_of(7) == 7
    assert seed_of(-1) != seed_of(-1)  # drawn, as at vLLM


def test_names_that_are_not_close_are_no_hint(make_app: MakeApp) -> None:
    with TestClient(make_app(strict_parameters=True)) as client:
        error = error_of(client.post(PATHS["text"], json={**TEXT, "logit_warper": []}), 400)
    assert error["message"] == "unknown parameter 'logit_warper'"


def test_unknown_models(shared: TestClient) -> None:
    for path, body in [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", TEXT),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [5]}),
    ]:
        error = error_of(shared.post(path, json={**body, "model": "gpt-4"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert MODEL in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "one of them"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "one of them"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "priority": 1}, "unknown parameter 'priority'"),
        ("/tokenize", {"prompt": "a", "store": True}, "must be false"),
        ("/detokenize", {"tokens": [4096]}, "0 to 4095"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {}, "missing"),
    ],
)
def test_tokens(shared: TestClient, path: str, body: dict[str, Any], says: str) -> None:
    assert says in error_of(shared.post(path, json=body), 400)["message"]


def test_parameters_that_change_nothing_are_let_through(shared: TestClient) -> None:
    values = {"metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "modalities": ["text"]}
    body = {**CHAT, **dict.fromkeys(IGNORED, "auto"), **values, "tool_choice": "none", "tools": []}
    assert shared.post("/v1/chat/completions", json=body).status_code == 200
    nulls = dict.fromkeys(
        (
            "temperature",
            "stop",
            "tools",
            "response_format",
            "speculation",
            "best_of",
            "user",
            "functions",
            "store",
        )
    )
    assert shared.post("/v1/chat/completions", json={**CHAT, **nulls}).status_code == 200


def test_large_bodies(make_app: MakeApp) -> None:
    with TestClient(make_app(max_body_bytes=1000)) as client:
        body = json.dumps({**TEXT, "prompt": "a" * 2000}).encode()
        assert (
            error_of(client.post("/v1/completions", content=body, headers=JSON), 413)["code"]
            == "request_too_large"
        )
        pieces = (body[i : i + 100] for i in range(0, len(body), 100))  # no length is announced
        assert error_of(client.post("/v1/completions", content=pieces, headers=JSON), 413)
        assert client.post("/v1/completions", json=TEXT).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_only_what_says_that_it_is_json_is_read(shared: TestClient, path: str) -> None:
    """The others are what any web page may post without a preflight request."""
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": TEXT,
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
    }
    raw = json.dumps(bodies[path]).encode()
    for sent in (
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ):
        response = shared.post(path, content=raw, headers={} if sent is None else {"Content-Type": sent})
        error = error_of(response, 415)
        assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_media_type")
        assert "send the header 'Content-Type: application/json'" in error["message"]
        assert repr(sent or "") in error["message"]
    for sent in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert shared.post(path, content=raw, headers={"Content-Type": sent}).status_code == 200


def test_token_limits(make_app: MakeApp) -> None:
    with TestClient(make_app(max_prompt_tokens=20, max_output_tokens=6)) as client:
        error = error_of(client.post("/v1/completions", json={**TEXT, "prompt": [5] * 21}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "this server takes at most 20" in error["message"]
        assert client.post("/v1/completions", json={**TEXT, "prompt": [5] * 20}).status_code == 200
        assert (
            "at most 6"
            in error_of(client.post("/v1/completions", json={**TEXT, "max_tokens": 7}), 400)["message"]
        )
        body = {
            **CHAT,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": None,
            "ignore_eos": True,
        }
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 6
    with pytest.raises(ConfigError, match="below the context"):
        make_app(max_prompt_tokens=100000)


def test_keys(make_app: MakeApp) -> None:
    with TestClient(make_app(api_key=["first", "second"])) as client:
        for headers in (
            {},
            {"Authorization": "Bearer third"},
            {"Authorization": "Basic first"},
            {"Authorization": "Bearer"},
        ):
            for path in ("/v1/models", "/v1/nothing", "/tokenize", "/detokenize", "/v1/chat/completions"):
                response = client.request("GET", path, headers=headers)
                error = error_of(response, 401)
                assert error["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert "first" not in response.text
        for key in ("first", "second"):
            assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert client.get(path).status_code == 200
        assert "first" not in repr(ServeConfig(api_key=["first"]))


def test_scripts_of_other_origins_are_let_in_only_where_configured(make_app: MakeApp) -> None:
    origin = {"Origin": "https://example.org"}
    preflight = {**origin, "Access-Control-Request-Method": "POST"}
    with TestClient(make_app()) as client:
        assert "access-control-allow-origin" not in client.get("/v1/models", headers=origin).headers
        error_of(client.options("/v1/chat/completions", headers=preflight), 405)
    with TestClient(make_app(cors_origins=["https://example.org"], api_key=["k"])) as client:
        allowed = client.options("/v1/chat/completions", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"


def test_a_fault_of_ours_says_nothing_of_itself(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    monkeypatch.setattr(app.state.service.tokens, "prompts", lambda prompt: 1 / 0)
    with TestClient(app, raise_server_exceptions=False) as client:
        error = error_of(client.post("/v1/completions", json=TEXT), 500)
    assert error["type"] == "server_error"
    assert "division" not in error["message"]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"port": 70000}, "0 to 65535"),
        ({"port": "80"}, "port must be int"),
        ({"max_body_bytes": 0}, "at least 1"),
        ({"request_timeout_s": 0}, "above 0"),
        ({"grace_period_s": -1}, "at least 0"),
        ({"stream_interval_s": -0.01}, "0 to 10 s"),
        ({"stream_interval_s": float("nan")}, "0 to 10 s"),
        ({"stream_interval_s": float("inf")}, "0 to 10 s"),
        ({"log_level": "loud"}, "unknown log_level"),
        ({"log_format": "xml"}, "unknown log_format"),
        ({"metrics_alias": "vlm"}, "did you mean 'vllm'?"),
        ({"api_key": ["a", ""]}, "each serve api_key must be a text that is not empty"),
        ({"max_waiting": -1}, "at least 0"),
    ],
)
def test_bad_configurations(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        ServeConfig(**values)
