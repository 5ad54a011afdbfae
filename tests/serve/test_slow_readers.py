"""Streams that are not read are paused: memory is bounded, others are served, and read again their text is whole.

Both engine clients are driven, in the process and behind the protocol, then a server whose client does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
from serve_cases import MODEL, MakeApp, running, wait_until

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.engine import unread
from slipstream.engine.client import EngineClient, RequestHandle
from slipstream.engine.engine import Engine
from slipstream.engine.unread import UnreadUpdates
from slipstream.serve.api import stream as streams
from tests.kit.threaded_host import ThreadedHost

LONG = SamplingParams(temperature=0.8, seed=5, max_tokens=80, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
MOST = 16


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "MAX_UNREAD_TOKENS", MOST)


@pytest.fixture(params=["thread", "process"])
def client(request: pytest.FixtureRequest, drafting: LLM) -> Iterator[EngineClient]:
    """Both clients of the same engine."""
    drafting.reset_caches()
    host = ThreadedHost(drafting.engine) if request.param == "process" else None
    engine: EngineClient = AsyncEngine(engine=drafting.engine) if host is None else host.remote
    yield engine
    engine.close() if host is None else host.close()
    assert not drafting.engine.has_unfinished
    assert drafting.engine.integrity() == []


async def until(engine: EngineClient, num_paused: int) -> None:
    async with asyncio.timeout(120):
        while (await engine.stats()).num_paused != num_paused:
            await asyncio.sleep(0.002)


async def rest(stream: AsyncIterator[Any], token_ids: list[int]) -> str:
    async for update in stream:
        token_ids += update.token_ids
    output = update.output.outputs[0]
    assert output.token_ids == token_ids
    return str(output.text)


def test_unread_streams_hold_no_place_and_go_on_with_the_same_text(
    client: EngineClient, drafting: LLM, plain: LLM, chat_prompt: list[int], few_tokens: None
) -> None:
    prompts = [chat_prompt[: 20 + number] for number in range(6)]

    async def main() -> list[str]:
        streams = [client.stream(prompt, LONG, tenant="a") for prompt in prompts]
        begun = [(await anext(stream)).token_ids for stream in streams]
        await until(client, len(streams))
        stats = await client.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_held_slots) == (0, 0, 0)
        assert stats.num_retained_slots, "what was computed is kept as long as there is room"
        other = await client.generate(chat_prompt, SHORT, tenant="b")
        assert len(other.outputs[0].token_ids) == 2
        assert (await client.stats()).num_paused == len(streams), "they make nothing meanwhile"
        return await asyncio.gather(*map(rest, streams, begun))

    expected = [output.outputs[0].text for output in plain.generate(prompts, LONG)]
    assert asyncio.run(main()) == expected


def test_an_unread_stream_makes_a_bounded_number_of_tokens_and_can_be_left(
    client: EngineClient,
    drafting: LLM,
    chat_prompt: list[int],
    few_tokens: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = itertools.count()
    step = Engine.step

    def counted(engine: Engine) -> Any:
        next(steps)
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)

    async def main() -> None:
        queue = UnreadUpdates[Any]()

        def put(item: Any) -> None:
            queue.put(item, len(item.token_ids))

        request = await client.begin(chat_prompt, LONG, put)
        queue.of(request)
        await until(client, 1)
        before, num_tokens = next(steps), queue.num_tokens
        assert MOST <= num_tokens < LONG.max_tokens  # type: ignore[operator]
        for _ in range(20):
            await client.stats()
        assert next(steps) == before + 1, "an engine whose requests are all paused makes no steps"
        assert queue.num_tokens == num_tokens
        request.leave()
        await until(client, 0)
        request.set_paused(True)
        request.set_paused(False)
        assert not (await client.stats()).num_held_slots

    asyncio.run(main())


def test_answers_of_one_request_are_paused_together_and_aborted_while_paused(
    client: EngineClient, plain: LLM, chat_prompt: list[int], few_tokens: None
) -> None:
    several = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True, n=3)

    async def main() -> tuple[Any, Any]:
        whole = client.stream(chat_prompt, several, request_id="whole")
        await anext(whole)
        await until(client, 3)
        gone = client.stream(chat_prompt, several, request_id="gone")
        await anext(gone)
        await until(client, 6)
        await client.abort("gone")
        *_, last = [update async for update in gone]
        *_, first = [update async for update in whole]
        return first.output, last.output

    whole, gone = asyncio.run(main())
    [expected] = plain.generate(chat_prompt, several)
    assert [one.token_ids for one in whole.outputs] == [one.token_ids for one in expected.outputs]
    assert [one.finish_reason for one in gone.outputs] == ["abort"] * 3


def test_a_queue_pauses_all_its_requests_at_the_bound_and_resumes_them_at_half(few_tokens: None) -> None:
    told: list[tuple[str, bool]] = []

    def handle(name: str) -> RequestHandle:
        return RequestHandle(lambda: None, lambda paused: told.append((name, paused)))

    async def main() -> None:
        queue = UnreadUpdates[int]()
        queue.of(handle("a"))
        for number in range(MOST - 1):
            queue.put(number, 1)
        assert told == []
        queue.put(MOST, 1)
        queue.put(MOST + 1, 10)
        assert told == [("a", True)]
        queue.of(handle("b"))
        assert told == [("a", True), ("b", True)], "one that joins a full queue waits with the others"
        while queue.is_paused:
            await queue.get()
        assert 2 * queue.num_tokens <= MOST < 2 * (queue.num_tokens + 10)
        assert told[2:] == [("a", False), ("b", False)]

    asyncio.run(main())


def ask(key: str, **values: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The body and the headers of a request for a long text whose chunks are large."""
    body = {
        "prompt": [7, 8, 9],
        "max_tokens": 800,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        **values,
    }
    return body, {"Authorization": f"Bearer {key}"}


def begun_unread(url: str, body: dict[str, Any], headers: dict[str, str]) -> socket.socket:
    """A connection on which a stream was asked for and nothing is read."""
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps({**body, "stream": True}).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + raw)
    return connection


def streamed_text(raw: bytes) -> str:
    """The text of a stream, as it came over the connection in chunks of HTTP."""
    lines = raw.partition(b"\r\n\r\n")[2].splitlines()
    payloads = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert b"data: [DONE]" in lines
    return "".join(choice["text"] for payload in payloads for choice in payload["choices"])


def test_unread_streams_of_one_key_leave_room_for_another_and_are_whole_when_they_are_read(
    make_app: MakeApp, drafting: LLM, few_tokens: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    event, padding = streams.event, "x" * 2**15
    monkeypatch.setattr(
        streams, "event", lambda payload, name: event(payload | {"fills_buffers": padding}, name)
    )
    app = make_app(api_key=("key-a", "key-b"))
    paused = "slipstream_num_requests_paused"
    with running(app) as (url, _), contextlib.ExitStack() as open_ones:
        body, headers = ask("key-a")
        whole = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120).json()
        waiting = [
            open_ones.enter_context(contextlib.closing(begun_unread(url, body, headers))) for _ in range(5)
        ]
        wait_until(lambda: f'{paused}{{model_name="{MODEL}"}} 5.0' in httpx2.get(f"{url}/metrics").text, 120)
        assert drafting.engine.stats().num_held_slots == 0
        body, headers = ask("key-b", max_tokens=2)
        answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert drafting.engine.stats().num_paused == 5
        raw = bytearray()
        waiting[0].settimeout(120)
        while data := waiting[0].recv(2**16):
            raw += data
        assert streamed_text(bytes(raw)) == whole["choices"][0]["text"]
    wait_until(lambda: not drafting.engine.has_unfinished)
