"""How long `auto` takes to find the right setting when the traffic changes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq
from typing import Any

from benchmarks.control.traffic import Question, make_engines
from slipstream.engine.engine import Engine
from slipstream.sampling.params import SamplingParams

CONCURRENCY = 8
PHASES = (("sql", 0.0), ("creative", 1.2), ("sql", 0.0), ("creative", 1.2), ("sql", 0.0))
TOKENS = 1600
"""Of a phase."""
WINDOW = 40
"""Tokens of a request class over which the share of drafted steps and the depth are read."""


def measure_shift(model: str | None, threads: int, by_task: dict[str, list[Question]]) -> dict[str, Any]:
    """Tokens of a request class after each shift until its depth is what it stays at, with and without task tags."""
    found: dict[str, Any] = {}
    for tagged in (True, False):
        engine = make_engines(["auto"], model, threads, 64, 512 * 2**20)["auto"]
        phases = [
            {"task": task, "temperature": temperature, **_phase(engine, by_task[task], temperature, tagged)}
            for task, temperature in PHASES
        ]
        found["tagged" if tagged else "untagged"] = phases
    return {"concurrency": CONCURRENCY, "tokens_a_phase": TOKENS, "window": WINDOW, "phases": found}


def _phase(engine: Engine, asked: Seq[Question], temperature: float, tagged: bool) -> dict[str, Any]:
    """What is drafted for each token of a phase, in the order in which tokens come."""
    depths: list[float] = []

    def on_observe(seen: Any) -> None:
        for one in seen:
            emitted = len(one.sequence.token_ids) - one.length_before
            depths.extend([len(one.proposal)] * emitted)

    engine.on_observe = on_observe
    number = 0
    while len(depths) < TOKENS:
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < CONCURRENCY:
            question = asked[number % len(asked)]
            params = SamplingParams(temperature=temperature, max_tokens=96, seed=number)
            engine.add_request(str(number), question.token_ids, params, task=question.task if tagged else "")
            number += 1
        engine.step()
    for request in range(number):
        engine.abort(str(request))
    settled = statistics.fmean(depths[TOKENS // 2 :])
    return {"mean_depth": round(settled, 2), "settled_after_tokens": _settled_after(depths, settled)}


def _settled_after(depths: Seq[float], settled: float) -> int:
    """The first token from which on a window's mean depth is within half a token, or a third, of where it stays."""
    near = max(0.5, settled / 3)
    for start in range(0, len(depths) - WINDOW, WINDOW // 4):
        if abs(statistics.fmean(depths[start : start + WINDOW]) - settled) <= near:
            return start
    return len(depths)
