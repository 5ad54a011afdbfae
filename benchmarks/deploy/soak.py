"""Streams over replicas that are killed, stopped and drained all the while: every answer must be its lone run.

    python -m benchmarks.deploy.soak [--requests 2000] [--disruptions 40] [--replicas 2 3]

Replicas are processes of this machine with the embedded target, every other one with its draft. A third of the
disruptions is SIGKILL, a third SIGSTOP (and SIGCONT after the router has taken the replica for hung, so that it goes on
talking), a third SIGTERM, at which a replica drains. Each stream is compared with one engine's answer to the same
request: tokens, text, log-probabilities, ends, counts. Writes docs/benchmarks/deploy_soak.json.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.deploy.fleet import relayed
from benchmarks.deploy.local_replicas import LocalReplicas
from benchmarks.deploy.page import FOLDER, finish
from benchmarks.deploy.requests import ROOM, Case, cases, differences
from benchmarks.harness.command import command
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.rounds import tail
from slipstream import RequestOptions
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.deploy.config import RouterConfig
from slipstream.deploy.routed import RoutedEngine
from slipstream.deploy.router import Router
from slipstream.engine.outputs import Update
from slipstream.errors import SlipstreamError
from slipstream.models.tokenizer import load_tokenizer

HANG_TIMEOUT_S = 2.0
NUM_AT_ONCE = 16
KINDS = ("kill", "stop", "drain")


@dataclass(slots=True)
class Ledger:
    """What became of all requests."""

    equal: int = 0
    differing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ends: Counter[int] = field(default_factory=Counter)
    moves: Counter[int] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    """The longest gap of each stream."""
    disruptions: Counter[str] = field(default_factory=Counter)


async def soak(all_cases: list[Case], num_replicas: int, num_disruptions: int, seed: int) -> dict[str, Any]:
    """Serve all cases while replicas are disrupted."""
    replicas = LocalReplicas(
        num_replicas,
        speculative_config={"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3},
        engine_options=ROOM,
        beat_s=0.1,
    )
    router = Router(
        RouterConfig(max_waiting=10_000, hang_timeout_s=HANG_TIMEOUT_S, max_fruitless_attempts=50)
    )
    ledger, started_s = Ledger(), time.monotonic()
    await replicas.start()
    waiting = iter(enumerate(all_cases))
    done = 0

    async def serve_some() -> None:
        nonlocal done
        for number, case in waiting:
            await serve_one(routed, number, case, ledger)
            done += 1
            if done % 200 == 0:
                say(f"  {done} requests, {time.monotonic() - started_s:.0f} s, {router.counts.moved} moved")

    async with relayed(replicas, 0, router) as relay:
        routed = RoutedEngine(relay, load_tokenizer(EMBEDDED_TARGET))
        workers = [asyncio.create_task(serve_some()) for _ in range(NUM_AT_ONCE)]
        disrupting = asyncio.create_task(
            disrupt(
                replicas, router, ledger, num_disruptions, random.Random(seed), lambda: done / len(all_cases)
            )
        )
        await asyncio.gather(*workers)
        disrupting.cancel()
        await asyncio.gather(disrupting, return_exceptions=True)
        faults = router.integrity()
    await replicas.close()
    counted = {"replicas": num_replicas, "requests": len(all_cases), "moved": router.counts.moved}
    return (
        counted
        | told(ledger, len(all_cases))
        | {"router_faults": faults, "wall_s": time.monotonic() - started_s}
    )


def told(ledger: Ledger, num_cases: int) -> dict[str, Any]:
    """What the result says of the ledger."""
    return {
        "equal": ledger.equal,
        "differing": ledger.differing[:20],
        "errors": ledger.errors[:20],
        "lost": num_cases - len(ledger.ends),
        "ended_twice": sum(number > 1 for number in ledger.ends.values()),
        "disruptions": dict(ledger.disruptions),
        "moves_of_a_request": {str(moves): number for moves, number in sorted(ledger.moves.items())},
        "longest_gap_s": tail(ledger.gaps_s),
    }


async def serve_one(routed: RoutedEngine, number: int, case: Case, ledger: Ledger) -> None:
    """One stream, compared with its lone run."""
    updates: list[Update] = []
    last_s, gap_s, moves = time.monotonic(), 0.0, 0

    def on_seam(num_moves: int, _: bool) -> None:
        nonlocal moves
        moves = num_moves

    try:
        async for update in routed.stream(
            case.prompt, case.params, options=RequestOptions(tenant=case.tenant), on_seam=on_seam
        ):
            now_s = time.monotonic()
            last_s, gap_s = now_s, max(gap_s, now_s - last_s)
            updates.append(update)
    except SlipstreamError as error:
        ledger.errors.append(f"request {number}: {error}")
        return
    ledger.ends[number] += 1
    ledger.moves[moves] += 1
    ledger.gaps_s.append(gap_s)
    faults = differences(case, updates)
    if faults:
        ledger.differing.append(f"request {number}, {moves} moves: {', '.join(faults)}")
    else:
        ledger.equal += 1


async def disrupt(
    replicas: LocalReplicas, router: Router, ledger: Ledger, number: int, rng: random.Random, progress: Any
) -> None:
    """Disrupt a replica that has streams under way whenever another share of the requests is done."""
    for which in range(number):
        while progress() < 0.95 * which / number:
            await asyncio.sleep(0.02)
        kind = KINDS[which % len(KINDS)]
        busy: list[str] = []
        while not busy:
            await asyncio.sleep(0.02)
            pids = replicas.pids()
            busy = [name for name in pids if (state := router.fleet.get(name)) is not None and state.requests]
        name = rng.choice(busy)
        pid = replicas.pids()[name]
        say(f"  {kind} {name} with {len(router.fleet[name].requests)} streams")
        ledger.disruptions[kind] += 1
        if kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif kind == "drain":
            os.kill(pid, signal.SIGTERM)
        else:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(HANG_TIMEOUT_S + 1.0)
            os.kill(pid, signal.SIGCONT)


def main() -> None:
    """One cell for each number of replicas."""
    parser = command(__doc__, FOLDER / "deploy_soak.json")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--disruptions", type=int, default=40)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 3])
    options = parser.parse_args()
    kept = Kept(options.output, {"requests": options.requests, "disruptions": options.disruptions})
    all_cases: list[Case] = []
    cells = {}
    for num in options.replicas:

        def measure(num: int = num) -> dict[str, Any]:
            if not all_cases:
                say("  lone runs …")
                all_cases.extend(cases(options.requests))
            return asyncio.run(soak(all_cases, num, options.disruptions, seed=num))

        cells[f"{num} replicas"] = kept.cell(f"{num} replicas", measure)
    finish(kept, {"cells": cells})


if __name__ == "__main__":
    main()
