"""Real engines behind the router: whatever happens to replicas, an answer is what one engine alone would have said."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from slipstream import LLM, RequestOptions, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.deploy import protocol
from slipstream.deploy.config import RouterConfig
from slipstream.deploy.fingerprint import Fingerprint
from slipstream.deploy.fleet import Health, ReplicaInfo
from slipstream.deploy.identity import fingerprint_of
from slipstream.deploy.protocol import CODEC
from slipstream.deploy.relay import Relay
from slipstream.deploy.replica import ReplicaServer
from slipstream.deploy.routed import RoutedEngine
from slipstream.deploy.router import Router
from slipstream.deploy.served import ServedFleet, engine_info
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.outputs import RequestOutput, Update
from slipstream.engine.unread import MAX_UNREAD_TOKENS
from slipstream.errors import DeployError, OverloadedError, RequestError
from slipstream.rpc.peer import Peer
from slipstream.serve.process.answers import params_out
from slipstream.text.prompts import encode_chat

SECRET = "a secret"
ROOM = {"kv_cache_bytes": 64 * 2**20, "max_num_seqs": 16}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}, "b": {"type": "boolean"}}}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True},
    {"temperature": 0.9, "max_tokens": 40, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "max_tokens": 40, "n": 2, "frequency_penalty": 0.5, "stop": ["er"]},
    {"temperature": 0.9, "max_tokens": 60, "structured": {"json_schema": SCHEMA | {"required": ["a", "b"]}}},
    {"temperature": 0.7, "max_tokens": 50, "min_tokens": 30, "logit_bias": {5: 2.0}, "bad_words": ["the"]},
]


@pytest.fixture(scope="module")
def lone() -> LLM:
    return LLM(**ROOM)


@pytest.fixture(scope="module")
def prompts(lone: LLM) -> list[list[int]]:
    return [encode_chat(lone.engine.tokenizer, row["messages"]) for row in sample_prompts()[:20]]


class House:
    """Replicas of this process behind a relay. Two engines share the target's weights, not its cache."""

    def __init__(self, relay: Relay, engines: list[AsyncEngine]) -> None:
        self.relay = relay
        self.engines = engines
        self.servers: dict[str, ReplicaServer] = {}
        self.addresses: list[tuple[str, int]] = []
        self.routed = RoutedEngine(relay, engines[0].engine.tokenizer)

    async def add(self, name: str, number: int, fingerprint: Fingerprint | None = None) -> None:
        inner = self.engines[number].engine
        info = ReplicaInfo(name, fingerprint or fingerprint_of(inner), 16, inner.memory_plan.num_slots)
        self.servers[name] = ReplicaServer(self.engines[number], info, SECRET, beat_s=0.05)
        self.addresses.append(await self.servers[name].start())

    async def discover(self) -> list[tuple[str, int]]:
        return self.addresses

    async def kill(self, name: str) -> None:
        """As a process that dies: its connections break, and what it did is lost."""
        await self.servers.pop(name).close()

    async def whole(self, prompt: list[int], **keywords: Any) -> tuple[RequestOutput, list[Update]]:
        updates = [update async for update in self.routed.stream(prompt, **keywords)]
        assert updates[-1].output is not None
        return updates[-1].output, updates


@contextlib.asynccontextmanager
async def a_house(lone: LLM, num: int = 2, **config: Any) -> AsyncIterator[House]:
    drafting = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}
    engines = [AsyncEngine(**ROOM, speculative_config=[None, drafting][n % 2]) for n in range(num)]
    relay = Relay(Router(RouterConfig(**config)), SECRET)
    house = House(relay, engines)
    for number in range(num):
        await house.add(f"r{number}", number)
    keeping = asyncio.create_task(relay.run(house.discover))
    try:
        while len(relay.router.fleet) < num:
            await asyncio.sleep(0.01)
        yield house
        assert relay.router.integrity() == []
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        for server in house.servers.values():
            await server.close()
        for engine in engines:
            await engine.idle()
            assert engine.engine.integrity() == []
            await asyncio.to_thread(engine.close)


def run(lone: LLM, scenario: Callable[[House], Awaitable[None]], **config: Any) -> None:
    async def main() -> None:
        async with a_house(lone, **config) as house:
            await scenario(house)

    asyncio.run(main())


def check_same(got: RequestOutput, updates: list[Update], wanted: RequestOutput) -> None:
    assert got.prompt_token_logprobs == wanted.prompt_token_logprobs
    for answer, alone in zip(got.outputs, wanted.outputs, strict=True):
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "seed", "token_logprobs"):
            assert getattr(answer, name) == getattr(alone, name), name
        assert answer.metrics.num_output_tokens == alone.metrics.num_output_tokens
        own = [update for update in updates if update.index == answer.index]
        assert [token for update in own for token in update.token_ids] == alone.token_ids
        assert "".join(update.text for update in own) == alone.text
        assert sum(update.finish_reason is not None for update in own) == 1


def expected(lone: LLM, prompts: list[list[int]]) -> list[tuple[list[int], SamplingParams, RequestOutput]]:
    cases = []
    for number, prompt in enumerate(prompts[:15]):
        params = SamplingParams(seed=number, **REQUESTS[number % len(REQUESTS)])
        cases.append((prompt, params, lone.generate(prompt, params)[0]))
    return cases


@pytest.mark.parametrize("how", ["nothing", "kill", "hang", "drain"])
def test_answers_are_the_lone_runs(lone: LLM, prompts: list[list[int]], how: str) -> None:
    cases = expected(lone, prompts)

    async def scenario(house: House) -> None:
        tasks = [asyncio.create_task(house.whole(prompt, params=params)) for prompt, params, _ in cases]
        router = house.relay.router
        while sum(tokens_of(router, name) >= 5 for name in router.fleet["r0"].requests) < 3:
            await asyncio.sleep(0.001)
        if how == "kill":
            await house.kill("r0")
            await house.add("r2", 0)
        elif how == "drain":
            assert await house.servers["r0"].drain(30.0)
        elif how == "hang":
            stuck = asyncio.Event()
            blocked = asyncio.create_task(house.engines[0].ask(lambda engine: asyncio.run(_wait(stuck))))
            while router.fleet["r0"].health is not Health.SILENT:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            stuck.set()
            await blocked
        for task, (_, _, wanted) in zip(tasks, cases, strict=True):
            check_same(*await task, wanted)
        if how == "nothing":
            assert router.counts.moved == 0
        else:
            assert router.counts.moved > 0, "nothing was under way there"
        while how == "hang" and router.fleet["r0"].health is not Health.READY:
            await asyncio.sleep(0.02)
        assert router.num_under_way == 0

    # A busy machine must not make a replica silent before the test does.
    run(lone, scenario, hang_timeout_s=3.0 if how == "hang" else 60.0)


def tokens_of(router: Router, request: str) -> int:
    ticket = router.ticket(request)
    return 0 if ticket is None else ticket.num_tokens


async def _wait(event: asyncio.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.01)


def test_what_cannot_be_served_is_refused_once(lone: LLM, prompts: list[list[int]]) -> None:
    async def scenario(house: House) -> None:
        params = SamplingParams(seed=1, structured={"regex": "a{1000000}"})
        with pytest.raises(RequestError):
            await house.whole(prompts[0], params=params)
        assert house.relay.router.counts.moved == 0
        with pytest.raises(OverloadedError, match="cannot be complete"):
            await house.whole(prompts[0], params=SamplingParams(), timeout_s=0.0)

    run(lone, scenario)


def test_a_caller_that_leaves_frees_what_it_held(lone: LLM, prompts: list[list[int]]) -> None:
    async def scenario(house: House) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        async with contextlib.aclosing(house.routed.stream(prompts[0], params)) as updates:
            async for _ in updates:
                break
        assert house.relay.router.num_under_way == 0
        while any(server.num_under_way for server in house.servers.values()):
            await asyncio.sleep(0.01)

    run(lone, scenario)


def test_other_secrets_versions_and_models_are_refused_in_a_line(
    lone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(house: House) -> None:
        async def refusal(relay: Relay, address: tuple[str, int]) -> str:
            with pytest.raises(DeployError) as error:
                await relay.connect(*address)
            assert "\n" not in str(error.value)
            return str(error.value)

        address = house.addresses[0]
        assert "does not know this deployment's secret" in await refusal(Relay(Router(), "wrong"), address)
        assert "there already" in await refusal(house.relay, address)
        await house.add("other", 0, Fingerprint("another", "bits"))
        assert "serves another model" in await refusal(house.relay, house.addresses[-1])
        house.addresses.pop()
        with monkeypatch.context() as patched:
            patched.setattr("slipstream.deploy.protocol.hello", None)
            patched.setattr(
                "slipstream.deploy.connection.hello",
                lambda front, secret: {"type": "hello", "protocol": 99, "front": front, "secret": secret},
            )
            assert "speaks version 99" in await refusal(Relay(Router(), SECRET), address)
        silent = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        nobody = silent.sockets[0].getsockname()
        assert "is it a slipstream replica?" in await refusal(Relay(Router(), SECRET), nobody)
        silent.close()
        await silent.wait_closed()
        assert "no replica can be reached" in await refusal(Relay(Router(), SECRET), nobody)

    run(lone, scenario)


def test_an_answer_that_went_on_with_other_arithmetic_says_so(lone: LLM, prompts: list[list[int]]) -> None:
    async def scenario(house: House) -> None:
        own = fingerprint_of(house.engines[0].engine)
        await house.kill("r1")
        seams: list[tuple[int, bool]] = []
        params = SamplingParams(max_tokens=1700, ignore_eos=True, temperature=0)
        keywords = {"params": params, "on_seam": lambda moves, crossed: seams.append((moves, crossed))}
        task = asyncio.create_task(house.whole(prompts[0], **keywords))
        await asyncio.sleep(0.05)
        await house.add("unlike", 1, Fingerprint(own.model, "other"))
        while "unlike" not in house.relay.router.fleet:
            await asyncio.sleep(0.01)
        await house.kill("r0")
        await task
        assert seams == [(1, True)]

    run(lone, scenario, unlike_replicas="say")


def test_tenants_travel_with_their_requests(lone: LLM, prompts: list[list[int]]) -> None:
    """A replica's cache is shared within a tenant only, through the router too."""

    async def scenario(house: House) -> None:
        params = SamplingParams(max_tokens=2)
        cached = []
        for tenant in ("one", "one", "two"):
            options = RequestOptions(tenant=tenant)
            output, _ = await house.whole(prompts[0], params=params, options=options)
            cached.append(output.num_cached_tokens > 0)
        assert cached == [False, True, False]

    run(lone, scenario, num=1)


# --- streams that are not read ---------------------------------------------------------------------------------

FEW = 48
"""Unread tokens in these tests, for which the real bound would take long to reach."""
UNREAD = SamplingParams(max_tokens=800, ignore_eos=True, seed=3, temperature=0.9)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FEW < MAX_UNREAD_TOKENS
    monkeypatch.setattr("slipstream.engine.unread.MAX_UNREAD_TOKENS", FEW)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await holds():
            await asyncio.sleep(0.01)


async def num_paused(house: House) -> list[int]:
    """By engine, whatever the router says."""
    return [(await engine.stats()).num_paused for engine in house.engines]


async def rest_of(updates: AsyncIterator[Update], read: list[Update]) -> tuple[RequestOutput, list[Update]]:
    read += [update async for update in updates]
    assert read[-1].output is not None
    return read[-1].output, read


def test_unread_streams_are_paused_and_leave_their_places_to_others(
    lone: LLM, prompts: list[list[int]], few: None
) -> None:
    wanted = [lone.generate(prompt, UNREAD)[0] for prompt in prompts[:2]]
    options = RequestOptions(tenant="one/reader")

    async def scenario(house: House) -> None:
        router = house.relay.router
        streams = [
            house.routed.stream(prompts[n % 2], UNREAD, options=options, request_id=str(n)) for n in range(16)
        ]
        read = [[await anext(stream)] for stream in streams]

        async def all_paused() -> bool:
            return await num_paused(house) == [16]

        await until(all_paused)
        assert (router.num_paused, router.fleet["r0"].load) == (16, 0)
        made = []
        for tenant in ("one/reader", "two"):  # the same key's other requests are not held up either
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            await house.whole(prompts[3], params=params, options=RequestOptions(tenant=tenant))
            made.append([tokens_of(router, str(n)) for n in range(16)])  # all that was under way has come
        assert made[0] == made[1], "nothing was made for them meanwhile"
        assert router.counts.moved == 0
        for number in (0, 1):
            check_same(*await rest_of(streams[number], read[number]), wanted[number])
        for stream in streams:
            await stream.aclose()

    run(lone, scenario, num=1)


@pytest.mark.parametrize("how", ["kill", "drain"])
def test_a_paused_answer_whose_replica_goes_is_paused_elsewhere_and_has_its_text(
    lone: LLM, prompts: list[list[int]], few: None, how: str
) -> None:
    params = SamplingParams(max_tokens=800, ignore_eos=True, seed=3, temperature=0.9, n=2, logprobs=1)
    [wanted] = lone.generate([prompts[0]], params)

    async def scenario(house: House) -> None:
        inner, router = house.engines[0].engine, house.relay.router
        fleet = ServedFleet(house.relay, inner.tokenizer, engine_info(inner))
        stream = fleet.stream(prompts[0], params, request_id="unread")
        read = [await anext(stream)]

        async def paused_at(number: int) -> bool:
            return (await num_paused(house))[number] == 2

        await until(lambda: paused_at(0))
        assert (await fleet.stats()).num_paused == 2
        if how == "kill":
            await house.kill("r0")
        else:
            assert await house.servers["r0"].drain(30.0)
        await until(lambda: paused_at(1))
        ticket = router.ticket("unread")
        assert ticket is not None
        assert (ticket.replica, ticket.num_moves, router.num_paused) == ("r1", 1, 2)
        check_same(*await rest_of(stream, read), wanted)
        assert router.num_paused == 0

    run(lone, scenario)


def test_a_pause_that_comes_before_the_engine_has_the_request_is_kept(
    lone: LLM, prompts: list[list[int]]
) -> None:
    async def scenario(house: House) -> None:
        peer = Peer(*await asyncio.open_connection(*house.addresses[0]), CODEC.frames())
        params = params_out(SamplingParams(max_tokens=5, ignore_eos=True))
        peer.send(protocol.greeting_frame(protocol.hello("by hand", SECRET)))
        said: list[protocol.ReplicaMessage] = [
            protocol.BeginRequest("1", 1, prompts[0], params, RequestOptions())
        ]
        said += [protocol.PauseAttempt("1", 1, True), protocol.PauseAttempt("1", 2, True)]
        peer.send(b"".join(map(CODEC.frame, said)))

        async def is_paused() -> bool:
            return await num_paused(house) == [1]

        await until(is_paused)
        peer.send(CODEC.frame(protocol.PauseAttempt("1", 1, False)))
        num_tokens = 0
        greeting = await peer.read()
        assert greeting is not None
        assert protocol.read_greeting(greeting)["type"] == "welcome"
        while True:
            body = await peer.read()
            assert body is not None
            message = CODEC.read(body)
            if isinstance(message, protocol.AttemptUpdate):
                num_tokens += len(message.update.token_ids)
                if message.update.end is not None:
                    break
        assert num_tokens == 5
        peer.writer.close()

    run(lone, scenario, num=1)


def test_another_accounts_request_does_not_wait_for_the_endless_ones_of_one(
    lone: LLM, prompts: list[list[int]]
) -> None:
    """The replica is full, and its engine shares its places. Without accounts there is one line for all."""
    endless = SamplingParams(max_tokens=1200, ignore_eos=True)
    short = SamplingParams(max_tokens=3, ignore_eos=True)

    async def scenario(house: House) -> None:
        router = house.relay.router
        first = RequestOptions(tenant="one/reader")
        long = [
            asyncio.create_task(house.whole(prompts[0], params=endless, options=first)) for _ in range(18)
        ]

        async def is_full() -> bool:
            return (router.fleet["r0"].load, router.queue.num_answers) == (16, 2)

        async def account_of(tenant: str) -> str:
            """Once it is answered."""
            got: asyncio.Queue[Any] = asyncio.Queue()
            options = RequestOptions(tenant=tenant)
            house.routed.begin(prompts[1], short, got.put_nowait, options=options, request_id="short")
            ticket = router.ticket("short")
            assert ticket is not None
            while (await got.get()).output is None:
                pass
            return ticket.work.account

        await until(is_full)
        assert await account_of("two/someone") == "two"
        assert not any(task.done() for task in long), "it did not wait for one of them"
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        house.relay.by_account = False
        assert await account_of("two/someone") == ""

    run(lone, scenario, num=1)


def test_a_handle_pauses_no_later_request_of_its_id(lone: LLM, prompts: list[list[int]]) -> None:
    async def scenario(house: House) -> None:
        got: asyncio.Queue[Any] = asyncio.Queue()
        router, params = house.relay.router, SamplingParams(max_tokens=1)
        before = house.routed.begin(prompts[0], params, got.put_nowait, request_id="one")
        assert (await got.get()).output is not None
        later = house.routed.begin(prompts[0], UNREAD, got.put_nowait, request_id="one")
        before.set_paused(True)
        assert router.num_paused == 0
        later.set_paused(True)
        before.set_paused(False)
        assert router.num_paused == 1
        later.leave()
        assert router.num_under_way == 0

    run(lone, scenario, num=1)
