"""Timed runs: a closed loop of requests through an engine, configurations interleaved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from slipstream.bench.engine.engines import Engines
from slipstream.bench.engine.order import Turn, cut, turns
from slipstream.bench.engine.steps import StepTally
from slipstream.core import RequestOptions
from slipstream.engine.engine import Engine
from slipstream.engine.outputs import RequestOutput
from slipstream.metrics.request import RequestMetrics
from slipstream.sampling.params import SamplingParams

WARM_UP_TOKENS = 16
"""Tokens of each warm-up answer: the first passes of a process set up threads and kernels."""


@dataclass(frozen=True, slots=True)
class BenchJob:
    """One prompt, encoded. Its seed is set, so that every configuration samples alike."""

    prompt: int
    """Index into the workload's prompts."""
    token_ids: list[int]
    params: SamplingParams
    task: str = ""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """The answer of one job. The metrics' seconds count from when the request was added."""

    prompt: int
    token_ids: list[int]
    num_first_tokens: int
    """Tokens that were committed in the same step as the first one, itself included."""
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One timed run of a batch with a configuration."""

    concurrency: int
    turn: Turn
    wall_s: float
    answers: list[TimedAnswer]
    steps: StepTally

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


def closed_loop(
    engine: Engine, jobs: Seq[BenchJob], concurrency: int, max_draft_tokens: int | None = None
) -> tuple[list[TimedAnswer], StepTally, float]:
    """Answer the jobs from empty caches, `concurrency` at a time: when one ends, the next is added.

    `max_draft_tokens` bounds each request's drafts. Returns answers in the order of the jobs, the steps and the
    seconds.
    """
    engine.reset_caches()
    steps = StepTally()
    waiting = deque(enumerate(jobs))
    running: set[str] = set()
    num_first_tokens: dict[str, int] = {}
    outputs: dict[str, RequestOutput] = {}
    engine.on_step = steps.add
    started_s = time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < concurrency:
                number, job = waiting.popleft()
                options = RequestOptions(task=job.task, max_draft_tokens=max_draft_tokens)
                engine.add_request(str(number), job.token_ids, job.params, options)
                running.add(str(number))
            for update in engine.step():
                num_first_tokens.setdefault(update.request_id, len(update.token_ids))
                if update.output is not None:
                    outputs[update.request_id] = update.output
                    running.remove(update.request_id)
        wall_s = time.perf_counter() - started_s
    except BaseException:  # Ctrl-C: leave nothing behind
        for request_id in running:
            engine.abort(request_id)
        raise
    finally:
        engine.on_step = None
    answers = [
        _answer(job, outputs[str(number)], num_first_tokens[str(number)]) for number, job in enumerate(jobs)
    ]
    return answers, steps, wall_s


def measure(
    engines: Engines, jobs: Seq[BenchJob], concurrencies: Seq[int], repeats: int
) -> Iterator[BenchRun]:
    """Run every batch of jobs with every configuration, `repeats` times at each concurrency, interleaved."""
    for concurrency in concurrencies:
        batches = cut(len(jobs), concurrency)
        order = turns(len(batches), len(engines.configurations), repeats, engines.side_by_side)
        for turn in order:
            engine = engines.get(turn.configuration)
            if engines.is_cold(turn.configuration, concurrency):
                _warm_up(engine, jobs, concurrency)
            batch = [jobs[number] for number in batches[turn.batch]]
            answers, steps, wall_s = closed_loop(engine, batch, concurrency)
            yield BenchRun(concurrency, turn, wall_s, answers, steps)


def num_answers(num_jobs: int, num_configurations: int, concurrencies: Seq[int], repeats: int) -> int:
    """Number of answers that `measure` generates, without the warm-up."""
    return num_jobs * num_configurations * len(concurrencies) * repeats


def _warm_up(engine: Engine, jobs: Seq[BenchJob], concurrency: int) -> None:
    brief = [
        replace(job, params=replace(job.params, max_tokens=WARM_UP_TOKENS, min_tokens=0))
        for job in jobs[:concurrency]
    ]
    closed_loop(engine, brief, concurrency)


def _answer(job: BenchJob, output: RequestOutput, num_first_tokens: int) -> TimedAnswer:
    [only] = output.outputs
    return TimedAnswer(job.prompt, only.token_ids, num_first_tokens, only.metrics)
