"""What routing by prefixes finds in real caches: replicas against one engine whose cache is as large as all of theirs.

    python -m benchmarks.deploy.affinity [--replicas 2 3] [--cache-mib 16 64] [--tenants 6] [--conversations 8]

Conversations of several tenants, each tenant with a system prompt of its own: a turn's prompt is all that was said
before and something new. The same turns in the same order go to so many replicas behind the router, and to one replica.
Each says with an answer how many tokens of the prompt it found in its cache. The smaller of the default caches are too
small for all that is said, the larger ones are not. No time is measured, so the machine need not be quiet. Writes
docs/benchmarks/deploy_affinity.json and the page.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from benchmarks.deploy.fleet import ROOM, greedy, relayed
from benchmarks.deploy.local_replicas import LocalReplicas
from benchmarks.deploy.page import FOLDER, finish
from benchmarks.harness.command import add_settings, command
from benchmarks.harness.kept import Kept
from slipstream import RequestOptions
from slipstream.assets import EMBEDDED_TARGET
from slipstream.deploy.relay import Relay
from slipstream.deploy.routed import RoutedEngine
from slipstream.models.tokenizer import load_tokenizer

SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 160, 32, 8
REPORT_S = 10.0
"""How long the replicas' last counts are waited for, which come a moment after the answers."""


@dataclass(frozen=True)
class Traffic:
    """What is asked."""

    tenants: int = 6
    conversations: int = 8
    """Conversations of each tenant."""
    turns: int = 4
    streams: int = 6
    """Answers at once."""
    seed: int = 1


@dataclass(slots=True)
class Conversation:
    """What was said so far, as token ids."""

    tenant: str
    said: list[int]
    turns: list[list[int]]
    is_free: asyncio.Lock = field(default_factory=asyncio.Lock)


def conversations(traffic: Traffic) -> list[Conversation]:
    """All of them, before their first turn."""
    rng = random.Random(traffic.seed)

    def words(num: int) -> list[int]:
        return [rng.randrange(300, 4000) for _ in range(num)]

    systems = {f"tenant {number}": words(SYSTEM_TOKENS) for number in range(traffic.tenants)}
    return [
        Conversation(tenant, list(system), [words(TURN_TOKENS) for _ in range(traffic.turns)])
        for tenant, system in systems.items()
        for _ in range(traffic.conversations)
    ]


def order_of(traffic: Traffic) -> list[int]:
    """The conversation of each turn: mixed, as often as it has turns."""
    order = list(range(traffic.tenants * traffic.conversations)) * traffic.turns
    random.Random(f"order {traffic.seed}").shuffle(order)
    return order


@dataclass(slots=True)
class Found:
    """What one arrangement found."""

    num_slots: int = 0
    """Tokens that all caches hold together."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """By the answers."""
    counted_prompt_tokens: int = 0
    counted_cached_tokens: int = 0
    """By the replicas' reports, as the metrics have them."""
    prompt_blocks: int = 0
    known_blocks: int = 0
    """As the router thought."""
    requests_by_replica: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Return the share of the prompts' tokens that were found."""
        return self.cached_tokens / self.prompt_tokens


async def run_turns(routed: RoutedEngine, traffic: Traffic, found: Found) -> list[list[int]]:
    """Ask all turns in their order, some at once; returns what was said in each conversation."""
    told = conversations(traffic)
    rooms = asyncio.Semaphore(traffic.streams)

    async def ask(conversation: Conversation) -> None:
        try:
            async with conversation.is_free:
                conversation.said += conversation.turns.pop(0)
                options = RequestOptions(tenant=conversation.tenant)
                prompt = list(conversation.said)
                async for update in routed.stream(prompt, greedy(ANSWER_TOKENS), options=options):
                    conversation.said += update.token_ids
                    if update.output is not None:
                        found.prompt_tokens += len(prompt)
                        found.cached_tokens += update.output.num_cached_tokens
        finally:
            rooms.release()

    tasks = []
    for number in order_of(traffic):
        await rooms.acquire()
        tasks.append(asyncio.create_task(ask(told[number])))
    await asyncio.gather(*tasks)
    return [conversation.said for conversation in told]


async def measure(num: int, cache_mib: int, traffic: Traffic) -> tuple[Found, list[list[int]]]:
    """So many replicas with such a cache each."""
    options = ROOM | {"kv_cache_bytes": cache_mib * 2**20}
    replicas = LocalReplicas(num, EMBEDDED_TARGET, engine_options=options)
    await replicas.start()
    try:
        async with relayed(replicas, num) as relay:
            found = Found(num_slots=sum(state.info.num_slots for state in relay.router.fleet))
            said = await run_turns(RoutedEngine(relay, load_tokenizer(EMBEDDED_TARGET)), traffic, found)
            await _wait_for_counts(relay, found)
    finally:
        await replicas.close()
    return found, said


async def _wait_for_counts(relay: Relay, found: Found) -> None:
    router = relay.router
    async with asyncio.timeout(REPORT_S):
        while router.ledger.total.num_prompt_tokens < found.prompt_tokens:
            await asyncio.sleep(0.02)
    found.counted_prompt_tokens = router.ledger.total.num_prompt_tokens
    found.counted_cached_tokens = router.ledger.total.num_cached_tokens
    found.prompt_blocks, found.known_blocks = router.counts.prompt_blocks, router.counts.known_blocks
    found.requests_by_replica = {state.id: state.num_given for state in router.fleet}


def compare(num: int, cache_mib: int, traffic: Traffic) -> dict[str, Any]:
    """So many replicas against one with a cache as large as theirs together."""
    fleet, said = asyncio.run(measure(num, cache_mib, traffic))
    one, said_alone = asyncio.run(measure(1, num * cache_mib, traffic))
    return {
        "replicas": num,
        "cache_mib": cache_mib,
        "requests": traffic.tenants * traffic.conversations * traffic.turns,
        "equal_answers": said == said_alone,
        "fleet": asdict(fleet) | {"share": fleet.share},
        "one_cache": asdict(one) | {"share": one.share},
        "share_of_one_cache": fleet.share / one.share,
    }


def main(arguments: Seq[str] | None = None) -> None:
    """One cell for each number of replicas and size of their caches."""
    parser = command(__doc__, FOLDER / "deploy_affinity.json")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--cache-mib", type=int, nargs="+", default=[16, 64], help="of each replica")
    add_settings(parser, Traffic(), **dict.fromkeys((each.name for each in fields(Traffic)), ""))
    options = parser.parse_args(arguments)
    traffic = Traffic(**{each.name: getattr(options, each.name) for each in fields(Traffic)})
    kept = Kept(options.output, asdict(traffic))
    cells = {}
    for num, cache_mib in itertools.product(options.replicas, options.cache_mib):
        name = f"{num} replicas, {cache_mib} MiB each"
        cells[name] = kept.cell(name, partial(compare, num, cache_mib, traffic))
    finish(kept, {"traffic": asdict(traffic), "cells": cells})


if __name__ == "__main__":
    main()
