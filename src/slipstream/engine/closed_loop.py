"""A closed loop of requests through an engine, timed: when one ends, the next is added."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.request import RequestOptions
from slipstream.engine.engine import Engine
from slipstream.engine.outputs import RequestOutput
from slipstream.profiling.steps import StepTally
from slipstream.sampling.params import SamplingParams


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


def _answer(job: BenchJob, output: RequestOutput, num_first_tokens: int) -> TimedAnswer:
    [only] = output.outputs
    return TimedAnswer(job.prompt, only.token_ids, num_first_tokens, only.metrics)
