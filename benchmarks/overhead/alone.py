"""The engine alone, in a process of its own: the same closed loops as the client's, without a server between.

    python -m benchmarks.overhead.alone --spec draft --threads 1

A round's chats become prompts within it, as they do in the server. Rounds come as JSON lines on standard input, what
came of them goes to standard output.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from benchmarks.harness.command import command
from slipstream import AsyncEngine, SamplingParams
from slipstream.cli.flags.speculation import SpeculationFlags, speculative_config
from slipstream.cli.serve import PROBE_SHARE
from slipstream.engine.factory import make_engine
from slipstream.serve.config import ServeConfig


async def closed_loop(engine: AsyncEngine, bodies: Seq[dict[str, Any]], streams: int) -> dict[str, Any]:
    """Ask all, `streams` at any time, and read every text as it grows."""
    texts = [""] * len(bodies)
    num_tokens = 0
    gaps_s: list[float] = []
    waiting = iter(range(len(bodies)))

    async def one_stream() -> None:
        nonlocal num_tokens
        for number in waiting:
            asked = dict(bodies[number])
            prompt = engine.encode_chat(asked.pop("messages"))
            last_s = None
            async for update in engine.stream(prompt, SamplingParams.from_mapping(asked)):
                now_s = time.perf_counter()
                if last_s is not None:
                    gaps_s.append(now_s - last_s)
                last_s = now_s
                texts[number] += update.text
                num_tokens += len(update.token_ids)

    started_s = time.perf_counter()
    await asyncio.gather(*(one_stream() for _ in range(streams)))
    seconds = time.perf_counter() - started_s
    return {"seconds": seconds, "num_tokens": num_tokens, "texts": texts, "gaps_s": gaps_s}


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--spec", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-cache-bytes", type=int, required=True)
    parser.add_argument("--quantization")
    options = parser.parse_args()
    speculative = speculative_config(SpeculationFlags(spec=options.spec), options.model)
    if speculative.probe_share is None:  # as `slipstream serve` has it
        speculative = replace(speculative, probe_share=PROBE_SHARE)
    sizes: dict[str, Any] = {"num_threads": options.threads, "kv_cache_bytes": options.kv_cache_bytes}
    if options.quantization is not None:
        sizes["quantization"] = options.quantization
    engine = AsyncEngine(
        engine=make_engine(options.model, speculative, sizes),
        stream_interval_s=ServeConfig().stream_interval_s,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asyncio.run(closed_loop(engine, asked["bodies"], asked["streams"]))), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
