"""Closed-loop traffic on one engine, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.assets import sample_prompts as read_prompts
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core import RequestOptions
from slipstream.engine.engine import Engine
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import encode_chat

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    "suffix": {"method": "suffix"},
    "draft-1": {**DRAFT, "num_speculative_tokens": 1},
    "draft-2": {**DRAFT, "num_speculative_tokens": 2},
    "draft-4": {**DRAFT, "num_speculative_tokens": 4},
    "draft-6": {**DRAFT, "num_speculative_tokens": 6},
    "auto": {
        "method": "auto",
        "drafters": [{"method": "suffix"}, {**DRAFT, "num_speculative_tokens": 6}],
    },
}
"""What `auto` chooses from, each on its own; and `auto`."""


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of the bundled sample."""

    task: str
    token_ids: list[int]


@dataclass(slots=True)
class Run:
    """Tokens and seconds of some questions, and which tokens each answer had."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    answers: dict[str, list[int]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def make_engines(
    names: Seq[str], model: str | None, threads: int, max_num_seqs: int, kv_cache_bytes: int
) -> dict[str, Engine]:
    """One engine a setting, around one target."""
    config = EngineConfig(
        model or EMBEDDED_TARGET,
        num_threads=threads,
        max_num_seqs=max_num_seqs,
        kv_cache_bytes=kv_cache_bytes,
    )
    engines: dict[str, Engine] = {}
    for name in names:
        first = next(iter(engines.values()), None)
        engines[name] = Engine(config, SpeculativeConfig.from_mapping(SETTINGS[name]), like=first)
    return engines


def questions(engine: Engine) -> dict[str, list[Question]]:
    """By task, in the order of the sample."""
    found: dict[str, list[Question]] = {}
    for row in read_prompts():
        asked = Question(row["task"], encode_chat(engine.tokenizer, row["messages"]))
        found.setdefault(asked.task, []).append(asked)
    return found


def closed_loop(
    engine: Engine, asked: Seq[Question], concurrency: int, params: SamplingParams, *, tagged: bool = True
) -> Run:
    """`concurrency` questions at any time until all are answered; caches are empty at the beginning. Seeded requests
    have seeds of their own, or a repeated question would be answered from memory."""
    engine.reset_caches()
    run = Run()
    waiting = list(enumerate(asked))[::-1]
    num_open = 0
    started_s = time.perf_counter()
    while waiting or engine.has_unfinished:
        while waiting and num_open < concurrency:
            number, question = waiting.pop()
            own = params if params.seed is None else replace(params, seed=params.seed + number)
            engine.add_request(
                str(number), question.token_ids, own, RequestOptions(task=question.task if tagged else "")
            )
            num_open += 1
        for update in engine.step():
            run.num_tokens += len(update.token_ids)
            if update.output is not None:
                num_open -= 1
                run.answers[update.request_id] = update.output.outputs[0].token_ids
        run.num_steps += 1
    run.seconds = time.perf_counter() - started_s
    return run
