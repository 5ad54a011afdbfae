"""What learning costs those who wait: latency at half load, in turns with a server that does not learn."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil

from benchmarks.harness.kept import say
from benchmarks.harness.processes import cpu_s
from benchmarks.harness.rounds import quartiles, turns
from benchmarks.learn_serving.drafts import make_base
from benchmarks.learn_serving.server import LearningServer, ServerOptions
from benchmarks.learn_serving.traffic import answer, answer_all, asked, open_client

NUM_TOKENS = 32
FULL_AT_ONCE = 48
"""More than the places of the server."""
CAPACITY_S = 10.0
WORKER = {"min_records": 1}
"""It always has something to learn: the most that it can cost."""


def latency(place: Path, rounds: int, window_s: float, seed: int) -> dict[str, Any]:
    """The whole part. Both servers are there; the one whose turn it is not gets no request, and its learner no time."""
    base = make_base(place / "base")
    learning = ServerOptions(base, str(place / "learning/learn"), worker=WORKER)
    with (
        LearningServer(learning, place / "learning") as on,
        LearningServer(ServerOptions(base), place / "off") as off,
    ):
        learner = on.wait_for_learner()
        with _Stopped(learner):
            rate = asyncio.run(_capacity(off))
            # Records to learn from, and both servers' first passes.
            warm_up = (
                asyncio.run(_window(on, rate / 2, 5.0, seed)),
                asyncio.run(_window(off, rate / 2, 5.0, seed)),
            )
        assert all(warm_up)
        say(f"  {rate:.1f} requests a second at full load; {rate / 2:.1f} from here on")
        cells = [_round(on, off, learner, rate / 2, window_s, seed + number) for number in range(rounds)]
        full = asyncio.run(_full(on, learner))
    return {
        "full_rate": round(rate, 2),
        "half_rate": round(rate / 2, 2),
        "window_s": window_s,
        "rounds": cells,
        "full_load": full,
        **_together(cells),
    }


class _Stopped:
    """A process that gets no time."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process

    def __enter__(self) -> None:
        self._process.suspend()

    def __exit__(self, *_: object) -> None:
        self._process.resume()


async def _capacity(server: LearningServer) -> float:
    """Answers a second with all places taken."""
    num, began_s = 0, time.monotonic()

    def count(_: object) -> None:
        nonlocal num
        num += 1

    async with open_client(server.url) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(CAPACITY_S):
                await answer_all(client, (asked(n, NUM_TOKENS) for n in range(10**6)), FULL_AT_ONCE, count)
    return num / (time.monotonic() - began_s)


async def _window(server: LearningServer, rate: float, seconds: float, seed: int) -> list[float]:
    """Latencies of requests that come at random instants, whether or not others have ended."""
    rng = random.Random(seed)
    found: list[float] = []

    async def one(client: httpx2.AsyncClient, number: int) -> None:
        found.append((await answer(client, asked(number, NUM_TOKENS))).latency_s)

    async with open_client(server.url) as client, asyncio.TaskGroup() as group:
        due_s = time.monotonic()
        ends_s = due_s + seconds
        while (due_s := due_s + rng.expovariate(rate)) < ends_s:
            await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
            group.create_task(one(client, rng.randrange(10**6)))
    return found


def _round(
    on: LearningServer, off: LearningServer, learner: psutil.Process, rate: float, seconds: float, seed: int
) -> dict[str, Any]:
    """The same requests at the same instants, with learning and without, in an order that changes."""
    cell: dict[str, Any] = {}
    for way in turns(("off", "on"), seed):
        if way == "off":
            with _Stopped(learner):
                found = asyncio.run(_window(off, rate, seconds, seed))
        else:
            before_s = cpu_s(learner)
            found = asyncio.run(_window(on, rate, seconds, seed))
            cell["learner_cpu_s"] = round(cpu_s(learner) - before_s, 2)
        cell[way] = [round(one, 5) for one in found]
    cell["p95"] = {way: round(float(np.quantile(cell[way], 0.95)), 4) for way in ("on", "off")}
    cell["ratio"] = round(cell["p95"]["on"] / cell["p95"]["off"], 4)
    say(f"  p95 {cell['p95']}, {cell['ratio']:.3f}; learner {cell['learner_cpu_s']} s of a core")
    return cell


async def _full(server: LearningServer, learner: psutil.Process) -> dict[str, float]:
    """What the learner takes while all places are taken; its first two seconds, until it has seen that, apart."""
    num, marks = 0, [(0.0, 0.0)]
    began_s, before_s = time.monotonic(), cpu_s(learner)

    def count(_: object) -> None:
        nonlocal num
        num += 1
        marks.append((time.monotonic() - began_s, cpu_s(learner) - before_s))

    async with open_client(server.url) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(CAPACITY_S):
                await answer_all(client, (asked(n, NUM_TOKENS) for n in range(10**6)), FULL_AT_ONCE, count)
    first = max((cpu for at, cpu in marks if at <= 2.0), default=0.0)
    return {
        "seconds": round(marks[-1][0], 1),
        "rate": round(num / marks[-1][0], 2),
        "learner_cpu_s_first_2_s": round(first, 2),
        "learner_cpu_s_after": round(marks[-1][1] - first, 2),
    }


def _together(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The rounds' ratios, and the ratio of all requests' 95th percentiles."""
    ratios = [cell["ratio"] for cell in cells]
    pooled = {
        way: float(np.quantile(np.concatenate([cell[way] for cell in cells]), 0.95)) for way in ("on", "off")
    }
    low, middle, high = quartiles(ratios)
    return {
        "requests": sum(len(cell["on"]) for cell in cells),
        "p95_s": {way: round(value, 4) for way, value in pooled.items()},
        "p95_ratio": round(pooled["on"] / pooled["off"], 4),
        "ratio_median": round(middle, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
    }
