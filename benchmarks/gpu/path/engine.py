"""Part `engine`: drafters against off on the embedded target at the cost of 1 G, greedy, one and eight requests; steps
of 64 without drafts, and what a drafter costs that is loaded and never asked."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.path.part import Part
from benchmarks.gpu.path.shapes import RECORDED
from benchmarks.gpu.speed import DRAFTERS, MAX_MODEL_LEN
from benchmarks.gpu.step import NUM_TIMED, NUM_TRACED, Steps, asked
from benchmarks.gpu.trace import profiled, waits
from benchmarks.harness.models import expanded
from slipstream.assets import sample_prompts
from slipstream.engine.closed_loop import BenchJob, closed_loop
from slipstream.engine.engine import Engine
from slipstream.models import CausalLM
from slipstream.testing.wait_audit import WaitAudit
from slipstream.text.prompts import encode_question

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    "suffix": DRAFTERS["suffix"],
    "chain of 4": DRAFTERS["draft_model, chain of 4"],
    "tree of 12": DRAFTERS["draft_model, tree of 12"],
}
REQUESTS = (1, 8)
MANY = 64
"""Requests of one more cell, without drafts."""
LOADED = "chain of 4"
"""The drafter that is loaded and not asked."""
NUM_TURNS = 5
"""How often steps with and without it take turns."""
NUM_PROMPTS = 28
MAX_TOKENS = 32


def measure(part: Part) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(part, Path(folder) / "1G")
        for requests in REQUESTS:
            for name in CONFIGURATIONS:
                about = f"{name}, {requests} at once"
                part.cell(about, partial(speed, part, engines, name, requests), needs_s=12)
                part.cell(f"steps of {about}", partial(steps, part, engines, name, requests), needs_s=4)
        part.cell(f"steps of off, {MANY} at once", partial(steps, part, engines, "off", MANY), needs_s=8)
        part.cell("a drafter that is loaded and not asked", partial(loaded, part, engines), needs_s=6)


class Engines:
    """One engine a configuration, over the same target."""

    def __init__(self, part: Part, folder: Path) -> None:
        self._part, self._folder = part, folder
        self._made: dict[str, Steps] = {}

    def get(self, name: str) -> Steps:
        """That of a configuration, made when it is first asked for."""
        if name not in self._made:
            like = next(iter(self._made.values())).engine if self._made else None
            self._made[name] = Steps(
                self._model(), self._dtype, CONFIGURATIONS[name], device=self._part.device.type, like=like,
                max_num_seqs=MANY, max_model_len=MAX_MODEL_LEN, **self._names,
            )  # fmt: skip
        return self._made[name]

    @property
    def _dtype(self) -> str:
        return "float32" if self._part.is_tiny else "bfloat16"

    @property
    def _names(self) -> dict[str, str]:
        """Of attention and executor: what is chosen by itself on a GPU, the stand-in on a CPU."""
        if not self._part.is_tiny:
            return {}
        names = {"attention_backend": "TritonOnCpu", "executor": "RecordedExecutor"}
        return {"cpu_kernels": "torch", **{key: f"{RECORDED}:{name}" for key, name in names.items()}}

    def _model(self) -> str:
        if self._part.is_tiny:
            return "embedded"
        return expanded(self._folder, 10**9, dtype="bfloat16", positions=4096)


class Counts:
    """Passes of an engine's models: those that a graph computed, and others by why."""

    def __init__(self, engine: Engine) -> None:
        self._models = [model for model in (engine.model, engine.draft_model) if model is not None]
        self._before = [self._of(model) for model in self._models]

    @staticmethod
    def _of(model: CausalLM) -> tuple[int, dict[str, int]]:
        executor: Any = model.executor
        return getattr(executor, "num_replayed", 0), dict(getattr(executor, "eager", {}))

    def since(self) -> list[dict[str, Any]]:
        """The target's, then the draft model's."""
        found = []
        for model, (replayed, eager) in zip(self._models, self._before, strict=True):
            after, reasons = self._of(model)
            outside = {why: number - eager.get(why, 0) for why, number in reasons.items()}
            found.append({"replayed": after - replayed, "outside": {w: n for w, n in outside.items() if n}})
        return found


def jobs_of(part: Part, engine: Engine) -> list[BenchJob]:
    """The prompts."""
    params = asked(max_tokens=4 if part.is_tiny else MAX_TOKENS)
    prompts = sample_prompts()[: 2 if part.is_tiny else NUM_PROMPTS]
    return [
        BenchJob(
            number,
            encode_question(engine.tokenizer, None, row["messages"], False, engine.model.vocab_size),
            params,
        )
        for number, row in enumerate(prompts)
    ]


def speed(part: Part, engines: Engines, name: str, requests: int) -> dict[str, Any]:
    """All prompts twice: the first time graphs are recorded, the second one is timed."""
    engine = engines.get(name).engine
    jobs = jobs_of(part, engine)
    first, _, first_s = closed_loop(engine, jobs, requests)
    counts = Counts(engine)
    answers, tally, wall_s = closed_loop(engine, jobs, requests)
    texts = [answer.token_ids for answer in answers]
    num_tokens = sum(map(len, texts))
    num_steps = sum(cell.num_steps for cell in tally.cells.values())
    return {
        "configuration": name,
        "requests": requests,
        "tokens_per_s": num_tokens / wall_s,
        "first_s": first_s,
        "wall_s": wall_s,
        "num_tokens": num_tokens,
        "decoding_steps": num_steps,
        "passes": counts.since(),
        "repeated": sum(a.token_ids == b for a, b in zip(first, texts, strict=True)),
        "texts": texts,
    }


def steps(part: Part, engines: Engines, name: str, requests: int) -> dict[str, Any]:
    """What a step takes, and what it asks of the device."""
    own = engines.get(name)
    jobs = jobs_of(part, own.engine)
    prompts = [jobs[number % len(jobs)].token_ids for number in range(requests)]
    own.begin(prompts, asked(max_tokens=256))
    times = own.timed_s(3 if part.is_tiny else NUM_TIMED)
    run = partial(own.run, 1 if part.is_tiny else NUM_TRACED)
    lines = audited(run) if part.is_tiny else waits(run, NUM_TRACED)
    traced = {} if part.is_tiny else profiled(run, NUM_TRACED)
    own.end()
    whole_ms, draft_ms, verify_ms = (_median_ms(times[key]) for key in ("whole", "draft", "verify"))
    found = {
        "configuration": name,
        "requests": requests,
        "step_ms": whole_ms,
        "draft_ms": draft_ms,
        "pass_and_verdict_ms": verify_ms,
        "host_ms": _median_ms(
            [w - d - v for w, d, v in zip(*(times[k] for k in ("whole", "draft", "verify")), strict=True)]
        ),
        "waits": sum(lines.values()),
        "waits_by_line": lines,
    }
    if traced:
        kept = {key: traced[key] for key in ("device_ms", "kernels", "copies", "runtime_calls")}
        found |= kept | {"idle": 1 - traced["device_ms"] / whole_ms}
    return found


def loaded(part: Part, engines: Engines) -> dict[str, Any]:
    """Steps without drafts in an engine that has a drafter, over those in one that has none, in turns."""
    own = {name: engines.get(name) for name in ("off", LOADED)}
    for each in own.values():
        each.begin([jobs_of(part, each.engine)[0].token_ids], asked(max_tokens=256), max_draft_tokens=0)
    times: dict[str, list[float]] = {name: [] for name in own}
    for _ in range(NUM_TURNS):
        for name, each in own.items():
            times[name].append(_median_ms(each.timed_s(2 if part.is_tiny else NUM_TIMED)["whole"]))
    for each in own.values():
        each.end()
    ratios = sorted(b / a for a, b in zip(times["off"], times[LOADED], strict=True))
    return {"drafter": LOADED, "over_off": statistics.median(ratios), "ratios": ratios}


def audited(run: Any) -> dict[str, float]:
    """What would wait on a GPU, by line."""
    with WaitAudit() as audit:
        run()
    return dict(audit.waits)


def _median_ms(seconds: Seq[float]) -> float:
    return 1e3 * statistics.median(seconds)
