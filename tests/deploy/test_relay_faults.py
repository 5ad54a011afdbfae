"""A fault between front and replica ends one request with its reason, or the connection wholly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from test_relay import SECRET, House, check_same, run

from slipstream import LLM, RequestOptions, SamplingParams
from slipstream.assets import sample_prompts
from slipstream.core.metrics.decoded import DecodedSteps
from slipstream.deploy import protocol
from slipstream.deploy.fingerprint import Fingerprint
from slipstream.deploy.fleet import ReplicaInfo, ReplicaReport
from slipstream.deploy.protocol import CODEC, BeginRequest, ReplicaBeat
from slipstream.deploy.relay import Relay
from slipstream.deploy.routed import aborted_updates
from slipstream.deploy.router import Router
from slipstream.deploy.served import ServedFleet, engine_info
from slipstream.engine.logprobs import TokenTexts
from slipstream.engine.outputs import Update
from slipstream.errors import DeployError, RequestError
from slipstream.reasoning.options import StepOptions
from slipstream.rpc.frames import framed
from slipstream.serve.process.answers import AnswerRecord, params_out
from slipstream.text.prompts import encode_chat

LONG = SamplingParams(max_tokens=300, ignore_eos=True, seed=5, n=2, logprobs=0, temperature=0.8)


@pytest.fixture(scope="module")
def lone() -> LLM:
    return LLM(kv_cache_bytes=64 * 2**20, max_num_seqs=16)


@pytest.fixture(scope="module")
def prompt(lone: LLM) -> list[int]:
    return encode_chat(lone.engine.tokenizer, sample_prompts()[0]["messages"])


def test_an_aborted_answer_says_whether_it_was_to_be_lossy() -> None:
    """The replica's own counts do not come, and the front knows what was asked for."""
    for lossy in (False, True):
        params = SamplingParams(n=2, seed=3)
        options = RequestOptions(reasoning=StepOptions() if lossy else None)
        begin = BeginRequest("mine", 1, [1], params_out(params), options)
        answers = [AnswerRecord(params) for _ in range(2)]
        output = aborted_updates(begin, params, answers, TokenTexts(None))[-1].output
        assert output is not None
        assert [answer.metrics.lossy for answer in output.outputs] == [lossy, lossy]


def test_a_request_that_is_aborted_by_its_id_gets_a_last_update(lone: LLM, prompt: list[int]) -> None:
    [wanted] = lone.generate([prompt], LONG)

    async def scenario(house: House) -> None:
        inner = house.engines[0].engine
        fleet = ServedFleet(house.relay, inner.tokenizer, engine_info(inner))
        updates: list[Update] = []
        async for update in fleet.stream(prompt, LONG, request_id="mine"):
            updates.append(update)
            if len(updates) == 9:
                await fleet.abort("nobody's")
                await fleet.abort("mine")
        output = updates[-1].output
        assert output is not None
        assert [update.finish_reason for update in updates[-2:]] == ["abort", "abort"]
        for answer, alone in zip(output.outputs, wanted.outputs, strict=True):
            assert answer.finish_reason == "abort"
            assert answer.seed == alone.seed
            own = [update for update in updates if update.index == answer.index]
            assert answer.token_ids == [token for update in own for token in update.token_ids]
            assert answer.token_ids == alone.token_ids[: len(answer.token_ids)]
            assert 0 < len(answer.token_ids) == len(answer.from_draft) == len(answer.token_logprobs or ())
            assert answer.text == "".join(update.text for update in own)
            assert answer.metrics.num_output_tokens == len(answer.token_ids)
        while any(server.num_under_way for server in house.servers.values()):
            await asyncio.sleep(0.01)
        assert house.relay.router.num_under_way == 0

    run(lone, scenario)


def test_what_no_message_holds_is_refused_alone(
    lone: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = SamplingParams(max_tokens=3, prompt_logprobs=20)
    [wanted] = lone.generate([prompt], LONG)

    async def scenario(house: House) -> None:
        beside = asyncio.create_task(house.whole(prompt, params=LONG))
        monkeypatch.setattr(CODEC, "max_bytes", 2**14)
        with pytest.raises(
            RequestError,
            match=r"the answer cannot be sent: the AttemptUpdate message has .* 16,384 are possible",
        ):
            await asyncio.wait_for(house.whole((prompt * 9)[:300], params=wide), 120)
        with pytest.raises(
            RequestError, match=r"cannot be sent to a replica: the BeginRequest message has .* are possible"
        ):
            await house.whole((prompt * 90)[:9000], params=LONG)
        check_same(*await beside, wanted)
        assert house.relay.router.counts.moved == 0
        assert house.relay.router.fleet.num_ready == 2

    run(lone, scenario)


@pytest.mark.parametrize(
    "message", [["update"], ["beat", {"num_running": "odd"}], ["cancel", "1", 1], {"type": "beat"}]
)
def test_a_replica_that_is_not_understood_is_left_wholly(message: object) -> None:
    async def main() -> None:
        closed = asyncio.Event()

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            info = ReplicaInfo("odd", Fingerprint("model", "bits"), 4, 1000)
            body = msgspec.msgpack.encode(message)
            writer.write(protocol.greeting_frame(protocol.welcome(info, {})) + framed(body, 2**20, "odd"))
            await reader.read()
            writer.close()
            closed.set()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        relay = Relay(Router(), SECRET)
        await relay.connect(*server.sockets[0].getsockname())
        await asyncio.wait_for(closed.wait(), 120)
        assert len(relay.router.fleet) == 0
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_a_fault_of_statistics_moves_no_request(
    lone: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a front counts, and where one replica tells of its steps."""
    [wanted] = lone.generate([prompt], LONG)
    faults = {"front": 0, "replica": 0}

    def fail(where: str) -> None:
        faults[where] += 1
        raise ValueError("a fault of the one who counts")

    def beat(report: ReplicaReport, told: DecodedSteps | None = None) -> ReplicaBeat:
        if told is not None:
            fail("replica")
        return ReplicaBeat(report)

    async def scenario(house: House) -> None:
        house.relay.on_steps = lambda told: fail("front")
        asked = [asyncio.create_task(house.whole(prompt, params=LONG)) for _ in range(3)]
        while not faults["front"]:
            await asyncio.sleep(0.01)
        monkeypatch.setattr("slipstream.deploy.replica.ReplicaBeat", beat)
        for answer in asked:
            check_same(*await answer, wanted)
        while not faults["replica"]:
            await asyncio.sleep(0.01)
        assert house.relay.router.counts.moved == 0
        assert house.relay.router.fleet.num_ready == len(house.relay.router.fleet) == 2

    run(lone, scenario)
    told = [record.getMessage() for record in caplog.records if "a fault of the one" in record.getMessage()]
    assert 2 <= len(told) <= 3, "one line for each who counts"
    assert (
        told[0]
        == "counting a replica's steps failed, 1 times so far: ValueError: a fault of the one who counts"
    )


def test_fronts_hear_of_accounts_and_never_of_tenants(lone: LLM, prompt: list[int]) -> None:
    """And of accounts only where one of them keeps them apart."""

    told: list[str] = []

    async def ask(house: House, by_account: bool, key: str, group: str) -> None:
        """Steps of a request, once replicas know what the front wants, are told under `group`."""
        house.relay.by_account = by_account
        engines = [server.engine.engine for server in house.servers.values()]
        await until(lambda: all(each.shares_by_account == by_account for each in engines))
        before = told.count(group)
        await house.whole(prompt, params=LONG, options=RequestOptions(tenant=f"{key}/someone"))
        await until(lambda: told.count(group) > before)

    async def scenario(house: House) -> None:
        house.relay.on_steps = lambda steps: told.extend(row.group for row, _ in steps.rows)
        await ask(house, True, "first", "first")
        await ask(house, False, "second", "")
        await ask(house, True, "third", "third")
        assert set(told) == {"first", "", "third"}

    run(lone, scenario)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.01)


def test_a_replica_that_does_not_say_what_it_is_is_refused() -> None:
    async def main() -> None:
        left = asyncio.Event()

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            info = {"id": "odd", "capacity": "many"}
            said = {"type": "welcome", "protocol": protocol.PROTOCOL, "facts": info}
            writer.write(protocol.greeting_frame(said))
            await reader.read()
            writer.close()
            left.set()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        with pytest.raises(DeployError, match="does not say what it is"):
            await Relay(Router(), SECRET).connect(*server.sockets[0].getsockname())
        await asyncio.wait_for(left.wait(), 120)
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_time_goes_on_after_a_tick_that_fails() -> None:
    class Failing(Router):
        num_ticks = 0

        def tick(self, now_s: float) -> list[Any]:
            self.num_ticks += 1
            if self.num_ticks < 3:
                raise KeyError("a fault")
            return super().tick(now_s)

    async def main() -> None:
        router = Failing()

        async def nobody() -> list[tuple[str, int]]:
            return []

        running = asyncio.create_task(Relay(router, SECRET).run(nobody))
        while router.num_ticks < 4:
            assert not running.done()
            await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(main())
