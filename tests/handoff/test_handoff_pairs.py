"""Paired probes: what is asked of which side, at which load, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from handoff_cases import fake_command, free_port, running, serve_command

from slipstream.assets.workload.prompts import Prompt
from slipstream.errors import RemoteError
from slipstream.rpc.client import ServerAddress, connect
from slipstream.tools.handoff.canary import NUM_WARM_UP, AlternatingCanary
from slipstream.tools.handoff.instance import InstanceProbes
from slipstream.tools.handoff.pairs import MAX_BACKGROUND, ProbeAnswer, ProbePrompts, ProbeSide
from slipstream.tools.handoff.watch import Watch, WatchedServer

PROMPTS = ProbePrompts([Prompt("task", f"prompt {number}", 24, f"text {number}", ()) for number in range(5)])
ADDRESS = ServerAddress("http://127.0.0.1:9/v1", "m", "http://127.0.0.1:9/metrics")


class Side(ProbeSide):
    """A side that is not there: it runs what it is told, and writes down what is asked of it."""

    def __init__(self, running: list[int], seconds: float, error: str | None = None) -> None:
        super().__init__(ADDRESS, PROMPTS)
        self.running, self.seconds, self.error = running, seconds, error
        self.asked: list[str] = []
        self.loads: list[int] = []

    async def num_running(self, client: httpx2.AsyncClient) -> int:
        return self.running.pop(0) if len(self.running) > 1 else self.running[0]

    async def answer(
        self, client: httpx2.AsyncClient, number: int, prompt: Prompt, num_concurrent: int
    ) -> ProbeAnswer:
        if self.error is not None:
            raise RemoteError(self.error)
        self.asked.append(prompt.where)
        return ProbeAnswer(10, self.seconds, num_concurrent)

    @asynccontextmanager
    async def load(self, client: httpx2.AsyncClient, number: int) -> AsyncIterator[None]:
        self.loads.append(number)
        self.running = [self.running[0] + number]
        yield


def paired(on: Side, off: Side, num: int) -> InstanceProbes:
    probes = InstanceProbes(on, off, Watch(WatchedServer("http://127.0.0.1:9", "m", "ngram")), PROMPTS, 1.0)

    async def run() -> None:
        async with httpx2.AsyncClient() as client:
            for _ in range(num):
                await probes.pair(client)

    asyncio.run(run())
    return probes


def test_both_sides_get_the_same_prompts() -> None:
    on, off = Side([0], 1.0), Side([0], 2.0)
    probes = paired(on, off, 7)
    assert on.asked == off.asked == [f"prompt {number % 5}" for number in range(7)]
    found = probes.log.speedup()
    assert found is not None
    assert (found.ratio, found.num_pairs) == (pytest.approx(2.0), 7)
    assert set(off.loads) == {0}


def test_the_off_side_gets_as_many_requests_as_the_on_side_has() -> None:
    on, off = Side([3], 1.0), Side([0], 2.0)
    probes = paired(on, off, 1)
    assert off.loads == [3]
    assert probes.log.num_dropped == 0


def test_a_busier_off_side_and_a_changed_load_drop_the_pair() -> None:
    probes = paired(Side([0], 1.0), Side([4], 2.0), 1)
    assert probes.log.num_dropped == 1
    assert probes.log.last_drop == "0 requests ran during one answer and 4 during the other"
    probes = paired(Side([MAX_BACKGROUND + 1], 1.0), Side([0], 2.0), 1)
    assert "probes give the off side at most 64" in str(probes.log.last_drop)
    probes = paired(Side([0], 1.0, error="it is gone"), Side([0], 2.0), 1)
    assert probes.log.last_drop == "it is gone"


def test_the_load_is_there_and_goes_again(tmp_path: Path) -> None:
    port = free_port()
    with running(serve_command(fake_command(tmp_path), port), port):
        url = f"http://127.0.0.1:{port}"
        side = ProbeSide(ServerAddress(f"{url}/v1", "some/model", f"{url}/metrics"), PROMPTS)

        async def run() -> tuple[ProbeAnswer, int]:
            async with connect(side.address) as client:
                async with side.load(client, 2):
                    answer = await side.answer(client, 0, PROMPTS.prompts[0], 2)
                most = (await client.get(f"{url}/fake")).json()["most_running"]
                async with asyncio.timeout(120):
                    while await side.num_running(client):
                        await asyncio.sleep(0.02)
                return answer, most

        answer, most = asyncio.run(run())
    assert (answer.num_tokens, answer.num_concurrent) == (24, 2)
    assert most >= 2


def test_a_canary_asks_the_same_of_both_and_ends_with_speculation() -> None:
    side = Side([0], 2.0)
    restarts: list[bool] = []

    async def restart(with_speculation: bool) -> None:
        restarts.append(with_speculation)
        side.seconds = 1.0 if with_speculation else 2.0

    watch = Watch(WatchedServer("http://127.0.0.1:9", "m", "ngram"))
    canary = AlternatingCanary(side, restart, watch, PROMPTS, 4, None)
    asyncio.run(canary.alternate(restart_off=False))
    assert restarts == [True], "it ran without speculation already"
    assert len(side.asked) == 2 * (NUM_WARM_UP + 4)
    found = canary.log.speedup()
    assert found is not None
    assert found.ratio == pytest.approx(2.0)
    asyncio.run(canary.alternate())
    assert restarts == [True, False, True]
    asyncio.run(canary.run())  # repeats only where it was told to


def test_a_failed_probe_of_a_canary_costs_its_pair_and_not_the_server() -> None:
    side = Side([0], 1.0)
    restarts: list[bool] = []

    async def restart(with_speculation: bool) -> None:
        restarts.append(with_speculation)
        side.error = None if with_speculation else "it answers HTTP 503"

    watch = Watch(WatchedServer("http://127.0.0.1:9", "m", "ngram"))
    canary = AlternatingCanary(side, restart, watch, PROMPTS, 4, None)
    asyncio.run(canary.alternate())
    assert restarts == [False, True], "it speculates again"
    assert (canary.log.num_dropped, canary.log.last_drop) == (4, "it answers HTTP 503")
