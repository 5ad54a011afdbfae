"""Two replicas against one: tokens a second of the same requests, in turns.

    python -m benchmarks.deploy.scaling [--rounds 10] [--expand 300M --quantization int8]

Two replicas, processes with a core each, are there all the time; one front knows one of them, another knows both. A
round sends the same number of requests through the one and then through the other, or the other way round, enough of
them at once to fill both. Prompts are new in each round, so nothing is cached. The front has a core of its own where
the machine has a third one. Writes docs/benchmarks/deploy_scaling.json and the page.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from benchmarks.deploy.fleet import (
    ROOM,
    add_model_arguments,
    greedy,
    model_settings,
    pinned_replicas,
    prompts,
    relayed,
    target,
)
from benchmarks.deploy.local_replicas import LocalReplicas
from benchmarks.deploy.page import FOLDER, write_page
from benchmarks.harness.command import command
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.rounds import median, turns
from slipstream import RequestOptions
from slipstream.assets import EMBEDDED_TARGET
from slipstream.deploy.relay import Address
from slipstream.deploy.routed import RoutedEngine
from slipstream.models.tokenizer import load_tokenizer

NUM_TOKENS = 64
PROMPT_TOKENS = 64
NUM_REQUESTS = 6 * ROOM["max_num_seqs"]


async def tokens_per_s(routed: RoutedEngine, asked: Seq[Seq[int]], tenant: str) -> float:
    """Serve all requests, as many at once as two replicas step, and so on until the last one has ended."""
    waiting = iter(asked)
    num_tokens = 0

    async def serve_some() -> None:
        nonlocal num_tokens
        for prompt in waiting:
            async for update in routed.stream(
                prompt, greedy(NUM_TOKENS), options=RequestOptions(tenant=tenant)
            ):
                num_tokens += len(update.token_ids)

    started_s = time.perf_counter()
    await asyncio.gather(*(serve_some() for _ in range(2 * ROOM["max_num_seqs"])))
    return num_tokens / (time.perf_counter() - started_s)


async def first_of(replicas: LocalReplicas) -> list[Address]:
    """The address of the first replica."""
    return (await replicas.discover())[:1]


async def measure(num_rounds: int, model: str, options: dict[str, Any], kept: Kept) -> dict[str, Any]:
    """All rounds, each of which is kept as it ends; what came out."""
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    left = [round_ for round_ in range(num_rounds) if not kept.has(f"round {round_ + 1}")]
    async with (
        pinned_replicas(2, model, options) as replicas,
        relayed(replicas, 2) as both,
        relayed(replicas, 1, discover=partial(first_of, replicas)) as alone,
    ):
        for round_ in [-1, *left] if left else []:
            speeds = {}
            for num in turns((1, 2), round_):
                asked = prompts(NUM_REQUESTS, PROMPT_TOKENS, random.Random(f"{num} {round_}"))
                routed = RoutedEngine(alone if num == 1 else both, tokenizer)
                speeds[num] = await tokens_per_s(routed, asked, f"{num} {round_}")
            if round_ >= 0:
                kept.put(f"round {round_ + 1}", [speeds[1], speeds[2]])
                say(f"  round {round_ + 1} of {num_rounds}: {speeds[1]:.0f} and {speeds[2]:.0f} tokens/s")
    rounds = [kept.get(f"round {round_ + 1}") for round_ in range(num_rounds)]
    return {
        "rounds": num_rounds,
        "requests": NUM_REQUESTS,
        "front_has_a_core": len(os.sched_getaffinity(0)) > 2,
        "one_tokens_per_s": median([one for one, _ in rounds]),
        "two_tokens_per_s": median([two for _, two in rounds]),
        "two_over_one": median([two / one for one, two in rounds]),
    }


def main() -> None:
    """One cell."""
    parser = command(__doc__, FOLDER / "deploy_scaling.json")
    parser.add_argument("--rounds", type=int, default=10)
    add_model_arguments(parser)
    options = parser.parse_args()
    asked, engine = model_settings(options)
    settings = {"rounds": options.rounds, **asked}
    kept = Kept(options.output, settings)
    with target(options.expand) as model:
        cell = kept.cell("two over one", lambda: asyncio.run(measure(options.rounds, model, engine, kept)))
    kept.finish({**settings, "cell": cell})
    say(f"two over one: {cell}")
    if options.output.parent == FOLDER:
        write_page()


if __name__ == "__main__":
    main()
