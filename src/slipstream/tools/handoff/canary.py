"""The off side as a canary: the one server runs without speculation for a while, then with it again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from itertools import islice

import httpx2

from slipstream.assets.workload.prompts import Prompt
from slipstream.errors import RemoteError
from slipstream.rpc.client import connect
from slipstream.tools.handoff.pairs import PairLog, ProbeAnswer, ProbePrompts, ProbeSide
from slipstream.tools.handoff.watch import Watch

logger = logging.getLogger(__name__)

NUM_WARM_UP = 2
"""Probes after a restart that are not counted: the first requests pay for what is made at first use."""


class AlternatingCanary:
    """Alternates one server between the two sides: vLLM cannot switch speculation without a restart.

    Each restart is an outage as long as the model takes to load. The first time is before any traffic; repeating it
    is the operator's choice.
    """

    def __init__(
        self,
        side: ProbeSide,
        restart: Callable[[bool], Awaitable[None]],
        watch: Watch,
        prompts: ProbePrompts,
        num_pairs: int,
        every_s: float | None,
    ) -> None:
        """`restart` restarts the server, with speculation or without, and returns when it is healthy."""
        self.log = PairLog()
        self._side, self._restart, self._watch = side, restart, watch
        self._prompts: Seq[tuple[int, Prompt]] = list(islice(prompts, num_pairs))
        self._every_s = every_s

    async def run(self) -> None:
        """Alternate every `every_s` seconds until cancelled; never again where it is None."""
        while self._every_s is not None:
            await asyncio.sleep(self._every_s)
            await self.alternate()

    async def alternate(self, *, restart_off: bool = True) -> None:
        """One round: without speculation, then with it; the same prompts in both. Ends with speculation on.

        Without `restart_off` the server runs without speculation already. A failed probe drops its pair.
        Raises `RemoteError` where the server does not come back.
        """
        if restart_off:
            logger.info("canary: the server restarts without speculation, for %d probes", len(self._prompts))
            await self._restart(False)
        off = await self.probe()
        logger.info("canary: the server restarts with speculation, for the same probes")
        await self._restart(True)
        self.compare(await self.probe(), off)

    async def probe(self) -> list[ProbeAnswer | str]:
        """The answers of one side, one after the other, along with the clients' requests; an error where one failed."""
        async with connect(self._side.address) as client:
            for number, prompt in self._prompts[:NUM_WARM_UP]:
                await self._one(client, number, prompt)
            return [await self._one(client, number, prompt) for number, prompt in self._prompts]

    async def _one(self, client: httpx2.AsyncClient, number: int, prompt: Prompt) -> ProbeAnswer | str:
        try:
            num_concurrent = await self._side.num_running(client)
            return await self._side.answer(client, number, prompt, num_concurrent)
        except RemoteError as error:  # a probe is not worth the server
            logger.warning("a paired probe failed: %s", error)
            return str(error)

    def compare(self, on: Seq[ProbeAnswer | str], off: Seq[ProbeAnswer | str]) -> None:
        """Make pairs of the answers to the same prompts."""
        for with_drafts, without in zip(on, off, strict=True):
            if isinstance(with_drafts, str) or isinstance(without, str):
                self.log.drop(next(each for each in (with_drafts, without) if isinstance(each, str)))
                continue
            speedup = self.log.add(with_drafts, without)
            if speedup is not None:
                self._watch.on_pair(speedup)
