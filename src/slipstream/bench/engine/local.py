"""A benchmark on engines of our own: from what was asked for to the result."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from slipstream.bench.engine.configurations import Configuration
from slipstream.bench.engine.engines import Engines
from slipstream.bench.engine.measure import BenchJob, BenchRun, closed_loop, measure, num_answers
from slipstream.bench.progress import meter
from slipstream.bench.result import EMBEDDED, SCHEMA, BenchResult, ConfigurationFacts
from slipstream.bench.settings import BenchSettings
from slipstream.bench.summary import OFF, comparisons, summarise, timings
from slipstream.engine.engine import Engine
from slipstream.engine.speculation import validate
from slipstream.errors import RequestError
from slipstream.provenance import provenance
from slipstream.sampling.noise import derive_seed
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import encode_chat, encode_prompt
from slipstream.verify.registry import VERIFIERS
from slipstream.workload.prompts import Chosen, Lengths, Prompt, choose


@dataclass(frozen=True)
class BenchPlan:
    """What is to be measured on which engines."""

    asked: BenchSettings
    configurations: Seq[Configuration]
    """Speculation off first."""
    model: str | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)


def run(plan: BenchPlan) -> BenchResult:
    """Load, measure and summarise. Ctrl-C during the measurement ends it early: the result says so, and holds what
    there was. Raises what loading raises, and `RequestError` for prompts that cannot be asked.
    """
    engines = Engines(plan.model, plan.configurations, plan.engine_options, max(plan.asked.concurrencies))
    engine = engines.get(OFF)
    plan.asked.params.check_vocabulary(engine.model.vocab_size)
    chosen = _choose(plan, engine)
    if len(chosen.prompts) < max(plan.asked.concurrencies):
        raise RequestError(
            f"{max(plan.asked.concurrencies)} concurrent requests need as many prompts, but the workload has "
            f"{len(chosen.prompts)}; raise --prompts-per-task"
        )
    jobs = [_job(plan, engine, number, prompt) for number, prompt in enumerate(chosen.prompts)]
    del engine
    runs, complete = _measure(plan, engines, jobs)
    names = [configuration.name for configuration in plan.configurations]
    return BenchResult(
        schema=SCHEMA,
        kind="engine",
        complete=complete,
        provenance=provenance(),
        model=plan.model or EMBEDDED,
        labels=engines.labels,
        workload=plan.asked.facts(chosen),
        sampling=_sampling(plan.asked.params),
        repeats=plan.asked.repeats,
        interleaved_by="batch" if engines.side_by_side else "round",
        target_bytes=next((p.target_bytes for p in engines.memory_plans.values()), None),
        peak_rss_bytes=peak_rss_bytes(),
        peak_device_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        configurations=[_facts(plan, engines, number) for number in range(len(names))],
        figures=summarise(runs, names, chosen.prompts),
        comparisons=comparisons(runs, names, chosen.prompts),
        timings=timings(runs, names),
    )


def peak_rss_bytes() -> int:
    """The most main memory that this process has held since it began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes, but for macOS


def _measure(plan: BenchPlan, engines: Engines, jobs: Seq[BenchJob]) -> tuple[list[BenchRun], bool]:
    """The runs, and whether all were made."""
    runs: list[BenchRun] = []
    total = num_answers(len(jobs), len(plan.configurations), plan.asked.concurrencies, plan.asked.repeats)
    try:
        with meter(total) as progress:
            for one in measure(engines, jobs, plan.asked.concurrencies, plan.asked.repeats):
                runs.append(one)
                note = plan.configurations[one.turn.configuration].name
                progress.advance(len(one.answers), one.num_tokens, f"{note}, {one.concurrency} at once")
    except KeyboardInterrupt:
        return runs, False
    return runs, True


def _choose(plan: BenchPlan, engine: Engine) -> Chosen:
    def count(text: str) -> int:
        return len(engine.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def fits(prompt: Prompt) -> bool:
        return len(_token_ids(plan, engine, prompt)) + prompt.max_tokens <= engine.max_model_len

    def answer(prompt: Prompt) -> str:
        job = _job(plan, engine, 0, prompt)
        [answered], _, _ = closed_loop(engine, [job], 1)
        text: str = engine.tokenizer.decode(answered.token_ids, skip_special_tokens=True)
        return text

    return choose(
        plan.asked.workload, plan.asked.prompts_per_task, Lengths(plan.asked.max_tokens, count), fits, answer
    )


def _job(plan: BenchPlan, engine: Engine, number: int, prompt: Prompt) -> BenchJob:
    params = replace(
        plan.asked.params,
        max_tokens=prompt.max_tokens,
        ignore_eos=plan.asked.ignore_eos,
        seed=derive_seed(plan.asked.params.seed or 0, number),
    )
    return BenchJob(number, _token_ids(plan, engine, prompt), params, prompt.task)


def _token_ids(plan: BenchPlan, engine: Engine, prompt: Prompt) -> list[int]:
    """Token ids of a prompt of any length; raises `RequestError` that says where it stands."""
    tokenizer = engine.tokenizer
    try:
        if prompt.messages:
            if plan.asked.raw:
                raise RequestError("--raw is for plain prompts: only the chat template can join messages")
            return encode_chat(tokenizer, prompt.messages)
        if tokenizer.chat_template and not plan.asked.raw:
            return encode_chat(tokenizer, [{"role": "user", "content": prompt.text}])
        return encode_prompt(tokenizer, prompt.text or "", engine.model.vocab_size, sys.maxsize)
    except RequestError as error:
        raise RequestError(f"{prompt.where}: {error}") from None


_NOT_SET = {"max_tokens", "n", "structured_outputs", "detokenize", "output_kind", "extra_args"}
"""Parameters that the workload decides, or that only Python has."""


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """What was set, but for the length, which is a matter of the workload."""
    return {name: value for name, value in asdict(params).items() if name not in _NOT_SET}


def _facts(plan: BenchPlan, engines: Engines, number: int) -> ConfigurationFacts:
    configuration = plan.configurations[number]
    _, options = validate(configuration.speculative)
    memory = engines.memory_plans.get(number)
    return ConfigurationFacts(
        name=configuration.name,
        method=configuration.speculative.method,
        verifier=configuration.speculative.verifier,
        reproducible=VERIFIERS.load(configuration.speculative.verifier).reproducible,
        options=asdict(options),
        draft_bytes=None if memory is None else memory.draft_bytes,
        kv_bytes=None if memory is None else memory.kv_bytes,
    )
