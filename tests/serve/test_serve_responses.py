"""`/v1/responses`: what OpenAI's own client and types make of it, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest
from serve_cases import DRAFT, MESSAGES, MODEL, QUESTION, JumpingLoop, MakeApp, running
from starlette.testclient import TestClient

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.serve.api.responses.body import ResponseBody
from slipstream.serve.api.responses.conversation import chat_of
from slipstream.serve.api.responses.store import ENTRY_BYTES, ResponseStore, StoredResponse
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig

PATH = "/v1/responses"
KEYS = ("test-key", "another-key")
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Look it up.",
    "parameters": CITY,
    "strict": True,
}
MUST_CALL: dict[str, Any] = {
    "input": QUESTION,
    "tools": [WEATHER],
    "tool_choice": "required",
    "max_output_tokens": 200,
}


class Booking(pydantic.BaseModel):
    """What is parsed."""

    place: Literal["garden", "hall"]
    guests: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = LLM(speculative_config=DRAFT, kv_cache_bytes=40 * 2**20)
    config = ServeConfig(api_key=KEYS, per_request_metrics=True)
    with running(create_app(AsyncEngine(engine=llm.engine), config, MODEL)) as (address, _):
        yield f"{address}/v1"
    assert llm.engine.integrity() == []


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    """Whatever comes is checked against the types of the package."""
    with openai.OpenAI(
        base_url=url, api_key=KEYS[0], max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(api: openai.OpenAI, **values: Any) -> Any:
    return api.responses.create(**{"model": MODEL, "temperature": 0, "max_output_tokens": 20, **values})


def test_a_text_and_what_is_said_of_it(api: openai.OpenAI, plain: LLM, chat_prompt: list[int]) -> None:
    params: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
    own = plain.generate(chat_prompt, SamplingParams(seed=4, max_tokens=60, **params))[0].outputs[0]
    answer = ask(
        api,
        input=QUESTION,
        **params,
        max_output_tokens=60,
        metadata={"for": "test"},
        user="red",
        truncation="disabled",
        service_tier="auto",
        extra_body={"seed": 4, "speculation": {"max_tokens": 2}},
    )
    assert answer.output_text == own.text
    [message] = answer.output
    assert (message.type, message.role, message.id[:4]) == ("message", "assistant", "msg_")
    assert answer.status == message.status == "completed"
    assert own.finish_reason == "stop"
    assert answer.completed_at >= answer.created_at
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(chat_prompt), len(own.token_ids))
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.8, 0.9, 60)
    assert (answer.metadata, answer.user, answer.model) == ({"for": "test"}, "red", MODEL)
    assert answer.model_extra["store"] is True
    assert answer.model_extra["metrics"]["num_target_passes"] > 0


def test_one_that_is_cut_says_so(api: openai.OpenAI) -> None:
    answer = ask(api, input=[{"role": "user", "content": QUESTION}], max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.usage.output_tokens == 4
    call = ask(api, **MUST_CALL | {"max_output_tokens": 25}).output[-1]
    assert (call.type, call.status) == ("function_call", "incomplete")


@pytest.mark.parametrize("text", [True, False])
def test_the_events_of_a_stream(api: openai.OpenAI, text: bool) -> None:
    values = {"input": QUESTION} if text else MUST_CALL
    values |= {"max_output_tokens": 60, "parallel_tool_calls": False, "seed": 3, "temperature": 0.8}
    values = {"extra_body": {"seed": values.pop("seed")}, **values}
    whole = ask(api, **values)
    events = list(ask(api, **values, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    kinds = [kind for number, kind in enumerate(kinds) if kind not in kinds[number - 1 : number]]
    inner = (
        ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
        if text
        else ["function_call_arguments.delta", "function_call_arguments.done"]
    )
    start, end = ["created", "in_progress", "output_item.added"], ["output_item.done", "completed"]
    assert kinds == start + inner + end
    deltas = "".join(event.delta for event in events if event.type.endswith(".delta"))
    [first] = [event for event in events if event.type == "response.output_item.added"]
    [last] = [event for event in events if event.type == "response.output_item.done"]
    final = events[-1].response
    assert first.item.id == last.item.id
    assert first.item.status == "in_progress"
    assert events[0].response.output == []
    assert events[0].response.id == final.id
    assert events[0].response.usage is None
    assert final.output == [last.item]
    assert final.usage.output_tokens == whole.usage.output_tokens
    [item], [mine] = whole.output, final.output
    if text:
        assert first.item.content == []
        assert deltas == final.output_text == whole.output_text
    else:
        assert first.item.arguments == ""
        assert deltas == mine.arguments == item.arguments
        assert mine.name == "get_weather"
        assert json.loads(deltas).keys() == {"city", "days"}
    assert api.responses.retrieve(final.id) == final


def test_the_frames_of_a_stream(url: str) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    body = {"input": QUESTION, "max_output_tokens": 3, "stream": True}
    body["stream_options"] = {"include_obfuscation": False}
    answer = httpx2.post(f"{url}/responses", json=body, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["X-Slipstream-Seed"]
    *frames, rest = answer.text.split("\n\n")
    assert rest == ""
    for frame in frames:
        name, data = frame.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_a_conversation_goes_on(api: openai.OpenAI) -> None:
    """By its whole input, by the id of the answer before, and as a chat: the same prompt, the same text."""
    first = ask(api, input=QUESTION, instructions="Be brief.")
    second = {
        "role": "user",
        "content": [{"type": "input_text", "text": "And in "}, {"type": "input_text", "text": "Rome?"}],
    }
    by_id = ask(api, input=[second], previous_response_id=first.id)
    assert by_id.previous_response_id == first.id
    whole = ask(api, input=[{"role": "user", "content": QUESTION}, first.output[0].to_dict(), second])
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And in Rome?"},
    ]
    chat = api.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    assert by_id.output_text == whole.output_text == chat.choices[0].message.content
    assert by_id.usage.input_tokens == whole.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
    third = ask(api, input="Thanks.", previous_response_id=by_id.id, instructions="Be kind.")
    messages = [
        {"role": "system", "content": "Be kind."},
        *messages,
        {"role": "assistant", "content": by_id.output_text},
        {"role": "user", "content": "Thanks."},
    ]
    chat = api.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    assert third.output_text == chat.choices[0].message.content


def test_what_a_function_returned_goes_on(api: openai.OpenAI) -> None:
    first = ask(api, **MUST_CALL | {"parallel_tool_calls": False})
    [call] = first.output
    assert first.tool_choice == "required"
    assert first.tools[0].name == "get_weather"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    by_id = ask(api, input=[result], tools=[WEATHER], tool_choice="none", previous_response_id=first.id)
    items = [{"role": "user", "content": QUESTION}, call.to_dict(), result]
    whole = ask(api, input=items, tools=[WEATHER], tool_choice="none")
    made = {"name": call.name, "arguments": call.arguments}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": made}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
    ]
    chat = api.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    assert by_id.output_text == whole.output_text == chat.choices[0].message.content
    assert by_id.usage.input_tokens == whole.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]


def test_the_packages_own_helpers(api: openai.OpenAI) -> None:
    """`parse` and `stream`, with a form and with a tool."""
    values: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 200}
    answer = api.responses.parse(**values, text_format=Booking)
    assert isinstance(answer.output_parsed, Booking)
    with api.responses.stream(**values, text_format=Booking) as stream:
        assert "response.output_text.delta" in {event.type for event in stream}
        assert isinstance(stream.get_final_response().output_parsed, Booking)
    tool: Any = {
        "type": "function",
        "name": "book",
        "parameters": Booking.model_json_schema(),
        "strict": True,
    }
    choice: Any = {"type": "function", "name": "book"}
    with api.responses.stream(**values, tools=[WEATHER, tool], tool_choice=choice) as stream:
        stream.until_done()
        [call] = stream.get_final_response().output
    assert call.type == "function_call"
    Booking.model_validate_json(call.arguments)
    loose = ask(api, input=QUESTION, text={"format": {"type": "json_object"}}, max_output_tokens=300)
    assert loose.text.format.type == "json_object"
    if loose.status == "completed":
        assert isinstance(json.loads(loose.output_text), dict)


def test_log_probabilities(api: openai.OpenAI) -> None:
    whole = ask(api, input=QUESTION, top_logprobs=2)
    entries = whole.output[0].content[0].logprobs
    assert len(entries) == whole.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events = list(
        ask(api, input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=0, stream=True)
    )
    mine = [entry for event in events if event.type.endswith("text.delta") for entry in event.logprobs]
    assert [entry.token for entry in mine] == [entry.token for entry in entries]
    assert ask(api, input=QUESTION).output[0].content[0].logprobs == []


def test_an_asynchronous_client(url: str) -> None:
    async def both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEYS[0], max_retries=0) as client:
            values: dict[str, Any] = {
                "model": MODEL,
                "input": QUESTION,
                "temperature": 0,
                "max_output_tokens": 20,
            }
            whole = await client.responses.create(**values)
            text = ""
            async with client.responses.stream(**values) as stream:
                async for event in stream:
                    text += event.delta if event.type == "response.output_text.delta" else ""
            return whole.output_text, text

    whole, streamed = asyncio.run(both())
    assert whole == streamed != ""


def test_who_may_read_and_continue_what_was_stored(api: openai.OpenAI, url: str) -> None:
    mine = ask(api, input=QUESTION, user="red", max_output_tokens=2)
    assert api.responses.retrieve(mine.id) == mine
    with openai.OpenAI(base_url=url, api_key=KEYS[1], max_retries=0) as other:
        for denied in (
            lambda: other.responses.retrieve(mine.id),
            lambda: other.responses.delete(mine.id),
            lambda: ask(other, input="And?", previous_response_id=mine.id, user="red"),
            lambda: ask(api, input="And?", previous_response_id=mine.id, user="blue"),
            lambda: ask(api, input="And?", previous_response_id=mine.id),
        ):
            with pytest.raises(openai.NotFoundError) as error:
                denied()
            assert error.value.code == "response_not_found"
    assert ask(api, input="And?", previous_response_id=mine.id, user="red").output_text
    forgotten = ask(api, input=QUESTION, store=False, max_output_tokens=2)
    assert forgotten.model_extra["store"] is False
    api.responses.delete(mine.id)
    for name in (mine.id, forgotten.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="give the whole conversation"):
            api.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError) as error:
            ask(api, input="And?", previous_response_id=name)
        assert error.value.param == "previous_response_id"


def test_a_server_that_keeps_nothing_and_one_that_keeps_little(make_app: MakeApp) -> None:
    body = {"input": "Once", "max_output_tokens": 1}
    with TestClient(make_app(max_stored_responses=0)) as client:
        answer = client.post(PATH, json=body).json()
        assert answer["store"] is False
        assert client.get(f"{PATH}/{answer['id']}").status_code == 404
        refused = client.post(PATH, json=body | {"store": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
        refused = client.post(PATH, json=body | {"previous_response_id": "resp_1"})
        assert "max_stored_responses is 0" in refused.json()["error"]["message"]
    with TestClient(make_app(max_stored_responses=1)) as client:
        first, second = (client.post(PATH, json=body).json()["id"] for _ in range(2))
        assert client.get(f"{PATH}/{first}").status_code == 404
        assert client.get(f"{PATH}/{second}").json()["id"] == second
        assert client.get(f"{PATH}/{second}?stream=true").json()["error"]["param"] == "stream"
    with TestClient(make_app(stored_responses_bytes=10)) as client:
        assert client.post(PATH, json=body).json()["store"] is False


def kept(number: int, account: str = "", tenant: str = "", size: int = 100) -> StoredResponse:
    return StoredResponse(f"resp_{number}", account, tenant, b"r" * size, b"m" * size)


def test_the_store_is_bounded_by_count_and_by_bytes() -> None:
    one = ENTRY_BYTES + 200
    store = ResponseStore(max_count=3, max_bytes=6 * one)
    for number in range(4):
        assert store.put(kept(number, "a"))
    assert (len(store), store.num_bytes) == (3, 3 * one)
    store.get("resp_1", "a")  # is new again
    for number in range(4, 8):
        store.put(kept(number, f"user {number}"))
    assert store.num_bytes == 6 * one, "whoever holds the most has lost the oldest"
    assert store.get("resp_1", "a")
    with pytest.raises(Exception, match="resp_2"):
        store.get("resp_2", "a")
    assert not store.put(kept(9, size=4 * one)), "larger than all that may be kept"
    assert len(store) == 6
    for number in (1, 3):
        store.delete(f"resp_{number}", "a")
    for number in range(4, 8):
        store.delete(f"resp_{number}", f"user {number}")
    assert (len(store), store.num_bytes, store._by_holder, store._bytes_of) == (0, 0, {}, {})


def test_a_key_that_names_many_users_costs_no_other_key_its_share() -> None:
    store = ResponseStore(max_count=100, max_bytes=10 * (ENTRY_BYTES + 200))
    for number in range(3):
        store.put(kept(number, "mine", "me"))
    for number in range(3, 60):
        store.put(kept(number, "another", f"user {number}"))
    assert [store.get(f"resp_{number}", "mine").id for number in range(3)]


IMAGE = {"type": "input_image", "image_url": "data:"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "1"}
FORM = {"type": "json_schema", "name": "s"}


@pytest.mark.parametrize(
    ("values", "param", "said"),
    [
        ({"tools": [WEATHER, {"type": "web_search"}]}, "tools.1", "'web_search': OpenAI runs it"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0", "'mcp'"),
        ({"tools": [{"type": "brew"}]}, "tools.0", "does not know it"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "missing"),
        ({"tools": [WEATHER | {"parameters": {"not": {}}}]}, "tools.0.parameters", "not"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two functions"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
        ({"tools": [WEATHER], "top_logprobs": 2}, "top_logprobs", "exclude each other"),
        ({"top_logprobs": 99}, "top_logprobs", "at most 20"),
        ({"include": ["everything"]}, "include.0", "message.output_text.logprobs"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content", "'input_image'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "'item_reference'"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0", "'reasoning'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "'user'"),
        ({"input": [{"role": "user"}]}, "input.0.content", "missing"),
        ({"input": [{"role": "user", "content": 3}]}, "input.0.content", "string"),
        ({"input": ["Hello"]}, "input.0", "object"),
        ({"input": []}, "input", "at least 1"),
        ({"input": None}, "input", "list"),
        ({"input": [OUTPUT]}, "input", "'c', but no function_call"),
        ({"input": [CALL | {"arguments": "no"}, OUTPUT]}, "input.0.tool_calls", "JSON object"),
        ({"input": [CALL | {"name": 5}]}, "input.0.name", "string"),
        ({"text": {"format": FORM}}, "text.format.schema", "missing"),
        ({"text": {"format": FORM | {"schema": {"not": {}}}}}, "text.format", "not"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"truncation": "auto"}, "truncation", "shorten them"),
        ({"background": True}, "background", "false"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "must be"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"messages": MESSAGES}, "messages", "give input"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "tokens"),
        ({"input": "a " * 5000}, "input", "tokens"),
        ({"temperature": -1}, "temperature", "temperature must be"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "stream"),
        ({"max_output_token": 5}, "max_output_token", "did you mean max_output_tokens"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_done_is_refused_by_name(
    shared: TestClient, values: dict[str, Any], param: str, said: str
) -> None:
    for stream in (False, True)[: 1 + ("stream_options" not in values)]:
        answer = shared.post(PATH, json={"input": QUESTION, "stream": stream, **values})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert said in error["message"]
        assert error["type"] == "invalid_request_error"
        for unsupported in ("messages", "max_completion_tokens", "response_format"):
            assert unsupported in values or unsupported not in error["message"]


def test_what_means_nothing_here_is_let_through(shared: TestClient) -> None:
    harmless = {
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 3,
        "prompt_cache_key": "k",
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": "s",
        "service_tier": "default",
        "store": None,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": [],
        "conversation": None,
    }
    answer = shared.post(PATH, json={"input": QUESTION, "max_output_tokens": 1, **harmless})
    assert answer.status_code == 200, answer.text


def test_a_stream_that_breaks_off_ends_as_failed(make_app: MakeApp) -> None:
    body = {"input": QUESTION, "stream": True, "max_output_tokens": 1500, "min_tokens": 1500}
    loop = JumpingLoop()
    with (
        running(make_app(), loop=loop) as (url, _),
        httpx2.stream("POST", f"{url}{PATH}", json=body, timeout=120) as answer,
    ):
        assert answer.status_code == 200
        pieces = answer.iter_text()
        text = next(pieces)
        while "output_text.delta" not in text:
            text += next(pieces)
        loop.jump(601.0)
        text += "".join(pieces)
    events = [json.loads(frame.split("data: ")[1]) for frame in text.split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "within 600 s" in last["response"]["error"]["message"]
    [item] = last["response"]["output"]
    deltas = "".join(event["delta"] for event in events if event["type"].endswith("delta"))
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", deltas)


@pytest.mark.parametrize("learn", [False, None])
def test_a_request_may_refuse_to_be_learned_from(learn: bool | None) -> None:
    body = ResponseBody.model_validate({"input": QUESTION, "learn": learn})
    assert chat_of(body, MESSAGES).learn is learn
