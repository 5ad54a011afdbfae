"""The time that routing adds to a stream: through router and relay, and from the same replica without them, in pairs.

    python -m benchmarks.deploy.routing [--pairs 200] [--streams 1 8] [--expand 300M --quantization int8]

One replica, a process with a core of its own, makes both streams of a pair from the same prompt, one after the other
and each first in turns, for a tenant that it has not seen: nothing of one helps the other. Directly, a connection sends
the request in the replica's protocol and reads updates; the routed stream has prefix hashes, queue, placement, what is
kept for a move, and the whole output on top. Writes docs/benchmarks/deploy_routing.json and the page.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.deploy.fleet import (
    add_model_arguments,
    greedy,
    model_settings,
    pinned_replicas,
    prompts,
    relayed,
    target,
)
from benchmarks.deploy.page import FOLDER, finish
from benchmarks.harness.command import command
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.rounds import median, turns
from slipstream import RequestOptions
from slipstream.assets import EMBEDDED_TARGET
from slipstream.deploy.connection import ReplicaConnection
from slipstream.deploy.protocol import AttemptUpdate, BeginRequest, ReplicaMessage
from slipstream.deploy.routed import RoutedEngine
from slipstream.models.tokenizer import load_tokenizer
from slipstream.serve.process.answers import AnswerUpdate, params_out

NUM_TOKENS = 32
PROMPT_TOKENS = 96
WARM_PAIRS = 5
BLOCK = 10
"""Rounds that are kept together where the run is stopped."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One stream."""

    token_ids: list[int]
    first_s: float
    """From the request to the first token."""
    total_s: float


class DirectClient:
    """Requests over a connection, without a router."""

    def __init__(self, connection: ReplicaConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count()
        self._streams: dict[str, asyncio.Queue[AnswerUpdate]] = {}
        connection.follow(self._heard, lambda: None)

    def _heard(self, message: ReplicaMessage) -> None:
        if isinstance(message, AttemptUpdate):
            self._streams[message.id].put_nowait(message.update)

    async def stream(self, prompt: Seq[int], tenant: str) -> Timed:
        """One answer, timed."""
        name = f"direct-{next(self._numbers)}"
        updates = self._streams[name] = asyncio.Queue()
        started_s, first_s, token_ids = time.perf_counter(), 0.0, list[int]()
        params = params_out(greedy(NUM_TOKENS))
        self._connection.send(BeginRequest(name, 1, list(prompt), params, RequestOptions(tenant=tenant)))
        while True:
            update = await updates.get()
            first_s = first_s or time.perf_counter() - started_s
            token_ids += update.token_ids
            if update.end is not None:
                del self._streams[name]
                return Timed(token_ids, first_s, time.perf_counter() - started_s)


async def routed_stream(routed: RoutedEngine, prompt: Seq[int], tenant: str) -> Timed:
    """One answer through router and relay, timed."""
    started_s, first_s, token_ids = time.perf_counter(), 0.0, list[int]()
    async for update in routed.stream(prompt, greedy(NUM_TOKENS), options=RequestOptions(tenant=tenant)):
        first_s = first_s or time.perf_counter() - started_s
        token_ids += update.token_ids
    return Timed(token_ids, first_s, time.perf_counter() - started_s)


async def measure(
    num_streams: int, num_pairs: int, model: str, options: dict[str, Any], kept: Kept
) -> dict[str, Any]:
    """So many pairs, so many streams at once; each block of rounds is kept as it ends."""
    num_rounds = max(num_pairs // num_streams, 2)
    blocks = [range(first, min(first + BLOCK, num_rounds)) for first in range(0, num_rounds, BLOCK)]
    names = {block: f"{num_streams} streams, rounds {block[0] + 1} to {block[-1] + 1}" for block in blocks}
    left = [block for block in blocks if not kept.has(names[block])]
    async with pinned_replicas(1, model, options) as replicas, relayed(replicas, 1) as relay:
        routed = RoutedEngine(relay, load_tokenizer(EMBEDDED_TARGET))
        [address] = await replicas.discover()
        connection = await ReplicaConnection.open(*address, "direct", replicas.secret)
        direct = DirectClient(connection)
        for block in [range(-WARM_PAIRS, 0), *left] if left else []:
            pairs: list[tuple[Timed, Timed]] = []
            for number in block:
                pairs += await one_round(direct, routed, num_streams, number)
            if block in names:
                kept.put(names[block], [[asdict(one) for one in pair] for pair in pairs])
                say(f"  {names[block]} of {num_rounds}")
        await connection.close()
    stored = [pair for block in blocks for pair in kept.get(names[block])]
    return compared([(Timed(**direct), Timed(**routed)) for direct, routed in stored])


async def one_round(
    direct: DirectClient, routed: RoutedEngine, num_streams: int, number: int
) -> list[tuple[Timed, Timed]]:
    """So many pairs at once: directly and routed, each of the two first in turns."""
    asked = prompts(num_streams, PROMPT_TOKENS, random.Random(f"{num_streams} {number}"))

    async def run(is_routed: bool) -> list[Timed]:
        tenants = [f"{is_routed} {number} {index}" for index in range(num_streams)]
        if is_routed:
            streams = [routed_stream(routed, *each) for each in zip(asked, tenants, strict=True)]
        else:
            streams = [direct.stream(*each) for each in zip(asked, tenants, strict=True)]
        return await asyncio.gather(*streams)

    found = {is_routed: await run(is_routed) for is_routed in turns((False, True), number)}
    return list(zip(found[False], found[True], strict=True))


def compared(pairs: Seq[tuple[Timed, Timed]]) -> dict[str, Any]:
    """What the routed stream of each pair took more, in milliseconds."""
    gaps = [[(one.total_s - one.first_s) / (len(one.token_ids) - 1) for one in pair] for pair in pairs]
    return {
        "pairs": len(pairs),
        "equal": sum(direct.token_ids == routed.token_ids for direct, routed in pairs),
        "direct_first_token_ms": median([1000 * direct.first_s for direct, _ in pairs]),
        "direct_token_ms": median([1000 * direct for direct, _ in gaps]),
        "first_token_added_ms": median(
            [1000 * (routed.first_s - direct.first_s) for direct, routed in pairs]
        ),
        "token_added_ms": median([1000 * (routed - direct) for direct, routed in gaps]),
        "stream_added_ms": median([1000 * (routed.total_s - direct.total_s) for direct, routed in pairs]),
    }


def main() -> None:
    """One cell for each number of streams."""
    parser = command(__doc__, FOLDER / "deploy_routing.json")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    add_model_arguments(parser)
    options = parser.parse_args()
    asked, engine = model_settings(options)
    settings = {"pairs": options.pairs, **asked}
    kept = Kept(options.output, settings)
    with target(options.expand) as model:
        cells = {
            str(num): kept.cell(
                f"{num} streams",
                lambda num=num: asyncio.run(measure(num, options.pairs, model, engine, kept)),  # type: ignore[misc]
            )
            for num in options.streams
        }
    finish(kept, {**settings, "cells": cells})


if __name__ == "__main__":
    main()
