"""The off side as a second instance: a server without speculation next to the watched one."""

from __future__ import annotations

import asyncio
import logging
import random

import httpx2

from slipstream.errors import RemoteError
from slipstream.rpc.client import connect
from slipstream.tools.handoff.pairs import MAX_BACKGROUND, PairLog, ProbeAnswer, ProbePrompts, ProbeSide
from slipstream.tools.handoff.watch import Watch

logger = logging.getLogger(__name__)


class InstanceProbes:
    """Sends both instances the same prompt every now and then, one after the other, in random order."""

    def __init__(
        self,
        on: ProbeSide,
        off: ProbeSide,
        watch: Watch,
        prompts: ProbePrompts,
        every_s: float,
        seed: int = 0,
    ) -> None:
        self.log = PairLog()
        self._on, self._off, self._watch = on, off, watch
        self._prompts = iter(prompts)
        self._every_s = every_s
        self._rng = random.Random(seed)

    async def run(self) -> None:
        """Probe until cancelled; a probe that fails is dropped."""
        async with connect(self._on.address) as client:
            while True:
                await asyncio.sleep(self._every_s)
                await self.pair(client)

    async def pair(self, client: httpx2.AsyncClient) -> None:
        """One pair. The off side runs requests of ours with its probe, as many as the on side has of its clients."""
        number, prompt = next(self._prompts)

        async def ask_off(num_concurrent: int) -> ProbeAnswer:
            others = await self._off.num_running(client)
            async with self._off.load(client, max(num_concurrent - others, 0)):
                beside_there = await self._off.num_running(client)  # as many as came about
                return await self._off.answer(client, number, prompt, beside_there)

        off: ProbeAnswer | None = None
        try:
            num_concurrent = await self._on.num_running(client)
            if num_concurrent > MAX_BACKGROUND:
                self.log.drop(
                    f"the server has {num_concurrent} requests; probes give the off side at most {MAX_BACKGROUND}"
                )
                return
            if self._rng.random() < 0.5:
                off = await ask_off(num_concurrent)
                num_concurrent = await self._on.num_running(
                    client
                )  # it may have changed meanwhile: then the pair is dropped
            on = await self._on.answer(client, number, prompt, num_concurrent)
            off = off or await ask_off(num_concurrent)
        except RemoteError as error:
            self.log.drop(str(error))
            logger.warning("a paired probe failed: %s", error)
            return
        speedup = self.log.add(on, off)
        if speedup is not None:
            self._watch.on_pair(speedup)
