"""A benchmark of an OpenAI-compatible server: closed loops of clients, and the server's own counters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from slipstream.assets.workload.prompts import Count, Lengths, Prompt, choose, task_names
from slipstream.core.meter import Meter, meter
from slipstream.errors import RemoteError
from slipstream.profiling.provenance import provenance
from slipstream.rpc.client import Exchange, ServerAddress, connect, scrape, send_request
from slipstream.sampling.noise import derive_seed
from slipstream.tools.bench.result import (
    SCHEMA,
    ServerCounts,
    ServerFigures,
    ServerResult,
)
from slipstream.tools.bench.server.counters import (
    ClientCounts,
    Counters,
    disagreements,
    growth,
    parse_counters,
)
from slipstream.tools.bench.settings import BenchSettings
from slipstream.tools.bench.statistics import percentiles, ratio


@dataclass(frozen=True)
class RemotePlan:
    """A benchmark of a server."""

    settings: BenchSettings
    server: ServerAddress
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The given sampling parameters, sent unchanged."""
    count: Count | None = None
    """Counts tokens of reference answers; needed only for lengths from the data."""


@dataclass(slots=True)
class _Level:
    """The measurements at one concurrency."""

    concurrency: int
    exchanges: list[Exchange] = field(default_factory=list)
    wall_s: float = 0.0
    counters: Counters | None = None
    complete: bool = False


def run(plan: RemotePlan) -> ServerResult:
    """Warm up, measure, summarise. Ctrl-C ends it early, with an incomplete result.

    Raises `RemoteError` when the server does not answer, and `RequestError` for an invalid workload.
    """
    chosen = choose(
        plan.settings.workload,
        plan.settings.prompts_per_task,
        Lengths(plan.settings.max_tokens, plan.count),
        fits=lambda prompt: True,
        answer=lambda prompt: _answer(plan, prompt).text,
    )
    _answer(plan, chosen.prompts[0])  # the warm-up
    levels: list[_Level] = []
    total = len(chosen.prompts) * len(plan.settings.concurrencies) * plan.settings.repeats
    metrics = "not read"
    try:
        with meter("benchmark", total) as progress:
            for concurrency in plan.settings.concurrencies:
                levels.append(_Level(concurrency))
                metrics = measure_level(plan, chosen.prompts, levels[-1], progress)
    except KeyboardInterrupt:
        pass
    return ServerResult(
        schema=SCHEMA,
        kind="server",
        complete=len(levels) == len(plan.settings.concurrencies) and all(level.complete for level in levels),
        provenance=provenance(),
        url=plan.server.url,
        model=plan.server.model,
        metrics=metrics,
        workload=plan.settings.summary(chosen),
        sampling=_sampling(plan, 0) | {"seed": plan.settings.params.seed},
        repeats=plan.settings.repeats,
        figures=[
            figures for level in levels if level.exchanges for figures in _figures(level, chosen.prompts)
        ],
    )


def measure_level(plan: RemotePlan, prompts: Seq[Prompt], level: _Level, progress: Meter) -> str:
    """Fill `level`; returns the URL of the counters, or why there are none."""
    window = CounterWindow(plan.server)
    for _ in range(plan.settings.repeats):
        asyncio.run(_closed_loop(plan, prompts, level, progress))
    level.counters, where = window.grown()
    level.complete = True
    return where


async def _closed_loop(plan: RemotePlan, prompts: Seq[Prompt], level: _Level, progress: Meter) -> None:
    """Send every prompt, `level.concurrency` at a time: when one ends, the next is sent."""
    waiting = iter(enumerate(prompts))
    started_s = time.perf_counter()
    earlier_s = level.wall_s

    async with connect(plan.server) as client:

        async def work() -> None:
            for number, prompt in waiting:
                body = _sampling(plan, number)
                exchange = await send_request(client, plan.server, number, prompt, plan.settings.raw, body)
                level.exchanges.append(exchange)
                level.wall_s = earlier_s + time.perf_counter() - started_s
                progress.advance(f"{level.concurrency} at once")

        await asyncio.gather(*(work() for _ in range(level.concurrency)))


def _answer(plan: RemotePlan, prompt: Prompt) -> Exchange:
    return must_answer(plan.server, prompt, plan.settings.raw, _sampling(plan, 0))


def must_answer(
    server: ServerAddress, prompt: Prompt, raw: bool, extra: Mapping[str, Any], stream: bool = True
) -> Exchange:
    """One answer outside the measurement; raises `RemoteError` for a failure, so that one of all requests is said once,
    before they are sent."""

    async def once() -> Exchange:
        async with connect(server) as client:
            return await send_request(client, server, 0, prompt, raw, extra, stream)

    exchange = asyncio.run(once())
    if exchange.error is not None:
        raise RemoteError(f"{server.url} does not answer: {exchange.error}")
    return exchange


class CounterWindow:
    """What a server's own counters grow by from now on."""

    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self.before, self.where = read_counters(server)
        """The counters or None, and the URL of the metrics or why there are none."""

    def grown(self) -> tuple[Counters | None, str]:
        """(the growth so far or None, the URL of the metrics or why there is none)."""
        if self.before is None:
            return None, self.where
        after, where = read_counters(self._server)
        if after is None:
            return None, where
        grown = growth(self.before, after)
        return grown, where if grown else f"{where}: the counters decreased, as when a server restarts"


def read_counters(server: ServerAddress) -> tuple[Counters | None, str]:
    """(the counters or None, the URL of the metrics or why there are none)."""
    text = scrape(server)
    if text is None:
        return None, f"{server.metrics_url} has no metrics"
    try:
        counters = parse_counters(text, server.model)
    except RemoteError as error:
        return None, f"{server.metrics_url}: {error}"
    if counters is None:
        return None, f"{server.metrics_url} has no supported counters"
    return counters, server.metrics_url


def _sampling(plan: RemotePlan, number: int) -> dict[str, Any]:
    """Sampling parameters of a request, under OpenAI's and vLLM's names."""
    params = plan.settings.params
    seed = derive_seed(params.seed or 0, number)
    lengths = {"ignore_eos": True} if plan.settings.ignore_eos else {}
    return {**plan.sampling, "temperature": params.temperature, "seed": seed, **lengths}


def _figures(level: _Level, prompts: Seq[Prompt]) -> Iterator[ServerFigures]:
    """The figures of all tasks, then by task where there are several."""
    yield summarised(level.exchanges, level.wall_s, level.concurrency, None, level.counters)
    tasks = task_names(prompts)
    for task in tasks if len(tasks) > 1 else []:
        of_task = [exchange for exchange in level.exchanges if prompts[exchange.prompt].task == task]
        if of_task:
            yield summarised(of_task, level.wall_s, level.concurrency, task)


def summarised(
    exchanges: Seq[Exchange],
    wall_s: float,
    concurrency: int,
    task: str | None = None,
    counters: Counters | None = None,
) -> ServerFigures:
    """The figures of exchanges that took `wall_s` together. `counters` cover all tasks; a single task has none."""
    answered = [exchange for exchange in exchanges if exchange.error is None]
    counts = ClientCounts(
        num_requests=len(answered),
        num_failed=len(exchanges) - len(answered),
        num_prompt_tokens=_sum(answered, lambda exchange: exchange.num_prompt_tokens),
        num_output_tokens=_sum(answered, lambda exchange: exchange.num_output_tokens),
        num_chunks=sum(exchange.num_chunks for exchange in answered),
    )
    firsts = [e.time_to_first_token_s for e in answered if e.time_to_first_token_s is not None]
    tokens = counts.num_output_tokens
    return ServerFigures(
        concurrency=concurrency,
        task=task,
        num_requests=counts.num_requests,
        num_failed=counts.num_failed,
        errors=dict(Counter(exchange.error for exchange in exchanges if exchange.error is not None)),
        num_prompt_tokens=counts.num_prompt_tokens,
        num_output_tokens=tokens,
        num_chunks=counts.num_chunks,
        tokens_per_s=ratio(tokens, wall_s) if task is None and tokens is not None else None,
        requests_per_s=ratio(len(answered), wall_s) if task is None else None,
        time_to_first_token_s=percentiles(firsts),
        time_per_output_token_s=percentiles([*_seconds_per_token(answered)]),
        inter_token_latency_s=percentiles([gap for exchange in answered for gap in exchange.gaps_s]),
        latency_s=percentiles([exchange.latency_s for exchange in answered]),
        server=_server_counts(counters),
        disagreements=disagreements(counts, counters),
    )


def _server_counts(counters: Counters | None) -> ServerCounts | None:
    if counters is None:
        return None
    return ServerCounts(
        num_drafts=counters.num_drafts,
        num_output_tokens=counters.num_output_tokens,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_requests=counters.num_requests,
        acceptance=counters.acceptance,
    )


def _sum(exchanges: Seq[Exchange], of: Callable[[Exchange], int | None]) -> int | None:
    """The sum over exchanges; None where an exchange lacks the value, or there are none."""
    values = [of(exchange) for exchange in exchanges]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _seconds_per_token(exchanges: Iterable[Exchange]) -> Iterator[float]:
    """Seconds a token after the first, for each answer of two tokens or more."""
    for exchange in exchanges:
        first_s, tokens = exchange.time_to_first_token_s, exchange.num_output_tokens
        if first_s is not None and tokens is not None and tokens > 1:
            yield (exchange.latency_s - first_s) / (tokens - 1)
