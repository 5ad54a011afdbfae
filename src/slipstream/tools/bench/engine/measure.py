"""Timed runs: a closed loop of requests through an engine, configurations interleaved."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from slipstream.engine.closed_loop import BenchJob, TimedAnswer, closed_loop
from slipstream.engine.engine import Engine
from slipstream.profiling.steps import StepTally
from slipstream.tools.bench.engine.engines import Engines
from slipstream.tools.bench.engine.order import Turn, cut, turns

WARM_UP_TOKENS = 16
"""Tokens of each warm-up answer: the first passes of a process set up threads and kernels."""


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
