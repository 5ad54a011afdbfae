"""Timed runs: batches of requests through an engine in a closed loop, configurations interleaved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from slipstream.engine.closed_loop import BenchJob, TimedAnswer, closed_loop
from slipstream.engine.engine import Engine
from slipstream.profiling.steps import StepTally
from slipstream.tools.bench.engine.engines import Engines

WARM_UP_TOKENS = 16
"""Tokens of each warm-up answer: the first passes of a process set up threads and kernels."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a batch with a configuration."""

    repeat: int
    batch: int
    configuration: int


def cut(num_prompts: int, concurrency: int) -> list[range]:
    """Indices of prompts, batch by batch, of nearly equal size.

    One prompt a batch at a concurrency of 1, so that runs are paired prompt by prompt. Otherwise at least
    `2 * concurrency` prompts a batch, if there are as many, so that the engine is full most of the time.
    """
    size = 1 if concurrency == 1 else 2 * concurrency
    num_batches = max(1, num_prompts // size)
    ends = [num_prompts * number // num_batches for number in range(num_batches + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def turns(num_batches: int, num_configurations: int, repeats: int, side_by_side: bool) -> Iterator[Turn]:
    """Every batch with every configuration, `repeats` times, interleaved.

    With `side_by_side` a batch runs with all configurations before the next batch. Otherwise, where memory has room for
    one engine, all batches run with one configuration before the next configuration, once a repeat. The order of
    configurations rotates, so that a machine that becomes slower or faster favours none.
    """
    for repeat in range(repeats):
        if side_by_side:
            for batch in range(num_batches):
                for configuration in rotated(num_configurations, repeat + batch):
                    yield Turn(repeat, batch, configuration)
        else:
            for configuration in rotated(num_configurations, repeat):
                for batch in range(num_batches):
                    yield Turn(repeat, batch, configuration)


def rotated(length: int, by: int) -> list[int]:
    """0 to `length` - 1, begun at `by`: so that none is always the first."""
    return [(by + number) % length for number in range(length)]


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
