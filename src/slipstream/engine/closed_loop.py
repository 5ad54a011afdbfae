"""A closed loop of requests through an engine, timed: when one ends, the next is added."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice

from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.request import RequestOptions
from slipstream.engine.engine import Engine
from slipstream.engine.outputs import RequestOutput, Update
from slipstream.profiling.steps import StepTally
from slipstream.sampling.params import SamplingParams

AddedRequest = tuple[str, Seq[int], SamplingParams, RequestOptions]
"""What `Engine.add_request` takes."""


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


def steps_in_turn(
    engine: Engine, requests: Iterable[AddedRequest], concurrency: int
) -> Generator[list[Update]]:
    """Answer requests, `concurrency` at a time: when one ends, the next is taken. Yields each step's updates.

    Close it where it may not be read to its end: what runs then is aborted.
    """
    waiting = iter(requests)
    running: set[str] = set()
    try:
        while True:
            for request_id, token_ids, params, options in islice(waiting, concurrency - len(running)):
                engine.add_request(request_id, token_ids, params, options)
                running.add(request_id)
            if not running:
                return
            updates = engine.step()
            running.difference_update(update.request_id for update in updates if update.output is not None)
            yield updates
    finally:
        for request_id in running:
            engine.abort(request_id)


def closed_loop(
    engine: Engine, jobs: Seq[BenchJob], concurrency: int, max_draft_tokens: int | None = None
) -> tuple[list[TimedAnswer], StepTally, float]:
    """Answer the jobs from empty caches, `concurrency` at a time: when one ends, the next is added.

    `max_draft_tokens` bounds each request's drafts. Returns answers in the order of the jobs, the steps and the
    seconds.
    """
    engine.reset_caches()
    steps = StepTally()
    num_first_tokens: dict[str, int] = {}
    outputs: dict[str, RequestOutput] = {}
    options = (RequestOptions(task=job.task, max_draft_tokens=max_draft_tokens) for job in jobs)
    requests = [
        (str(number), job.token_ids, job.params, own)
        for number, (job, own) in enumerate(zip(jobs, options, strict=True))
    ]
    engine.on_step = steps.add
    started_s = time.perf_counter()
    try:
        with closing(steps_in_turn(engine, requests, concurrency)) as turns:
            for update in chain.from_iterable(turns):
                num_first_tokens.setdefault(update.request_id, len(update.token_ids))
                if update.output is not None:
                    outputs[update.request_id] = update.output
        wall_s = time.perf_counter() - started_s
    finally:
        engine.on_step = None
    answers = [
        _answer(job, outputs[str(number)], num_first_tokens[str(number)]) for number, job in enumerate(jobs)
    ]
    return answers, steps, wall_s


def _answer(job: BenchJob, output: RequestOutput, num_first_tokens: int) -> TimedAnswer:
    [only] = output.outputs
    return TimedAnswer(job.prompt, only.token_ids, num_first_tokens, only.metrics)
