"""A fault between the two processes ends one request with its reason, or all; nothing is lost, and nothing hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from serve_cases import wait_until

from slipstream import LLM, RequestOptions, SamplingParams
from slipstream.assets import sample_prompts
from slipstream.engine import unread
from slipstream.engine.mailbox import Item
from slipstream.engine.outputs import Update
from slipstream.engine.requests import request_seeds
from slipstream.errors import EngineStoppedError, PredictionError, RequestError
from slipstream.sampling.noise import derive_seed
from slipstream.sampling.params import StructuredOutput
from slipstream.serve.accounts import Accounts, TaskLabels
from slipstream.serve.process.answers import params_out
from slipstream.serve.process.host import EngineHost
from slipstream.serve.process.launch import EngineLink
from slipstream.serve.process.protocol import CODEC, CancelRequest, Read, State, Submit
from slipstream.serve.process.remote import RemoteEngine
from slipstream.text.prompts import encode_chat
from tests.kit.threaded_host import ThreadedHost, stream_to

LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def prompt(plain: LLM) -> list[int]:
    return encode_chat(plain.engine.tokenizer, sample_prompts()[0]["messages"][:1])


class Hosts:
    """Engine's sides one after the other, each started where the one before has left."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.made: list[ThreadedHost] = []

    def start(self, **info: Any) -> EngineLink:
        """Another one; the engine that it loaded has these other info."""
        wait_until(lambda: not self.llm.engine.has_unfinished)
        self.made.append(ThreadedHost(self.llm.engine))
        link = self.made[-1].link
        link.info = replace(link.info, **info)
        return link

    def close(self) -> None:
        """See them all out."""
        for host in self.made:
            host.close()
        assert not self.llm.engine.has_unfinished
        assert self.llm.engine.integrity() == []


@pytest.fixture
def hosts(drafting: LLM) -> Any:
    made = Hosts(drafting)
    yield made
    made.close()


async def last_of(begin: Callable[[Callable[[Item], None]], Any]) -> Item:
    """The update or the error that ends a request which `begin` begins."""
    items: asyncio.Queue[Item] = asyncio.Queue()
    await begin(items.put_nowait)
    while True:
        item = await asyncio.wait_for(items.get(), WAIT_S)
        if isinstance(item, Exception) or item.output is not None:
            return item


def test_an_abort_is_not_lost_with_the_process_that_was_told_of_it(
    drafting: LLM, hosts: Hosts, prompt: list[int]
) -> None:
    link, other = stream_to(drafting.engine)  # nobody acts at its other end
    remote = RemoteEngine(link, drafting.engine.tokenizer, hosts.start, 1)

    async def main() -> Item:
        async def begin(put: Callable[[Item], None]) -> None:
            await remote.begin(prompt, LONG, put, request_id="mine")
            await remote.abort("mine")
            other.close()

        return await last_of(begin)

    last = asyncio.run(main())
    assert isinstance(last, Update)
    assert last.finish_reason == "abort"
    remote.close()


def test_an_abort_while_the_engine_starts_again_gets_a_last_update(
    drafting: LLM, hosts: Hosts, prompt: list[int]
) -> None:
    async def main() -> Item:
        aborting: list[asyncio.Future[None]] = []
        loop = asyncio.get_running_loop()

        def restart() -> EngineLink:
            aborting.append(asyncio.run_coroutine_threadsafe(remote.abort("mine"), loop))  # type: ignore[arg-type]
            aborting[0].result(WAIT_S)  # type: ignore[call-arg]
            return hosts.start()

        link, other = stream_to(drafting.engine)
        remote = RemoteEngine(link, drafting.engine.tokenizer, restart, 1)

        async def begin(put: Callable[[Item], None]) -> None:
            await remote.begin(prompt, LONG, put, request_id="mine")
            other.close()

        last = await last_of(begin)
        await asyncio.to_thread(remote.close)
        return last

    last = asyncio.run(main())
    assert isinstance(last, Update)
    assert last.finish_reason == "abort"


def test_an_abort_while_its_grammar_compiles_gets_a_last_update(
    drafting: LLM, hosts: Hosts, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling: Future[Any] = Future()
    monkeypatch.setattr(
        drafting.engine.intake,
        "compile_grammar",
        lambda params, *_, **__: None if params.structured is None else compiling,
    )
    hosts.start()
    remote = hosts.made[0].remote
    params = SamplingParams(structured=StructuredOutput(choice=["yes", "no"]), seed=1, n=2)

    async def begin(put: Callable[[Item], None]) -> None:
        await remote.begin(prompt, params, put, request_id="mine")
        await remote.stats()  # the engine has it
        await remote.abort("mine")

    last = asyncio.run(last_of(begin))
    assert isinstance(last, Update)
    assert last.output is not None
    assert [one.finish_reason for one in last.output.outputs] == ["abort", "abort"]
    assert compiling.cancelled()


def test_a_pause_while_its_grammar_compiles_holds_once_the_engine_has_the_request(
    drafting: LLM, hosts: Hosts, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(structured=StructuredOutput(choice=["yes", "no"]), seed=1)
    grammar = drafting.engine.intake.compile_grammar(params)
    assert grammar is not None
    compiling: Future[Any] = Future()
    monkeypatch.setattr(drafting.engine.intake, "compile_grammar", lambda *_: compiling)
    hosts.start()
    remote = hosts.made[0].remote
    got: list[Item] = []

    async def begin(put: Callable[[Item], None]) -> None:
        def note(item: Item) -> None:
            got.append(item)
            put(item)

        handle = await remote.begin(prompt, params, note, request_id="mine")
        handle.set_paused(True)
        await remote.stats()  # the engine's process has read both
        compiling.set_result(grammar.result(60))
        while not (stats := await remote.stats()).num_paused:
            assert not got, "it goes on although it is paused"
            await asyncio.sleep(0.002)
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        handle.set_paused(False)

    last = asyncio.run(last_of(begin))
    assert isinstance(last, Update)
    assert last.output is not None
    assert last.output.outputs[0].text in ("yes", "no")


def test_an_answer_that_no_message_holds_ends_alone(
    plain: LLM, hosts: Hosts, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CODEC, "max_bytes", 2**15)
    hosts.start()
    remote = hosts.made[0].remote
    wide = SamplingParams(max_tokens=40, seed=1, prompt_logprobs=20, ignore_eos=True)
    [expected] = plain.generate([prompt], LONG)

    async def main() -> None:
        refused, beside = await asyncio.gather(
            remote.generate((prompt * 9)[:900], wide), remote.generate(prompt, LONG), return_exceptions=True
        )
        assert isinstance(refused, RequestError)
        assert "has" in str(refused)
        assert str(refused).endswith("32,768 are possible; ask for fewer log-probabilities")
        assert not isinstance(beside, BaseException)
        assert beside.outputs[0].token_ids == expected.outputs[0].token_ids
        monkeypatch.setattr(CODEC, "max_bytes", 2**9)
        with pytest.raises(
            RequestError, match=r"cannot be sent to the engine: the Submit message has .* are possible"
        ):
            await remote.generate((prompt * 90)[:900], LONG)
        monkeypatch.undo()

    asyncio.run(main())
    assert not remote.has_stopped


def test_a_message_that_cannot_be_followed_ends_the_stream_wholly(hosts: Hosts, prompt: list[int]) -> None:
    hosts.start()
    remote = hosts.made[0].remote

    def fail(*_: Any) -> None:
        raise ValueError("a fault of the one who counts")

    listener: Any = SimpleNamespace(on_step=fail)
    remote.report_to(listener, Accounts(False, lambda: TaskLabels((), 0)))
    last = asyncio.run(last_of(lambda put: remote.begin(prompt, LONG, put)))
    assert isinstance(last, EngineStoppedError)
    assert remote.has_stopped


def test_a_stream_that_is_not_read_stays_paused_in_the_next_process(
    drafting: LLM, plain: LLM, hosts: Hosts, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "MAX_UNREAD_TOKENS", 8)
    link = hosts.start()
    remote = RemoteEngine(link, drafting.engine.tokenizer, hosts.start, 1)

    async def until(num_restarts: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while remote.num_restarts < num_restarts or (await remote.stats()).num_paused == 0:
                await asyncio.sleep(0.002)

    async def main() -> list[int]:
        stream = remote.stream(prompt, LONG)
        token_ids = list((await anext(stream)).token_ids)
        await until(num_restarts=0)
        link.close()
        await until(num_restarts=1)
        async for update in stream:
            token_ids += update.token_ids
        return token_ids

    token_ids = asyncio.run(main())
    remote.close()
    assert token_ids == plain.generate(prompt, LONG)[0].outputs[0].token_ids


def test_an_engine_that_comes_back_as_another_one_is_refused(
    drafting: LLM, hosts: Hosts, prompt: list[int]
) -> None:
    link, other = stream_to(drafting.engine)
    longer = link.info.max_model_len + 1
    remote = RemoteEngine(
        link, drafting.engine.tokenizer, lambda: hosts.start(max_model_len=longer, kv_bytes=1), 1
    )

    async def begin(put: Callable[[Item], None]) -> None:
        await remote.begin(prompt, LONG, put)
        other.close()

    last = asyncio.run(last_of(begin))
    assert str(last) == (
        "the engine's process cannot be started again: it loaded another engine than before: "
        f"max_model_len was {longer - 1} and is {longer}"
    )
    assert remote.has_stopped
    remote.close()


def test_seeds_go_on_in_another_process_and_so_do_requests_without_one(
    drafting: LLM, hosts: Hosts, prompt: list[int]
) -> None:
    """An engine of one seed draws the seeds of its requests from it; the next process must not begin them again."""
    link = hosts.start(seed=11)
    remote = RemoteEngine(link, drafting.engine.tokenizer, lambda: hosts.start(seed=11, kv_bytes=1), 1)
    unseeded = replace(LONG, seed=None)

    async def main() -> list[int]:
        seeds: list[int] = []
        async for update in remote.stream(prompt, unseeded):
            if not seeds and len(update.token_ids):
                seeds.append(0)
                link.close()
        assert update.output is not None
        seeds[0] = update.output.outputs[0].seed
        assert len(update.output.outputs[0].token_ids) == LONG.max_tokens
        seeds += [(await remote.generate(prompt, unseeded)).outputs[0].seed for _ in range(2)]
        return seeds

    seeds = asyncio.run(main())
    assert remote.num_restarts == 1
    assert seeds == [derive_seed(seed, 0) for seed in islice(request_seeds(11), 3)]
    remote.close()


def test_wake_ups_that_nobody_reads_hold_up_nobody(drafting: LLM, prompt: list[int]) -> None:
    """A cached grammar is ready in the engine's own thread, which must not wait there for itself to read."""
    link, other = stream_to(drafting.engine)
    link.socket.settimeout(WAIT_S)
    host = threading.Thread(target=EngineHost(drafting.engine, other, CODEC.frames()).run, daemon=True)
    host.start()
    params = SamplingParams(structured=StructuredOutput(choice=["yes", "no"]), max_tokens=1, seed=1)
    drafting.engine.intake.compile_grammar(params).result()  # type: ignore[union-attr]
    number = 1500
    sent = [
        message
        for id_ in range(1, number)
        for message in (
            Submit(id_, f"r{id_}", prompt[:3], [], params_out(params), RequestOptions(), 0),
            CancelRequest(id_, reports=False),
        )
    ]
    link.socket.sendall(b"".join(map(CODEC.frame, [*sent, Read(number)])))
    frames, heard = CODEC.frames(), list[Any]()
    while not any(isinstance(message, State) for message in heard):
        heard += map(CODEC.read, frames.add(link.socket.recv(2**16)))
    link.close()
    host.join(WAIT_S)
    link.socket.close()
    assert isinstance(heard[-1], State), "the engine's process answered behind all of them"
    assert not host.is_alive()


def test_what_is_expected_is_tokenised_by_the_server(
    plain: LLM, drafting: LLM, hosts: Hosts, prompt: list[int]
) -> None:
    [alone] = plain.generate([prompt], LONG)
    expected = alone.outputs[0].text
    other = expected[:40] + " and more " + expected[48:]
    wanted = drafting.generate([prompt, prompt], LONG, prediction=[expected, other])
    hosts.start()
    remote = hosts.made[0].remote
    with pytest.raises(PredictionError, match="tokens; shorten it"):
        asyncio.run(remote.generate(prompt, LONG, prediction="many words " * 10_000))
    for text, wants in zip((expected, other), wanted, strict=True):
        [got], [want] = asyncio.run(remote.generate(prompt, LONG, prediction=text)).outputs, wants.outputs
        assert got.token_ids == want.token_ids == alone.outputs[0].token_ids
        for name in ("num_accepted_prediction_tokens", "num_rejected_prediction_tokens"):
            assert getattr(got.metrics, name) == getattr(want.metrics, name)
        assert got.metrics.num_steps < 40
    # The engine is sent tokens.
    link, engine = stream_to(drafting.engine)
    front = RemoteEngine(link, drafting.engine.tokenizer)
    asyncio.run(front.begin(prompt, LONG, lambda item: None, options=RequestOptions(prediction=expected)))
    [submit] = map(CODEC.read, CODEC.frames().add(engine.recv(2**16)))
    assert isinstance(submit, Submit)
    assert isinstance(submit.options.prediction, tuple)
    front.close()
    engine.close()
