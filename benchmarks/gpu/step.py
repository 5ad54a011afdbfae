"""What a target step costs by its rows, and of it the time that the GPU has nothing to do.

A drafter that is always wrong fills a step with as many rows as are asked for: each step commits one token, and every
row's logits are computed and judged as in any other step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.trace import profiled, waits
from slipstream import EngineConfig, RequestOptions, SamplingParams, SpeculativeConfig
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.engine.engine import Engine
from slipstream.engine.factory import create_engine
from slipstream.profiling.pass_times import bytes_read_per_step

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 2048)
NUM_WARM_UP = 4
NUM_TIMED = 24
NUM_TRACED = 3
MAX_TOKENS = 256
"""More than the steps of a cell commit."""

ORACLE = "slipstream.testing.stub_drafters:OracleDrafter"


class Steps:
    """An engine on the GPU whose steps are timed and traced."""

    def __init__(
        self,
        model: str,
        dtype: str,
        speculative: dict[str, Any],
        *,
        device: str = "cuda",
        like: Engine | None = None,
        **sizes: Any,
    ) -> None:
        config = EngineConfig(model, device=device, dtype=dtype, **sizes)
        self.engine = create_engine(config, SpeculativeConfig.from_mapping(speculative), like=like)
        self._ids = itertools.count()

    def begin(
        self, prompts: Seq[list[int]], params: SamplingParams, max_draft_tokens: int | None = None
    ) -> None:
        """Compute the prompts and a few steps behind them."""
        for prompt in prompts:
            options = RequestOptions(max_draft_tokens=max_draft_tokens)
            self.engine.add_request(str(next(self._ids)), {"prompt_token_ids": prompt}, params, options)
        num_steps = 0
        while num_steps < NUM_WARM_UP:
            decodes: list[bool] = []
            self.engine.on_step = lambda report: decodes.append(report.only_decodes)  # noqa: B023
            self.engine.step()
            num_steps += all(decodes)
        self.engine.on_step = None

    def run(self, number: int) -> None:
        """So many steps."""
        for _ in range(number):
            self.engine.step()

    def end(self) -> None:
        """Forget the requests."""
        for number in range(next(self._ids)):
            self.engine.abort(str(number))
        self._ids = itertools.count()
        self.engine.reset_caches()

    def timed_s(self, number: int) -> dict[str, list[float]]:
        """Seconds of each of `number` steps, and of its target pass with the verdicts."""
        whole, verify, draft = [], [], []
        for _ in range(number):
            reports: list[Any] = []
            self.engine.on_step = reports.append
            started_s = time.perf_counter()
            self.engine.step()
            whole.append(time.perf_counter() - started_s)
            verify.append(reports[0].verify_s)
            draft.append(reports[0].draft_s)
        self.engine.on_step = None
        return {"whole": whole, "verify": verify, "draft": draft}


def asked(**others: Any) -> SamplingParams:
    """Greedy unless `others` say how to sample; the answer does not end by itself."""
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 0, **others}
    )


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random tokens: what they say does not matter to the time."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(8, vocab_size, (length,), generator=generator).tolist()
    return tokens


def by_rows(
    model: str, dtype: str, copy_gb_per_s: float, *, quick: bool, device: str = "cuda"
) -> dict[str, Any]:
    """A step in ms by rows and context, beside the least time in which the memory could give what it reads."""
    row_counts, contexts = ((1, 8, 64), CONTEXTS[:1]) if quick else (ROWS, CONTEXTS)
    num_timed = 8 if quick else NUM_TIMED
    sizes: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": contexts[-1] + 2 * MAX_TOKENS}
    plain = Steps(model, dtype, {"method": "off"}, device=device, **sizes)
    target = plain.engine.model
    texts: dict[int, list[int]] = {}
    for context in contexts:
        prompt = prompt_of(context, target.vocab_size)
        answer: list[int] = []
        plain.engine.add_request("text", {"prompt_token_ids": prompt}, asked())
        while plain.engine.has_unfinished:
            for update in plain.engine.step():
                answer += update.token_ids
        texts[context] = [*prompt, *answer]
    oracle = {"texts": list(texts.values()), "accuracy": 0.0, "num_speculative_tokens": max(row_counts) - 1}
    steps = Steps(model, dtype, {"method": ORACLE, **oracle}, device=device, like=plain.engine, **sizes)
    cells = []
    for context, rows in itertools.product(contexts, row_counts):
        prompt = texts[context][:context]
        steps.begin([prompt], asked(), max_draft_tokens=rows - 1)
        times = steps.timed_s(num_timed)
        traced = profiled(partial(steps.run, NUM_TRACED), NUM_TRACED)
        steps.end()
        num_bytes = bytes_read_per_step(target, rows, context)
        step_s = statistics.median(w - d for w, d in zip(times["whole"], times["draft"], strict=True))
        cells.append(
            {
                "rows": rows,
                "context": context,
                "step_ms": 1e3 * step_s,
                "quartiles_ms": [1e3 * q for q in statistics.quantiles(times["verify"], n=4)],
                "pass_and_verdict_ms": 1e3 * statistics.median(times["verify"]),
                "bytes_read": num_bytes,
                "roofline_ms": num_bytes / copy_gb_per_s / 1e6,
                "host_share": 1 - traced["device_ms"] / (1e3 * step_s),
                **traced,
            }
        )
    return {"dtype": dtype, "num_parameters": target.num_parameters, "cells": cells}


_CHAIN = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
_TREE = {**_CHAIN, "tree_top_k": 3, "num_draft_nodes": 12}
_OFF = {"method": "off"}
_SAMPLED = {"temperature": 0.8}

SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "off, greedy": (_OFF, {}, 1),
    "off, temperature 0.8": (_OFF, _SAMPLED, 1),
    "off, temperature 0.8, top-p 0.9, penalty": (
        _OFF,
        {**_SAMPLED, "top_p": 0.9, "frequency_penalty": 0.5},
        1,
    ),
    "off, greedy, 8 requests": (_OFF, {}, 8),
    "ngram, greedy": ({"method": "ngram"}, {}, 1),
    "draft chain of 4, greedy": (_CHAIN, {}, 1),
    "draft chain of 4, temperature 0.8": (_CHAIN, _SAMPLED, 1),
    "draft chain of 4, greedy, 8 requests": (_CHAIN, {}, 8),
    "draft tree of 12, greedy": (_TREE, {}, 1),
}
"""Name to drafter, sampling and requests at once."""


def transfers(model: str, dtype: str, *, device: str = "cuda") -> list[dict[str, Any]]:
    """Which lines wait for the device, how often a step, and what is copied, for each scenario."""
    found: list[dict[str, Any]] = []
    like: Engine | None = None
    for name, (speculative, sampling, requests) in SCENARIOS.items():
        steps = Steps(model, dtype, speculative, device=device, like=like, max_num_seqs=8, max_model_len=1024)
        like = like or steps.engine
        vocab_size = steps.engine.model.vocab_size
        prompts = [prompt_of(100 + 4 * number, vocab_size, number) for number in range(requests)]
        steps.begin(prompts, asked(**sampling))
        times = steps.timed_s(NUM_TIMED)
        run = partial(steps.run, NUM_TRACED)
        lines = waits(run, NUM_TRACED)
        traced = profiled(run, NUM_TRACED)
        steps.end()
        step_ms = 1e3 * statistics.median(times["whole"])
        found.append(
            {
                "scenario": name,
                "step_ms": step_ms,
                "draft_ms": 1e3 * statistics.median(times["draft"]),
                "host_share": 1 - traced["device_ms"] / step_ms,
                "waits": sum(lines.values()),
                "waits_by_line": lines,
                **traced,
            }
        )
    return found
