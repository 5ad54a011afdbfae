"""A load on an OpenAI-compatible server: a closed loop of clients or arrivals at a rate, limited in time or number."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from slipstream.assets.workload.prompts import Prompt, task_names
from slipstream.assets.workload.reading import Workload
from slipstream.core.meter import meter
from slipstream.core.metrics.request import RequestMetrics
from slipstream.errors import RemoteError, RequestError
from slipstream.profiling.provenance import provenance
from slipstream.rpc.client import Exchange, ServerAddress, connect, send_request
from slipstream.sampling.noise import derive_seed
from slipstream.tools.bench.result import (
    SCHEMA,
    Arrivals,
    LoadRequest,
    LoadResult,
    PooledAcceptance,
    WorkloadSummary,
)
from slipstream.tools.bench.server.counters import Counters
from slipstream.tools.bench.server.remote import CounterWindow, must_answer, summarised
from slipstream.tools.bench.statistics import percentiles

_SHOWN_EVERY_S = 0.25
"""Interval at which the progress is drawn."""
ALL = "all"
"""Key of all tasks together."""


@dataclass(frozen=True)
class LoadPlan:
    """A load: server, prompts, arrivals and limits."""

    server: ServerAddress
    workload: str
    """Source of the prompts."""
    prompts: Seq[Prompt]
    """Sent in this order, and again from the first after the last."""
    arrivals: Arrivals
    num_requests: int | None = None
    duration_s: float | None = None
    """No request is sent later; running requests are completed."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sent unchanged, except that a request's seed is derived from its `seed`."""
    stream: bool = True
    raw: bool = False
    """Plain prompts go to `/completions` instead of the chat."""
    send_task: bool = False
    """Send each prompt's task as `task`, which Slipstream knows."""
    warm_up: bool = True
    """Send one prompt before the load, which is not counted."""

    def __post_init__(self) -> None:
        if (self.arrivals.concurrency is None) == (self.arrivals.rate_per_s is None):
            raise RequestError("give either a concurrency or a rate")
        if self.num_requests is None and self.duration_s is None:
            raise RequestError("give a number of requests or a duration, otherwise the load does not end")


def first_turns(workload: Workload, tasks: Seq[str], max_tokens: int) -> list[Prompt]:
    """The first turn of every question of `tasks` (empty: all), tasks interleaved.

    Raises `RequestError` for a task that the workload does not have.
    """
    by_task: dict[str, list[Prompt]] = {}
    for question in workload.questions:
        prompt = Prompt(question.task, question.where, max_tokens, question.text, question.messages)
        by_task.setdefault(question.task, []).append(prompt)
    for task in tasks:
        if task not in by_task:
            raise RequestError(f"{workload.source} has no task {task!r}; it has {', '.join(by_task)}")
    chosen = [by_task[task] for task in tasks or by_task]
    return [prompt for prompts in zip_longest(*chosen) for prompt in prompts if prompt is not None]


def run(plan: LoadPlan) -> LoadResult:
    """Load the server and report. Ctrl-C ends it early, with a report of the requests finished by then.

    Raises `RemoteError` when the server does not answer the warm-up, or no request reached it.
    """
    if plan.warm_up:
        prompt = plan.prompts[0]
        must_answer(plan.server, prompt, plan.raw, _body(plan, prompt, 0), plan.stream)
    window = CounterWindow(plan.server)
    load = LoadRun(plan)
    complete = True
    try:
        asyncio.run(load.run())
    except KeyboardInterrupt:
        complete = False
    grown, metrics = window.grown()
    if load.exchanges and all(exchange.status is None for exchange in load.exchanges):
        raise RemoteError(f"{plan.server.url} does not answer: {load.exchanges[0].error}")
    return load.result(complete, grown, metrics)


def _body(plan: LoadPlan, prompt: Prompt, number: int) -> dict[str, Any]:
    """Sampling parameters of the load's request `number`, with a seed of its own."""
    body = {**plan.sampling, "seed": derive_seed(plan.sampling.get("seed", 0), number)}
    return body | {"task": prompt.task} if plan.send_task else body


class LoadRun:
    """One run, from its first request to its last answer."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._started_s = 0.0
        self._wall_s = 0.0
        self._num_sent = 0
        self._most_at_once = 0
        self._lateness_s: list[float] = []
        self.exchanges: list[Exchange] = []

    async def run(self) -> None:
        """Send requests and wait for their answers; cancelling it aborts the running ones."""
        async with connect(self._plan.server) as client:
            self._started_s = time.perf_counter()
            watching = asyncio.create_task(self._watch())
            try:
                if self._plan.arrivals.rate_per_s is None:
                    await self._closed_loop(client)
                else:
                    await self._open_loop(client, self._plan.arrivals.rate_per_s)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _closed_loop(self, client: Any) -> None:
        async def work() -> None:
            while self._may_send(time.perf_counter() - self._started_s):
                await self._one(client, self._next())

        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.arrivals.concurrency or 1):
                group.create_task(work())

    async def _open_loop(self, client: Any, rate_per_s: float) -> None:
        """Arrival times do not depend on the answers, so that a slow server gets as many requests."""
        rng = random.Random(self._plan.arrivals.seed)
        due_s = rng.expovariate(rate_per_s)
        async with asyncio.TaskGroup() as group:
            while self._may_send(due_s):
                await asyncio.sleep(max(0.0, self._started_s + due_s - time.perf_counter()))
                self._lateness_s.append(time.perf_counter() - self._started_s - due_s)
                group.create_task(self._one(client, self._next()))
                due_s += rng.expovariate(rate_per_s)

    def _may_send(self, at_s: float) -> bool:
        """True where a request at `at_s` is within the limits."""
        plan = self._plan
        in_number = plan.num_requests is None or self._num_sent < plan.num_requests
        return in_number and (plan.duration_s is None or at_s < plan.duration_s)

    def _next(self) -> int:
        self._num_sent += 1
        self._most_at_once = max(self._most_at_once, self._num_sent - len(self.exchanges))
        return self._num_sent - 1

    async def _one(self, client: Any, number: int) -> None:
        plan = self._plan
        index = number % len(plan.prompts)
        prompt = plan.prompts[index]
        body = _body(plan, prompt, number)
        exchange = await send_request(client, plan.server, index, prompt, plan.raw, body, plan.stream)
        self.exchanges.append(exchange)
        self._wall_s = time.perf_counter() - self._started_s

    async def _watch(self) -> None:
        """Draw the progress."""
        with meter("load", refreshes=False) as shown:
            while True:
                note = self._note()
                shown.show(self._share(), 1.0, note, note)
                await asyncio.sleep(_SHOWN_EVERY_S)

    def _share(self) -> float:
        """How much is done of what ends first, the time or the number of requests."""
        plan, elapsed_s = self._plan, time.perf_counter() - self._started_s
        in_time = elapsed_s / plan.duration_s if plan.duration_s else 0.0
        return min(1.0, max(in_time, self._num_sent / plan.num_requests if plan.num_requests else 0.0))

    def _note(self) -> str:
        elapsed_s, exchanges = time.perf_counter() - self._started_s, self.exchanges
        num_failed = sum(exchange.error is not None for exchange in exchanges)
        tokens = sum(exchange.num_output_tokens or 0 for exchange in exchanges)
        firsts = [e.time_to_first_token_s for e in exchanges[-100:] if e.time_to_first_token_s is not None]
        parts = [
            f"{elapsed_s:.0f} s",
            f"{len(exchanges):,} answered",
            f"{self._num_sent - len(exchanges)} running",
            f"{tokens / elapsed_s if elapsed_s else 0:.0f} tokens/s",
        ]
        if firsts:
            parts.append(f"first token {1e3 * sorted(firsts)[len(firsts) // 2]:.0f} ms")
        if num_failed:
            parts.append(f"{num_failed:,} failed")
        return ", ".join(parts)

    def result(self, complete: bool, counters: Counters | None, metrics: str) -> LoadResult:
        """The report of the finished requests."""
        plan, exchanges, most = self._plan, self.exchanges, self._most_at_once
        by_task: dict[str, list[Exchange]] = {task: [] for task in task_names(plan.prompts)}
        for exchange in exchanges:
            by_task[plan.prompts[exchange.prompt].task].append(exchange)
        by_task = {task: of_task for task, of_task in by_task.items() if of_task}
        overall = summarised(exchanges, self._wall_s, most, None, counters)
        # After an interruption the server also counts requests that the clients do not.
        figures = [overall if complete else replace(overall, disagreements=[])]
        if len(by_task) > 1:
            figures += [summarised(found, self._wall_s, most, task) for task, found in by_task.items()]
        accepted = {task: pooled_acceptance(found) for task, found in [(ALL, exchanges), *by_task.items()]}
        return LoadResult(
            schema=SCHEMA,
            kind="load",
            complete=complete,
            provenance=provenance(),
            url=plan.server.url,
            model=plan.server.model,
            metrics=metrics,
            workload=WorkloadSummary(
                source=plan.workload,
                num_prompts=dict(Counter(prompt.task for prompt in plan.prompts)),
                max_tokens=plan.prompts[0].max_tokens,
                num_unusable=0,
                num_too_long=0,
            ),
            sampling=dict(plan.sampling),
            stream=plan.stream,
            arrivals=plan.arrivals,
            num_requests_asked=plan.num_requests,
            duration_s=plan.duration_s,
            wall_s=self._wall_s,
            most_at_once=most,
            num_unfinished=self._num_sent - len(exchanges),
            lateness_s=percentiles(self._lateness_s),
            statuses=dict(Counter(str(exchange.status or "none") for exchange in exchanges)),
            figures=figures,
            acceptance={task: found for task, found in accepted.items() if found is not None},
            requests=[self._request(exchange) for exchange in exchanges],
        )

    def _request(self, exchange: Exchange) -> LoadRequest:
        return LoadRequest(
            task=self._plan.prompts[exchange.prompt].task,
            status=exchange.status,
            sent_s=exchange.started_s - self._started_s,
            time_to_first_token_s=exchange.time_to_first_token_s,
            latency_s=exchange.latency_s,
            num_output_tokens=exchange.num_output_tokens,
            error=exchange.error,
        )


def pooled_acceptance(exchanges: Seq[Exchange]) -> PooledAcceptance | None:
    """α and τ from the responses' metrics in vLLM's format, of steps with drafts; None without any."""
    found = [exchange.speculation for exchange in exchanges if exchange.speculation is not None]
    drafts, drafted, accepted = (
        sum(int(figures.get(name) or 0) for figures in found)
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    if not drafts or not drafted:
        return None
    return PooledAcceptance.of(
        RequestMetrics(
            num_output_tokens=drafts + accepted,
            num_steps=drafts,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
        )
    )
