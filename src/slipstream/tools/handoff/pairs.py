"""Paired probes of a watched server: the same prompt with speculation and without, at the same load."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import httpx2

from slipstream.assets.workload.prompts import Prompt
from slipstream.control.realised import MAX_PAIRS, Pair, ratio_of
from slipstream.control.types import Speedup
from slipstream.errors import RemoteError
from slipstream.rpc.client import Exchange, ServerAddress, send_request
from slipstream.tools.handoff.reading import parse_reading

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MAX_DIFFERENCE = 0.25
"""Between the numbers of requests that run along with a pair's two answers, as a share of the larger."""
MAX_BACKGROUND = 64
"""Requests that are sent to the idle side, to give it the busy side's load."""
BACKGROUND_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """One probe's answer."""

    num_tokens: int
    seconds: float
    num_concurrent: int
    """Requests that ran at the same time."""


@dataclass(frozen=True)
class ProbePrompts:
    """What probes send, in turn and without end; greedy, so that both sides give the same text."""

    prompts: Seq[Prompt]
    raw: bool = False

    def __iter__(self) -> Iterator[tuple[int, Prompt]]:
        return cycle(enumerate(self.prompts))


class PairLog:
    """The last pairs, and what they say."""

    def __init__(self) -> None:
        self._pairs: deque[Pair] = deque(maxlen=MAX_PAIRS)
        self.num_dropped = 0
        self.last_drop: str | None = None
        """Why the last pair was dropped; None where none was."""

    def add(self, on: ProbeAnswer, off: ProbeAnswer) -> float | None:
        """Keep a pair; returns tokens a second with speculation over those without.

        None, and the pair is dropped, where the load was not the same or an answer was too short to time.
        """
        if abs(on.num_concurrent - off.num_concurrent) > MAX_DIFFERENCE * max(
            on.num_concurrent, off.num_concurrent
        ):
            self.drop(
                f"{on.num_concurrent} requests ran during one answer and {off.num_concurrent} during the other"
            )
            return None
        if min(on.num_tokens, off.num_tokens) < 2:
            self.drop("an answer had fewer than two tokens")
            return None
        pair = Pair(on.num_tokens, on.seconds, off.seconds / off.num_tokens)
        self._pairs.append(pair)
        return pair.on_tokens / pair.on_s * pair.off_s

    def drop(self, why: str) -> None:
        """Count a pair that could not be made."""
        self.num_dropped += 1
        self.last_drop = why

    def speedup(self) -> Speedup | None:
        """The realised speedup with a 95 % interval; None before there are three pairs."""
        return ratio_of(list(self._pairs))


class ProbeSide:
    """One server that probes measure."""

    def __init__(self, address: ServerAddress, probes: ProbePrompts) -> None:
        self.address = address
        self._probes = probes

    async def answer(
        self, client: httpx2.AsyncClient, number: int, prompt: Prompt, num_concurrent: int
    ) -> ProbeAnswer:
        """One timed answer; `num_concurrent` is the number of requests that run there. Raises `RemoteError`."""
        exchange = await self._ask(client, number, prompt)
        if exchange.error is not None:
            raise RemoteError(f"{self.address.url} does not answer a probe: {exchange.error}")
        if exchange.num_output_tokens is None:
            raise RemoteError(f"{self.address.url} reports no usage, so its tokens cannot be counted")
        return ProbeAnswer(exchange.num_output_tokens, exchange.latency_s, num_concurrent)

    async def num_running(self, client: httpx2.AsyncClient) -> int:
        """Requests that it runs now; raises `RemoteError`."""
        try:
            response = await client.get(self.address.metrics_url)
        except httpx2.HTTPError as error:
            raise RemoteError(f"{self.address.metrics_url}: {error or type(error).__name__}") from None
        reading = parse_reading(response.text)
        return reading.num_running + reading.num_waiting

    @asynccontextmanager
    async def load(self, client: httpx2.AsyncClient, number: int) -> AsyncIterator[None]:
        """Keep `number` requests running there, or as many as begin in time; raises `RemoteError`."""
        workers = [asyncio.create_task(self._work(client, seed)) for seed in range(number)]
        try:
            if workers:
                with suppress(TimeoutError):
                    async with asyncio.timeout(BACKGROUND_TIMEOUT_S):
                        while await self.num_running(client) < number:
                            await asyncio.sleep(_LOOK_EVERY_S)
            yield
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, client: httpx2.AsyncClient, seed: int) -> None:
        for number, prompt in self._probes:
            exchange = await self._ask(client, seed + number, prompt)
            if exchange.error is not None:
                await asyncio.sleep(1.0)

    async def _ask(self, client: httpx2.AsyncClient, number: int, prompt: Prompt) -> Exchange:
        greedy: dict[str, Any] = {"temperature": 0.0, "seed": number}
        return await send_request(client, self.address, number, prompt, self._probes.raw, greedy)
