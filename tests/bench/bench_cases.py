"""Runs made by hand, whose figures can be worked out."""

from __future__ import annotations

from typing import Any

from slipstream.assets.workload.prompts import Chosen, Prompt
from slipstream.assets.workload.reading import Workload
from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.metrics.step import StepReport
from slipstream.engine.closed_loop import TimedAnswer
from slipstream.profiling.steps import StepTally
from slipstream.sampling.params import SamplingParams
from slipstream.tools.bench.engine.measure import BenchRun, Turn
from slipstream.tools.bench.engine.summary import comparisons, summarise, timings
from slipstream.tools.bench.result import SCHEMA, BenchResult, ConfigurationSummary
from slipstream.tools.bench.settings import BenchSettings

PROMPTS = [Prompt("a", "line 1", 9), Prompt("b", "line 2", 9), Prompt("a", "line 3", 9)]
NAMES = ["off", "draft γ=2"]


def answer(
    prompt: int, token_ids: list[int], total_s: float, steps: list[tuple[int, int]] | None = None
) -> TimedAnswer:
    """Each step is (drafted, accepted); without any, a step a token. The first token took a tenth of the time."""
    metrics = RequestMetrics(num_prompt_tokens=5, num_output_tokens=len(token_ids), total_s=total_s)
    metrics.time_to_first_token_s = total_s / 10
    for drafted, accepted in steps if steps is not None else [(0, 0)] * len(token_ids):
        metrics.record_step(drafted, drafted, min(drafted, accepted + 1), accepted)
    return TimedAnswer(prompt, token_ids, 1, metrics)


def run(
    configuration: int,
    answers: list[TimedAnswer],
    wall_s: float,
    repeat: int = 0,
    batch: int = 0,
    concurrency: int = 1,
    step: StepReport | None = None,
) -> BenchRun:
    """`step` is the one step that was reported, a plain one unless given."""
    steps = StepTally()
    steps.add(step or StepReport(concurrency, concurrency, 10 * concurrency, 0, 0, 0.0, wall_s / 2))
    return BenchRun(concurrency, Turn(repeat, batch, configuration), wall_s, answers, steps)


def result_of(runs: list[BenchRun], complete: bool = True) -> BenchResult:
    """As a whole benchmark would report them."""
    asked = BenchSettings(Workload("w.jsonl"), SamplingParams(temperature=0.0, seed=0), max_tokens=9)
    machine = {
        "cpu": "a <CPU>",
        "num_cores": 2,
        "memory_bytes": 2**33,
        "platform": "Linux",
        "device": "cpu",
        "threads": 2,
    }
    made = {
        "date": "2026-01-01",
        "commit": None,
        "command": "slipstream bench",
        "python": "3.11",
        "slipstream": "0",
    }
    return BenchResult(
        schema=SCHEMA,
        kind="engine",
        complete=complete,
        provenance={**machine, **made, "versions": {"torch": "2"}},
        model="<b>model</b>",
        labels=[],
        workload=asked.summary(Chosen(PROMPTS, 0)),
        sampling={"temperature": 0.0},
        repeats=1,
        interleaved_by="batch",
        target_bytes=None,
        peak_rss_bytes=None,
        peak_device_bytes=None,
        configurations=[
            ConfigurationSummary(
                name, "off" if name == "off" else "draft_model", "coupled", True, {}, None, None
            )
            for name in NAMES
        ],
        figures=summarise(runs, NAMES, PROMPTS),
        comparisons=comparisons(runs, NAMES, PROMPTS),
        timings=timings(runs, NAMES),
    )


def two_tasks() -> list[BenchRun]:
    """Three prompts one at a time, one repeat: speedups 2 and 4 on task a (sums 6 s over 2 s), 1 on task b."""
    step = StepReport(1, 1, 10, 2, 2, 0.2, 0.5)
    return [
        run(0, [answer(0, [1, 2, 3, 4], 2.0)], 2.0, batch=0),
        run(1, [answer(0, [1, 2, 3, 4], 1.0, [(2, 1), (2, 1)])], 1.0, batch=0, step=step),
        run(0, [answer(1, [5, 6], 1.0)], 1.0, batch=1),
        run(1, [answer(1, [5, 7], 1.0, [(2, 0), (1, 0)])], 1.0, batch=1, step=step),
        run(0, [answer(2, [8] * 8, 4.0)], 4.0, batch=2),
        run(1, [answer(2, [8] * 8, 1.0, [(2, 2), (2, 2), (2, 1)])], 1.0, batch=2, step=step),
    ]


def key_names(value: Any) -> set[str]:
    """Every key of a result's JSON, but for those that are data: names of options, tasks, packages."""
    if isinstance(value, list):
        return {name for item in value for name in key_names(item)}
    if not isinstance(value, dict):
        return set()
    data = ("sampling", "options", "versions", "num_prompts", "errors")
    inner = {name for key, item in value.items() if key not in data for name in key_names(item)}
    return set(value) | inner
