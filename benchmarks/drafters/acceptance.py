"""Acceptance of each drafter by task on the embedded target, without timing.

τ and α depend on the models, the prompts and the drafter alone, so the machine may be busy. Every text is compared with
the one without speculation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from benchmarks.drafters.lineup import Entry, without_models
from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.assets import sample_prompts
from slipstream.core.metrics.request import RequestMetrics

TEMPERATURES = (0.0, 0.8)
MAX_NUM_SEQS = 16

Cell = tuple[float, str]
"""Temperature and task."""


def measure(
    entries: Seq[Entry], prompts_per_task: int, max_tokens: int, jobs: int
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one drafter after another, a row for each temperature and task; `jobs` drafters at once."""
    reference = {
        cell: [answer.outputs[0].token_ids for answer in answers]
        for cell, answers in _answers({"method": "off"}, prompts_per_task, max_tokens, TEMPERATURES).items()
    }
    rows = partial(_rows, prompts_per_task=prompts_per_task, max_tokens=max_tokens, reference=reference)
    if jobs == 1:
        yield from map(rows, entries)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as processes:
        yield from processes.map(rows, entries)


def _rows(
    entry: Entry, prompts_per_task: int, max_tokens: int, reference: dict[Cell, list[list[int]]]
) -> list[dict[str, Any]]:
    temperatures = TEMPERATURES[1:] if entry.is_greedy_only else TEMPERATURES
    return [
        {
            "drafter": entry.name,
            "speculative_config": without_models(entry.spec),
            "temperature": temperature,
            "task": task,
            **_summary(given, reference[temperature, task]),
        }
        for (temperature, task), given in _answers(
            entry.spec, prompts_per_task, max_tokens, temperatures
        ).items()
    ]


def _answers(
    spec: dict[str, Any], prompts_per_task: int, max_tokens: int, temperatures: tuple[float, ...]
) -> dict[Cell, list[RequestOutput]]:
    """Each task meets a drafter that has learned nothing yet."""
    by_task: dict[str, list[list[dict[str, str]]]] = {}
    for row in sample_prompts():
        by_task.setdefault(row["task"], []).append(row["messages"])
    by_task = {task: prompts[:prompts_per_task] for task, prompts in sorted(by_task.items())}
    llm = LLM(speculative_config=spec, max_num_seqs=MAX_NUM_SEQS, num_threads=1)
    outputs: dict[Cell, list[RequestOutput]] = {}
    started_s = time.perf_counter()
    for temperature in temperatures:
        for task, conversations in by_task.items():
            llm.reset_caches()
            params = [
                SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number)
                for number in range(len(conversations))
            ]
            outputs[temperature, task] = llm.chat(conversations, params)
    if llm.engine.stats().num_draft_failures:
        raise RuntimeError(f"{without_models(spec)} failed; its figures would be those of no drafter")
    print(f"{without_models(spec)}: {time.perf_counter() - started_s:.0f} s", file=sys.stderr, flush=True)
    return outputs


def _summary(answers: list[RequestOutput], reference: list[list[int]]) -> dict[str, Any]:
    """Counters of one cell, pooled over its prompts."""
    metrics = RequestMetrics.merged([answer.metrics for answer in answers])
    equal = [answer.outputs[0].token_ids == r for answer, r in zip(answers, reference, strict=True)]
    return {
        "alpha": round(metrics.acceptance_rate, 4),
        "conditional_alpha": [round(rate, 4) for rate in metrics.conditional_acceptance],
        "tau": round(metrics.acceptance_length, 4),
        "steps_saved": round(1 - metrics.num_steps / metrics.num_output_tokens, 4),
        "num_steps": metrics.num_steps,
        "num_output_tokens": metrics.num_output_tokens,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "texts_equal_to_off": sum(equal),
        "texts": len(equal),
    }
