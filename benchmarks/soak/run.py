"""The soak itself: so many clients, so many requests, one server."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import psutil

from benchmarks.harness.processes import Server
from benchmarks.soak.cases import SCHEMAS, Answered, Rules, lone_engine, make_cases
from benchmarks.soak.client import (
    Received,
    ask_refused,
    ask_streamed,
    ask_whole,
    leave_while_waiting,
)
from benchmarks.soak.comparison import difference, prefix_fault
from benchmarks.soak.ledger import BROKEN, WHOLE, Ledger, Samples, check, growth, samples, told
from benchmarks.soak.refusals import REFUSALS

TIMEOUT_S = 600.0
IDLE_S = 30.0
"""For the server to notice that its clients have left."""
_NUM_STAGES = 10
_MIX = {"streamed": 0.42, "whole": 0.33, "leave a stream": 0.1, "leave while waiting": 0.04, "refused": 0.11}


@dataclass(frozen=True, slots=True)
class Plan:
    """Number of requests, clients and the server of a soak."""

    num_requests: int = 10_000
    num_clients: int = 32
    num_cases: int = 600
    max_tokens: int = 24
    """The longest answer."""
    seed: int = 0
    spec: str | None = None
    """The server's drafter in short; None: the embedded draft."""


def soak(plan: Plan) -> dict[str, Any]:
    """Everything that was found out, as JSON; `passed` says whether every demand was met."""
    command = [sys.executable, "-m", "benchmarks.soak.server", *(["--spec", plan.spec] if plan.spec else [])]
    with TemporaryDirectory() as folder, Server(command, Path(folder) / "log") as server:
        with_schemas = takes_schemas(server.url)
        models = httpx2.get(f"{server.url}/v1/models", timeout=TIMEOUT_S).json()["data"]
        rules = Rules(plan.max_tokens, models[0]["max_model_len"], with_schemas)
        cases = make_cases(plan.num_cases, plan.seed, lone_engine(), rules)
        found = asyncio.run(_Soak(plan, cases, server.url, psutil.Process(server.process.pid)).run())
        if not server.stop():
            raise RuntimeError(f"the server did not end when it was asked to:\n{server.log_text()[-2000:]}")
    return found | {"json_schemas": with_schemas}


def takes_schemas(url: str) -> bool:
    """Whether the server constrains answers to a JSON schema."""
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[0]}},
    }
    response = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
    if response.status_code == 200:
        return True
    code = response.json()["error"]["code"]
    if response.status_code != 400 or code != "unsupported_parameter":
        raise RuntimeError(f"a JSON schema is answered with {response.status_code}: {response.text[:200]}")
    return False


class _Soak:
    """One run. All requests are drawn beforehand, so that the seed decides them."""

    def __init__(self, plan: Plan, cases: list[Answered], url: str, process: psutil.Process) -> None:
        self._plan = plan
        self._cases = cases
        self._url = url
        self._process = process
        self._rng = random.Random(plan.seed + 1)
        self._refusals = cycle(REFUSALS)
        self._ledger = Ledger()
        self._rss: list[int] = []
        self._stages: list[Samples] = []

    async def run(self) -> dict[str, Any]:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx2.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, limits=limits) as client:
            before = samples((await client.get("/metrics")).text)
            started_s = time.perf_counter()
            half = self._plan.num_requests // 2
            await self._requests(client, range(half))
            halfway = await self._idle_books(client)
            await self._requests(client, range(half, self._plan.num_requests))
            wall_s = time.perf_counter() - started_s
            books = await self._idle_books(client)
            after = samples((await client.get("/metrics")).text)
        grown = growth(before, after)
        checks = check(self._ledger, before, after, halfway, books)
        ledger = self._ledger
        return {
            "passed": all(demand["met"] for demand in checks.values()),
            "num_requests": ledger.total,
            "num_clients": self._plan.num_clients,
            "num_cases": len(self._cases),
            "max_tokens": self._plan.max_tokens,
            "seed": self._plan.seed,
            "spec": self._plan.spec or "the default",
            "wall_s": round(wall_s, 1),
            "num_output_tokens": int(grown["generation_tokens_total"]),
            "num_preemptions": int(grown["num_preemptions_total"]),
            "delivered": dict(sorted(ledger.num_sent.items())),
            "statuses": {str(status): n for status, n in sorted(ledger.statuses.items())},
            "refusals": dict(sorted(ledger.refusals.items())),
            "checks": checks,
            "acceptance_by_tenth": self._acceptance_by_tenth(before),
            "rss_bytes_by_tenth": self._rss,
            "lost": told(ledger.lost),
            "wrong": told(ledger.wrong),
            "misshapen": told(ledger.misshapen),
        }

    async def _requests(self, client: httpx2.AsyncClient, numbers: range) -> None:
        waiting = iter(numbers)
        stage = max(1, self._plan.num_requests // _NUM_STAGES)

        async def work(rng: random.Random) -> None:
            for number in waiting:
                await self._one(client, rng)
                if (number + 1) % stage == 0:
                    self._stages.append(samples((await client.get("/metrics")).text))
                    print(f"{number + 1:,} requests, {self._ledger.faults} faults", file=sys.stderr)
                    self._rss.append(self._process.memory_info().rss)

        clients = (work(random.Random(self._rng.random())) for _ in range(self._plan.num_clients))
        await asyncio.gather(*clients)

    async def _one(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        """Send one request and count it."""
        [how] = rng.choices(list(_MIX), list(_MIX.values()))
        self._ledger.num_sent[how] += 1
        if how == "refused":
            refusal = next(self._refusals)
            received = await ask_refused(client, refusal)
            self._enter_refusal(refusal.name, received)
            return
        expected = rng.choice(self._cases)
        leaves = how.startswith("leave")
        extra = {"task": BROKEN if leaves else WHOLE, "return_token_ids": rng.random() < 0.7 or leaves}
        if how == "streamed":
            received = await ask_streamed(client, expected.case, extra)
        elif how == "whole":
            received = await ask_whole(client, expected.case, extra)
        elif how == "leave a stream":
            received = await ask_streamed(client, expected.case, extra, leave_after=rng.randint(1, 4))
        else:
            received = await leave_while_waiting(client, expected.case, extra, rng.uniform(0.001, 0.2))
        if leaves:
            self._enter_broken(how, expected, received)
        else:
            self._enter_whole(how, expected, received, bool(extra["return_token_ids"]))

    def _enter_refusal(self, name: str, received: Received) -> None:
        ledger = self._ledger
        ledger.refusals[name] += 1
        if received.status is None:
            ledger.lost.append(f"{name}: {received.problem}")
            return
        ledger.statuses[received.status] += 1
        if received.problem is not None:
            ledger.misshapen.append(f"{name}: {received.problem}")

    def _enter_whole(self, how: str, expected: Answered, received: Received, with_token_ids: bool) -> None:
        ledger = self._ledger
        ledger.num_answers[WHOLE] += expected.case.num_answers
        if received.status is not None:
            ledger.statuses[received.status] += 1
        where = f"{how}, {json.dumps(expected.case.body, ensure_ascii=False)}"
        if received.problem is not None or not received.complete:
            problem = received.problem or "the stream ended without [DONE]"
            ledger.lost.append(f"{problem} ({where})")
            return
        found = difference(expected, received, with_token_ids)
        if found is not None:
            ledger.wrong.append(f"{found} ({where})")
        counted = (
            received.num_tokens if with_token_ids else (received.usage or {}).get("completion_tokens", 0)
        )
        ledger.num_tokens += counted
        ledger.num_prompt_tokens += expected.case.num_prompt_tokens
        ledger.most_prompt_tokens += expected.case.num_prompt_tokens
        ledger.ends.update(str(choice.finish_reason) for choice in received.choices.values())

    def _enter_broken(self, how: str, expected: Answered, received: Received) -> None:
        ledger = self._ledger
        ledger.num_answers[BROKEN] += expected.case.num_answers
        ledger.num_broken_tokens += received.num_tokens
        ledger.most_broken_tokens += expected.num_output_tokens
        ledger.most_prompt_tokens += expected.case.num_prompt_tokens
        if received.problem is not None:
            ledger.lost.append(f"{received.problem} ({how})")
        fault = prefix_fault(expected, received)
        if fault is not None:
            ledger.wrong.append(f"{fault} ({how}, {json.dumps(expected.case.body, ensure_ascii=False)})")

    async def _idle_books(self, client: httpx2.AsyncClient) -> dict[str, Any]:
        """The engine's state once it is idle, or the last one if it does not become idle."""
        end_s = time.monotonic() + IDLE_S
        while True:
            books: dict[str, Any] = (await client.get("/integrity")).json()
            if not books["has_unfinished"] or time.monotonic() > end_s:
                return books
            await asyncio.sleep(0.05)

    def _acceptance_by_tenth(self, before: Samples) -> list[float | None]:
        """α of each part of the run: it must not fall with time."""
        found: list[float | None] = []
        drafted_name, accepted_name = (
            f"spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")
        )
        readings = sorted([before, *self._stages], key=lambda reading: reading[drafted_name])
        for first, last in pairwise(readings):
            drafted = last[drafted_name] - first[drafted_name]
            accepted = last[accepted_name] - first[accepted_name]
            found.append(round(accepted / drafted, 3) if drafted else None)
        return found
