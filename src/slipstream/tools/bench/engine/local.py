"""Runs a benchmark on engines in this process."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from slipstream.assets.workload.prompts import Chosen, Lengths, Prompt, choose
from slipstream.core.meter import meter
from slipstream.engine.closed_loop import BenchJob, closed_loop
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.errors import RequestError
from slipstream.profiling.provenance import provenance
from slipstream.sampling.params import SamplingParams
from slipstream.tools.bench.engine.configurations import Configuration
from slipstream.tools.bench.engine.engines import Engines
from slipstream.tools.bench.engine.jobs import JobMaker
from slipstream.tools.bench.engine.measure import BenchRun, measure, num_answers
from slipstream.tools.bench.engine.summary import OFF, comparisons, summarise, timings
from slipstream.tools.bench.result import EMBEDDED, SCHEMA, BenchResult, ConfigurationSummary
from slipstream.tools.bench.settings import BenchSettings
from slipstream.verify.registry import VERIFIERS


@dataclass(frozen=True)
class BenchPlan:
    """A benchmark on engines in this process."""

    settings: BenchSettings
    configurations: Seq[Configuration]
    """Speculation off first."""
    model: str | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)


def run(plan: BenchPlan) -> BenchResult:
    """Load, measure and summarise. Ctrl-C during the measurement ends it early, with an incomplete result. Raises what
    loading raises, and `RequestError` for invalid prompts.
    """
    engines = Engines(plan.model, plan.configurations, plan.engine_options, max(plan.settings.concurrencies))
    engine = engines.get(OFF)
    plan.settings.params.check_vocabulary(engine.model.vocab_size)
    maker = JobMaker(engine, plan.settings.params, plan.settings.raw, plan.settings.ignore_eos)
    chosen = _choose(plan, maker)
    if len(chosen.prompts) < max(plan.settings.concurrencies):
        raise RequestError(
            f"{max(plan.settings.concurrencies)} concurrent requests need as many prompts, but the workload has "
            f"{len(chosen.prompts)}; raise --prompts-per-task"
        )
    jobs = [maker.job(number, prompt) for number, prompt in enumerate(chosen.prompts)]
    del engine, maker  # its memory may be needed
    runs, complete = _measure(plan, engines, jobs)
    names = [configuration.name for configuration in plan.configurations]
    return BenchResult(
        schema=SCHEMA,
        kind="engine",
        complete=complete,
        provenance=provenance(num_threads=plan.engine_options.get("num_threads")),
        model=plan.model or EMBEDDED,
        labels=engines.labels,
        workload=plan.settings.summary(chosen),
        sampling=_sampling(plan.settings.params),
        repeats=plan.settings.repeats,
        interleaved_by="batch" if engines.side_by_side else "round",
        target_bytes=next((p.target_bytes for p in engines.memory_plans.values()), None),
        peak_rss_bytes=peak_rss_bytes(),
        peak_device_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        configurations=[_configuration(plan, engines, number) for number in range(len(names))],
        figures=summarise(runs, names, chosen.prompts),
        comparisons=comparisons(runs, names, chosen.prompts),
        timings=timings(runs, names),
    )


def peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes, but for macOS


def _measure(plan: BenchPlan, engines: Engines, jobs: Seq[BenchJob]) -> tuple[list[BenchRun], bool]:
    """(the runs, whether the benchmark is complete)."""
    runs: list[BenchRun] = []
    total = num_answers(
        len(jobs), len(plan.configurations), plan.settings.concurrencies, plan.settings.repeats
    )
    try:
        with meter("benchmark", total, refreshes=False) as progress:
            for one in measure(engines, jobs, plan.settings.concurrencies, plan.settings.repeats):
                runs.append(one)
                note = plan.configurations[one.turn.configuration].name
                progress.advance(f"{note}, {one.concurrency} at once", len(one.answers))
    except KeyboardInterrupt:
        return runs, False
    return runs, True


def _choose(plan: BenchPlan, maker: JobMaker) -> Chosen:
    def answer(prompt: Prompt) -> str:
        [answered], _, _ = closed_loop(maker.engine, [maker.job(0, prompt)], 1)
        text: str = maker.engine.tokenizer.decode(answered.token_ids, skip_special_tokens=True)
        return text

    settings = plan.settings
    lengths = Lengths(settings.max_tokens, maker.count)
    return choose(settings.workload, settings.prompts_per_task, lengths, maker.fits, answer)


_NOT_SET = {"max_tokens", "n", "structured_outputs", "detokenize", "output_kind", "extra_args"}
"""Parameters that the workload determines, or that exist in Python only."""


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters for the report."""
    return {name: value for name, value in asdict(params).items() if name not in _NOT_SET}


def _configuration(plan: BenchPlan, engines: Engines, number: int) -> ConfigurationSummary:
    configuration = plan.configurations[number]
    options = ParsedSpeculation.of(configuration.speculative).options
    memory = engines.memory_plans.get(number)
    return ConfigurationSummary(
        name=configuration.name,
        method=configuration.speculative.method,
        verifier=configuration.speculative.verifier,
        reproducible=VERIFIERS.load(configuration.speculative.verifier).reproducible,
        options=asdict(options),
        draft_bytes=None if memory is None else memory.draft_bytes,
        kv_bytes=None if memory is None else memory.kv_bytes,
    )
