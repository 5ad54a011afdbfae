"""The targets, the settings that `auto` chooses from, and closed-loop traffic on an engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.models import expanded
from recipes.cost_expanded.head import expand_head
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.assets import sample_prompts as read_prompts
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.request import RequestOptions
from slipstream.engine.engine import Engine
from slipstream.engine.factory import create_engine
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import encode_chat

MAX_SEQS = 32
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 6}
SUFFIX = {"method": "suffix"}


class Target(NamedTuple):
    """A model that is measured."""

    num_parameters: int | None
    """It is cost-expanded to; None is the embedded target as it is."""
    quantization: str | None
    bar: float
    """What `auto` is to make of the best fixed setting, at least."""


TARGETS = {
    "embedded": Target(None, None, 0.93),
    "300m": Target(300_000_000, None, 0.97),
    "300m-int8": Target(300_000_000, "int8", 0.97),
    "1g-int8": Target(1_000_000_000, "int8", 0.97),
}


class Setting(NamedTuple):
    """What is fixed for all requests: an engine, by its drafter, and the most draft tokens a step."""

    engine: str
    num_draft_tokens: int | None = None


SETTINGS = {
    "off": Setting("off"),
    "suffix": Setting("suffix"),
    **{f"draft-{depth}": Setting("draft", depth) for depth in (1, 2, 4, 6)},
    **{f"eagle3-{depth}": Setting("eagle3", depth) for depth in (1, 2, 4)},
}
AUTO = Setting("auto")


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


def checkpoints(name: str, head: str | None, folder: Path) -> tuple[str, str | None]:
    """The target's folder, and that of the EAGLE-3 head for it; expanded into `folder` where they are not there yet."""
    size = TARGETS[name].num_parameters
    if size is None:
        return EMBEDDED_TARGET, head
    model = expanded(folder / f"expanded-{size // 10**6}m", size)
    if head is None:
        return model, None
    expanded_head = folder / f"eagle3-{size // 10**6}m"
    if not expanded_head.is_dir():
        expand_head(head, EMBEDDED_TARGET, model, expanded_head)
    return model, str(expanded_head)


def configs(head: str | None) -> dict[str, dict[str, Any]]:
    """Engine to `speculative_config`."""
    alone: dict[str, dict[str, Any]] = {"suffix": SUFFIX, "draft": DRAFT}
    if head is not None:
        # A chain: the tree of 60 nodes that is the method's default never pays on a CPU.
        chain = {"tree_top_k": 1, "num_draft_nodes": None}
        alone["eagle3"] = {"method": "eagle3", "model": head, "num_speculative_tokens": 4, **chain}
    return {"off": {"method": "off"}, **alone, "auto": {"method": "auto", "drafters": list(alone.values())}}


def make_engines(
    model: str,
    quantization: str | None,
    wanted: Mapping[str, Mapping[str, Any]],
    threads: int,
    kv_cache_mib: int,
) -> dict[str, Engine]:
    """One engine a configuration, around one target."""
    config = EngineConfig(
        model,
        quantization=quantization,
        num_threads=threads,
        max_num_seqs=MAX_SEQS,
        kv_cache_bytes=kv_cache_mib * 2**20,
    )
    engines: dict[str, Engine] = {}
    for name, speculative in wanted.items():
        first = next(iter(engines.values()), None)
        engines[name] = create_engine(config, SpeculativeConfig.from_mapping(speculative), like=first)
    return engines


def questions(engine: Engine) -> dict[str, list[Question]]:
    """By task, in the order of the sample."""
    found: dict[str, list[Question]] = {}
    for row in read_prompts():
        asked = Question(row["task"], encode_chat(engine.tokenizer, row["messages"]))
        found.setdefault(asked.task, []).append(asked)
    return found


def closed_loop(
    engines: Mapping[str, Engine],
    setting: Setting,
    asked: Seq[Question],
    concurrency: int,
    params: SamplingParams,
) -> Run:
    """`concurrency` questions at any time until all are answered; caches are empty at the beginning. Seeded requests
    have seeds of their own, or a repeated question would be answered from memory."""
    engine = engines[setting.engine]
    engine.reset_caches()
    run = Run()
    waiting = list(enumerate(asked))[::-1]
    num_open = 0
    started_s = time.perf_counter()
    while waiting or engine.has_unfinished:
        while waiting and num_open < concurrency:
            number, question = waiting.pop()
            own = params if params.seed is None else replace(params, seed=params.seed + number)
            options = RequestOptions(task=question.task, max_draft_tokens=setting.num_draft_tokens)
            engine.add_request(str(number), question.token_ids, own, options)
            num_open += 1
        for update in engine.step():
            run.num_tokens += len(update.token_ids)
            if update.output is not None:
                num_open -= 1
                run.answers[update.request_id] = update.output.outputs[0].token_ids
        run.num_steps += 1
    run.seconds = time.perf_counter() - started_s
    return run
