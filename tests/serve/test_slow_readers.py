"""Streams that are not read are paused: memory is bounded, others are served, and read again their text is whole.

Both engine clients are driven, in the process and behind the protocol, then a server whose client does not read.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.engine import unread
from slipstream.engine.client import EngineClient, RequestHandle
from slipstream.engine.engine import Engine
from slipstream.engine.unread import UnreadUpdates
from slipstream.serve.process.thread import ThreadedHost

LONG = SamplingParams(temperature=0.8, seed=5, max_tokens=160, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
MOST = 32


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
    async with asyncio.timeout(20):
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
    prompts = [chat_prompt[: 20 + number] for number in range(10)]

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
