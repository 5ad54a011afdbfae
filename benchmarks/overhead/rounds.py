"""Rounds over HTTP, at servers of one process and of two, and without HTTP, in turn and on the same questions."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.kept import say
from benchmarks.harness.processes import SLIPSTREAM, Server, Worker, cpu_s
from benchmarks.harness.rounds import turns
from slipstream.assets import sample_prompts
from slipstream.serve.process.spawn import WORKER
from slipstream.tools.bench.statistics import PairedTimes, speedup_interval

WARM_UP = 1
"""Rounds that are not counted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of both sides."""

    model: str | None = None
    """None: the embedded pair's target."""
    specs: Seq[str] = ("off", "draft")
    """As `slipstream serve --spec` takes them; each is measured for itself."""
    streams: int = 8
    """At any time."""
    rounds: int = 12
    requests: int = 64
    """Requests of a round."""
    max_tokens: int = 96
    temperature: float = 0.0
    threads: int = 1
    """Threads of each engine. The server's event loop and the client want a core too."""
    kv_cache_bytes: int = 256 * 2**20
    processes: Seq[int] = (1, 2)
    """Processes of each server: 1 is `slipstream serve --one-process`."""
    quantization: str | None = None
    """Weight format of the target, as `slipstream serve` takes it."""
    name: str | None = None
    """What the result calls the model; None goes by `model`."""


@dataclass(frozen=True, slots=True)
class Side:
    """One round on one side. Seconds of CPU are those of all threads of a process."""

    num_tokens: int
    seconds: float
    cpu_s: float
    """CPU time of the process with the engine: of the server, or of the engine alone."""
    client_cpu_s: float
    texts: list[str]
    front_cpu_s: float = 0.0
    """CPU time of the process in front of the engine's, where there are two; `cpu_s` is without it."""
    gaps_s: list[float] = field(default_factory=list)
    """Between what came on a stream and what came next on it."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def measure(plan: Plan, spec: str) -> dict[str, Any]:
    """The cell of one drafter: `servers` has a summary for each number of processes."""
    rows = sample_prompts()
    with ExitStack() as stack:
        flags = _flags(plan, spec)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        side = (sys.executable, "-m", "benchmarks.overhead.alone")
        model = [] if plan.model is None else ["--model", plan.model]
        alone = stack.enter_context(Worker([*side, *model, *flags]))
        servers: list[tuple[Worker, int]] = []
        for number in plan.processes:
            kind = "--one-process" if number == 1 else "--no-one-process"
            serve = [*SLIPSTREAM, "serve", *model[1:], *flags, kind]
            server = stack.enter_context(Server(serve, logs / f"{number}.log"))
            client = Worker([sys.executable, "-m", "benchmarks.overhead.client", str(server.port)])
            servers.append((stack.enter_context(client), server.process.pid))
        pairs: list[list[tuple[Side, Side]]] = [[] for _ in servers]
        for turn in range(WARM_UP + plan.rounds):
            say(f"  round {turn + 1} of {WARM_UP + plan.rounds}")
            asked = {"streams": plan.streams, "bodies": _bodies(plan, rows, turn)}
            sides: dict[int, Side] = {}
            for which in turns([-1, *range(len(servers))], turn):
                if which < 0:
                    sides[which] = _alone_round(alone, asked)
                else:
                    client, pid = servers[which]
                    sides[which] = _serve_round(client, pid, asked)
            if turn >= WARM_UP:
                for which, kept in enumerate(pairs):
                    kept.append((sides[which], sides[-1]))
        measured = zip(plan.processes, pairs, strict=True)
        return {
            "spec": spec,
            "servers": [{"processes": number, **summary(kept)} for number, kept in measured],
        }


def _bodies(plan: Plan, rows: Seq[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
    """Other questions in every round, as far as there are so many."""
    numbers = range(turn * plan.requests, (turn + 1) * plan.requests)
    return [
        {
            "messages": rows[number % len(rows)]["messages"],
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "seed": number,
        }
        for number in numbers
    ]


def _alone_round(alone: Worker, asked: dict[str, Any]) -> Side:
    before_s = alone.cpu_s()
    answer = alone.ask(asked)
    used_s = alone.cpu_s() - before_s
    return Side(
        answer["num_tokens"], answer["seconds"], used_s, 0.0, answer["texts"], gaps_s=answer["gaps_s"]
    )


def _serve_round(client: Worker, server_pid: int, asked: dict[str, Any]) -> Side:
    server = psutil.Process(server_pid)
    engines = [
        child for child in server.children() if WORKER in child.cmdline()
    ]  # of a server with two processes
    processes = [*engines, server]
    before_s, client_before_s = list(map(cpu_s, processes)), client.cpu_s()
    answer = client.ask(asked)
    used_s = [cpu_s(process) - before for process, before in zip(processes, before_s, strict=True)]
    return Side(
        answer["num_tokens"],
        answer["seconds"],
        used_s[0],
        client.cpu_s() - client_before_s,
        answer["texts"],
        front_cpu_s=sum(used_s[1:]),
        gaps_s=answer["gaps_s"],
    )


def summary(pairs: Seq[tuple[Side, Side]]) -> dict[str, Any]:
    """What the rounds say, each a pair of server and engine alone. `overhead` is the part of the tokens a second that
    the server costs; its interval is a bootstrap over rounds of all rounds together."""
    ratios = [served.tokens_per_s / alone.tokens_per_s for served, alone in pairs]
    together = PairedTimes(
        tokens_on=[served.num_tokens for served, _ in pairs],
        seconds_on=[served.seconds for served, _ in pairs],
        tokens_off=[alone.num_tokens for _, alone in pairs],
        seconds_off=[alone.seconds for _, alone in pairs],
    )
    interval = speedup_interval([together])
    differ = sum(
        one != other for served, alone in pairs for one, other in zip(served.texts, alone.texts, strict=True)
    )
    return {
        "overhead": {
            "median": round(1 - statistics.median(ratios), 4),
            "together": round(1 - together.speedup, 4),
            "interval": interval and [round(1 - interval.high, 4), round(1 - interval.low, 4)],
            "confidence": interval and interval.confidence,
            "least": round(1 - max(ratios), 4),
            "most": round(1 - min(ratios), 4),
        },
        "tokens_per_s": {
            "server": round(statistics.median(served.tokens_per_s for served, _ in pairs), 1),
            "engine": round(statistics.median(alone.tokens_per_s for _, alone in pairs), 1),
        },
        "cpu_us_per_token": {
            "server": _us_per_token([(served.cpu_s, served.num_tokens) for served, _ in pairs]),
            "front": _us_per_token([(served.front_cpu_s, served.num_tokens) for served, _ in pairs]),
            "engine": _us_per_token([(alone.cpu_s, alone.num_tokens) for _, alone in pairs]),
            "client": _us_per_token([(served.client_cpu_s, served.num_tokens) for served, _ in pairs]),
        },
        "gap_ms": {
            "server": _gaps_ms([gap for served, _ in pairs for gap in served.gaps_s]),
            "engine": _gaps_ms([gap for _, alone in pairs for gap in alone.gaps_s]),
        },
        "num_tokens": sum(together.tokens_on),
        "texts_that_differ": differ,
        "rounds": [
            {
                "server_tokens_per_s": round(served.tokens_per_s, 1),
                "engine_tokens_per_s": round(alone.tokens_per_s, 1),
                "ratio": round(ratio, 4),
            }
            for (served, alone), ratio in zip(pairs, ratios, strict=True)
        ],
    }


def _gaps_ms(gaps_s: Seq[float]) -> dict[str, float]:
    """Median and 99th percentile of the time between two events of a stream."""
    if len(gaps_s) < 2:
        return {}
    ranked = statistics.quantiles(gaps_s, n=100, method="inclusive")
    return {"p50": round(1e3 * ranked[49], 2), "p99": round(1e3 * ranked[98], 2)}


def _us_per_token(used: Seq[tuple[float, int]]) -> float:
    return round(1e6 * sum(cpu for cpu, _ in used) / sum(num for _, num in used), 1)


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan as the result tells it."""
    named = "the embedded pair's target" if plan.model is None else Path(plan.model).name
    told = {key: value for key, value in asdict(plan).items() if key not in ("specs", "name")}
    return told | {"model": plan.name or named, "processes": list(plan.processes)}


def _flags(plan: Plan, spec: str) -> list[str]:
    """As `slipstream serve` and the engine alone both take them."""
    sizes = ["--threads", str(plan.threads), "--kv-cache-bytes", str(plan.kv_cache_bytes)]
    quantization = [] if plan.quantization is None else ["--quantization", plan.quantization]
    return ["--spec", spec, *sizes, *quantization]
