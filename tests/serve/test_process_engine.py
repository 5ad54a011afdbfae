"""An engine behind the protocol answers as the engine itself, and outlives the end of either side."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from serve_cases import wait_until

from slipstream import LLM, RequestOptions, SamplingParams
from slipstream.assets import sample_prompts
from slipstream.engine.client import EngineClient
from slipstream.engine.outputs import RequestOutput, Update
from slipstream.errors import EngineBusyError, EngineStoppedError, RequestError
from slipstream.serve.process import host as host_module
from slipstream.serve.process import remote as remote_module
from slipstream.serve.process.host import EngineHost
from slipstream.serve.process.launch import EngineLink
from slipstream.serve.process.protocol import CODEC, Steps, Submit
from slipstream.serve.process.remote import RemoteEngine
from slipstream.text.prompts import encode_chat
from tests.kit.threaded_host import ThreadedHost, stream_to

MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"n": 2, "logprobs": 2},
    {"frequency_penalty": 0.4, "prompt_logprobs": 1},
    {"n": 3, "stop": ["e t", "SELECT"]},
    {"structured": {"json_object": True}},
    {"stop": [" a"], "include_stop_str_in_output": True, "min_tokens": 5},
    {"bad_words": ["the"], "logit_bias": {7: -3.0}, "top_p": 0.9},
    {"detokenize": False, "max_tokens": 9},
    {"stop_token_ids": list(range(5, 600, 2)), "min_tokens": 4},
]


def mixed_params() -> list[SamplingParams]:
    return [
        SamplingParams(**{"temperature": 0.8, "max_tokens": 30, "seed": 3 + i, **one})
        for i, one in enumerate(MIXED)
    ]


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[list[int]]:
    rows = sample_prompts()[: len(MIXED)]
    return [encode_chat(plain.engine.tokenizer, row["messages"][:1]) for row in rows]


@pytest.fixture(scope="module")
def expected(plain: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return plain.generate(prompts, mixed_params())


def said(output: RequestOutput) -> list[tuple[Any, ...]]:
    """All of an output that the request decides."""
    return [
        (one.index, one.text, one.token_ids, one.finish_reason, one.stop_reason, one.seed, one.token_logprobs)
        for one in output.outputs
    ] + [(output.prompt_token_ids, output.prompt_token_logprobs)]


async def ask_all(
    engine: EngineClient, prompts: list[list[int]], on_update: Callable[[Update], None] = lambda update: None
) -> list[RequestOutput]:
    """All requests at once; what was streamed must be what the outputs hold."""

    async def one(prompt: list[int], params: SamplingParams) -> RequestOutput:
        texts: dict[int, str] = {}
        tokens: dict[int, list[int]] = {}
        async for update in engine.stream(prompt, params):
            on_update(update)
            texts[update.index] = texts.get(update.index, "") + update.text
            tokens.setdefault(update.index, []).extend(update.token_ids)
            assert len(update.from_draft) == len(update.token_ids)
        assert update.output is not None
        for answer in update.output.outputs:
            assert texts[answer.index] == answer.text
            assert tokens[answer.index] == answer.token_ids
            assert len(answer.from_draft) == len(answer.token_ids)
        return update.output

    return await asyncio.gather(*map(one, prompts, mixed_params()))


@pytest.mark.parametrize("interval_s", [0.0, 0.05])
def test_mixed_requests_are_answered_as_by_the_engine(
    drafting: LLM, prompts: list[list[int]], expected: list[RequestOutput], interval_s: float
) -> None:
    host = ThreadedHost(drafting.engine, stream_interval_s=interval_s)
    got = asyncio.run(ask_all(host.remote, prompts))
    host.close()
    # The log-probabilities of several rows may differ in their last bits from those of one.
    for mine, theirs in zip(map(said, got), map(said, expected), strict=True):
        assert [one[:6] for one in mine[:-1]] == [one[:6] for one in theirs[:-1]]
    assert [entry.token_id for entry in got[1].outputs[0].token_logprobs or ()] == got[1].outputs[0].token_ids
    assert len(got[2].prompt_token_logprobs or ()) == len(prompts[2])
    assert drafting.engine.integrity() == []


def test_another_process_goes_on_where_one_died(
    drafting: LLM, prompts: list[list[int]], expected: list[RequestOutput]
) -> None:
    """Every stream pauses and goes on: no token comes twice, none is missing, and the text is the same."""
    later: list[ThreadedHost] = []

    def restart() -> EngineLink:
        wait_until(lambda: not drafting.engine.has_unfinished)  # the first one has dropped what it had
        later.append(ThreadedHost(drafting.engine))
        return later[0].link

    host = ThreadedHost(drafting.engine, restart=restart, max_restarts=1)
    num_tokens = 0

    def die(update: Update) -> None:
        nonlocal num_tokens
        num_tokens += len(update.token_ids)
        if num_tokens > 60:
            host.link.close()

    got = asyncio.run(ask_all(host.remote, prompts, die))
    assert len(later) == host.remote.num_restarts == 1
    for mine, theirs in zip(map(said, got), map(said, expected), strict=True):
        assert [one[:6] for one in mine[:-1]] == [one[:6] for one in theirs[:-1]]
    resumed = [one.metrics.num_resumed_tokens for output in got for one in output.outputs]
    assert sum(resumed) > 0
    for output in got:
        for one in output.outputs:
            counted = one.metrics.num_steps + one.metrics.num_accepted_tokens - one.metrics.num_cut_steps
            assert counted + one.metrics.num_resumed_tokens == len(one.token_ids)
    for each in (host, *later):
        each.close()
    assert drafting.engine.integrity() == []


def test_without_another_process_requests_end_with_an_error(drafting: LLM, prompts: list[list[int]]) -> None:
    host = ThreadedHost(drafting.engine)

    async def main() -> None:
        updates = host.remote.stream(prompts[0], SamplingParams(max_tokens=2000, ignore_eos=True, seed=1))
        await anext(updates)
        host.link.close()
        with pytest.raises(EngineStoppedError, match="process has ended"):
            async for _ in updates:
                pass
        wait_until(lambda: not drafting.engine.has_unfinished)
        with pytest.raises(
            EngineStoppedError, match="the engine has stopped: the engine's process has ended"
        ):
            await host.remote.generate(prompts[0])

    asyncio.run(main())
    assert host.remote.has_stopped
    host.close()


def test_what_kills_two_processes_is_not_tried_a_third_time(drafting: LLM, prompts: list[list[int]]) -> None:
    hosts: list[ThreadedHost] = []

    def restart() -> EngineLink:
        wait_until(lambda: not drafting.engine.has_unfinished)
        hosts.append(ThreadedHost(drafting.engine))
        return hosts[-1].link

    first = ThreadedHost(drafting.engine, restart=restart, max_restarts=5)
    hosts.append(first)

    async def dies_at_every_update() -> None:
        long = SamplingParams(max_tokens=900, ignore_eos=True, seed=1)
        async for _ in first.remote.stream(prompts[0], long):
            hosts[-1].link.close()

    async def main() -> None:
        with pytest.raises(EngineStoppedError, match="process has ended"):
            await dies_at_every_update()
        assert first.remote.num_restarts == 1
        output = await first.remote.generate(prompts[0], SamplingParams(max_tokens=3, seed=1))
        assert len(output.outputs[0].token_ids) == 3

    asyncio.run(main())
    assert first.remote.num_restarts == 2
    for each in hosts:
        each.close()


def test_a_stream_that_is_left_is_dropped_by_the_engine(drafting: LLM, prompts: list[list[int]]) -> None:
    host = ThreadedHost(drafting.engine)

    async def main() -> None:
        updates = host.remote.stream(prompts[0], SamplingParams(max_tokens=2000, ignore_eos=True))
        await anext(updates)
        await updates.aclose()  # type: ignore[attr-defined]
        await asyncio.to_thread(wait_until, lambda: not drafting.engine.has_unfinished)
        stats = await host.remote.stats()
        assert (stats.num_running, stats.num_held_slots) == (0, 0)
        named = host.remote.stream(
            prompts[0], SamplingParams(max_tokens=2000, ignore_eos=True), request_id="mine"
        )
        await anext(named)
        await host.remote.abort("mine")
        *_, last = [update async for update in named]
        assert last.finish_reason == "abort"

    asyncio.run(main())
    host.close()


def test_refusals_come_from_where_they_are_found(drafting: LLM, prompts: list[list[int]]) -> None:
    host = ThreadedHost(drafting.engine)

    async def refused(
        match: str, prompt: Any = "x", options: RequestOptions | None = None, **fields: Any
    ) -> None:
        with pytest.raises(RequestError, match=match):
            await host.remote.generate(prompt, SamplingParams(**fields), options=options)

    async def main() -> None:
        await refused("the prompt is empty", prompt=[])
        await refused("regex cannot be used", structured={"regex": "("})
        await refused("allows no text but the empty one", structured={"regex": "a{0}"})
        await refused("draft_method must be", options=RequestOptions(draft_method="nobody"))

    asyncio.run(main())
    host.close()
    assert drafting.engine.integrity() == []


def test_the_engine_waits_for_a_server_that_does_not_read(
    drafting: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And makes no step meanwhile; nothing is lost."""
    monkeypatch.setattr(host_module, "MAX_UNREAD_BYTES", 4096)
    link, other = stream_to(drafting.engine)
    for each in (link.socket, other):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host = EngineHost(drafting.engine, other, CODEC.frames())
    thread = threading.Thread(target=host.run)
    thread.start()
    values = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0, "logprobs": 20}
    link.socket.sendall(CODEC.frame(Submit(1, "a", prompts[0], [], values, RequestOptions())))
    wait_until(lambda: bool(drafting.engine.scheduler.running))
    [sequence] = drafting.engine.scheduler.running
    length = -1

    def stands() -> bool:
        nonlocal length
        before, length = length, sequence.num_output_tokens
        threading.Event().wait(0.2)
        return before == length > 0

    wait_until(stands)
    assert length < 300
    frames, token_ids, ended = CODEC.frames(), list[int](), False
    while not ended:
        for body in frames.add(link.socket.recv(2**16)):
            message = CODEC.read(body)
            assert isinstance(message, Steps)
            for _, update in message.updates:
                token_ids += update.token_ids
                ended |= update.end is not None
    assert token_ids == sequence.output_token_ids
    assert len(token_ids) == 400
    link.close()
    thread.join()
    link.socket.close()


def test_a_request_is_refused_while_the_engine_does_not_read(
    drafting: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "MAX_UNSENT_BYTES", 2**16)
    link, other = stream_to(drafting.engine)
    remote = RemoteEngine(link, drafting.engine.tokenizer)

    async def ask_without_end() -> None:
        while True:
            await remote.begin(prompts[0], SamplingParams(), lambda item: None)

    with pytest.raises(EngineBusyError, match="try again"):
        asyncio.run(ask_without_end())
    remote.close()
    other.close()
