"""`slipstream advise`: what to run, and whether to speculate at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from slipstream.assets import EMBEDDED_DRAFTERS
from slipstream.cli.bench import MaxTokens, Raw, Seed, Temperature, parse_max_tokens
from slipstream.cli.flags.flags import Values, filled, with_flags
from slipstream.cli.flags.options import EngineValues, Json, ModelArgument
from slipstream.cli.flags.remote import TimedSampling
from slipstream.cli.flags.speculation import speculative_configs
from slipstream.cli.output.console import stderr
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.results import files_in, print_json, print_report, say_written, write_json
from slipstream.cli.output.writing import Overwrite, write_text
from slipstream.config import SpeculativeConfig
from slipstream.draft.methods import short_name
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.tools.advise.advice import Advice
    from slipstream.tools.advise.job import AdviceJob

_TRAFFIC = "Traffic"
JSON_NAME, PAGE_NAME, SERVE_NAME = "advice.json", "advice.html", "serve.toml"


@dataclass(frozen=True, kw_only=True)
class ConsideredDrafters:
    """The drafters to consider."""

    spec: list[str] | None = None
    """A drafter to consider: draft:PATH, eagle3:PATH, self:int8 or NAME:MODEL; may be repeated. ngram and suffix are
    always considered, and without this flag the embedded target's own draft and head, and the target itself in int8."""
    speculative_config: Annotated[list[str] | None, Option(metavar="JSON|FILE")] = None
    """All keys of a drafter to consider; may be repeated."""
    trees: bool = True
    """Consider trees in addition to chains."""


@dataclass(frozen=True, kw_only=True)
class AdviseFlags:
    """What is to be advised on."""

    model: ModelArgument = None
    workload: Annotated[str | None, Option("--workload", "-w", rich_help_panel=_TRAFFIC)] = None
    """Prompts by task: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE. The sample by default."""
    trace: Annotated[Path | None, Option(rich_help_panel=_TRAFFIC)] = None
    """A trace instead: JSON lines of prompts with arrival_s, the seconds at which each came."""
    log: Annotated[Path | None, Option(rich_help_panel=_TRAFFIC)] = None
    """The JSON log of a running server: when requests came, and of which tasks. Where it has no texts, give prompts of
    the same kind with --workload."""
    prompts_per_task: Annotated[int, Option(min=0, rich_help_panel=_TRAFFIC)] = 4
    """Number of prompts of each task, the first ones; of a trace on average. 0 takes all."""
    max_tokens: MaxTokens = "64"
    temperature: Temperature = 0.0
    seed: Seed = 0
    concurrency: Annotated[str, Option(metavar="N,N,…", rich_help_panel=_TRAFFIC)] = "1,4,16"
    """Requests at once, for which costs are measured."""
    raw: Raw = False
    speculation: Annotated[ConsideredDrafters, "Speculation"]
    minutes: Annotated[float, Option(min=0.01, max=600.0)] = 5.0
    """About how long to record and measure, loading apart."""
    check: bool = True
    """Measure the advised setting, the runner-up and off."""
    json: Json = False
    output: Path | None = None
    """A folder for advice.json, advice.html and serve.toml, which serve --config takes."""
    resume: Annotated[bool, Option("--resume")] = False
    """Go on from the finished parts of the --output folder."""
    overwrite: Overwrite = False
    sampling: TimedSampling
    engine: EngineValues

    def job(self) -> AdviceJob:
        """The job; PyTorch is imported once all that needs none has been checked."""
        from slipstream.tools.advise.traffic import read_traffic
        from slipstream.tools.bench.engine.configurations import parse_counts

        requests = read_traffic(self.workload, self.trace, self.log)
        loads = sorted(parse_counts(self.concurrency, "--concurrency"))
        given = {**self.sampling, "temperature": self.temperature, "seed": self.seed}
        params, length = SamplingParams.from_mapping(given), parse_max_tokens(self.max_tokens)
        say_loading(self.model, "advising on")
        chosen = _drafters(self.speculation, self.model, self.engine)
        from slipstream.tools.advise.candidates import make_candidates
        from slipstream.tools.advise.job import AdviceJob

        return filled(
            AdviceJob,
            self,
            requests=requests,
            candidates=make_candidates(chosen, self.speculation.trees),
            params=params,
            engine_options=self.engine,
            loads=loads,
            prompts_per_task=self.prompts_per_task or None,
            max_tokens=length,
            budget_s=60 * self.minutes,
            checks=self.check,
            folder=self.output,
        )


@with_flags
def advise(flags: AdviseFlags) -> None:
    """Say what to run on this machine for this traffic: which drafter, how deep, at which load, or none.

    The target answers the prompts once; every drafter is scored on what came, costs are measured, and the best setting
    is checked. "Do not enable" is an answer.
    """
    output = flags.output
    files = files_in(output, (JSON_NAME, PAGE_NAME, SERVE_NAME), flags.overwrite)
    if flags.resume and output is None:
        raise ConfigError("--resume needs the --output folder of the advice that was stopped")
    job = flags.job()
    from slipstream.tools.advise.kept_parts import forget_parts, has_parts
    from slipstream.tools.advise.run import advise as run

    if flags.resume and output is not None and not has_parts(output):
        stderr().print(f"no finished parts of an advice in {str(output)!r}: it begins anew", markup=False)
    _deliver(run(job), flags, files)
    if output is not None:
        forget_parts(output)


def _drafters(given: ConsideredDrafters, model: str | None, engine: Values) -> list[SpeculativeConfig]:
    """The drafters to consider in addition to the lookups."""
    chosen = speculative_configs(given.spec, given.speculative_config, model)
    if chosen:
        return chosen
    from slipstream.tools.advise.candidates import own_draft

    reading = {key: engine[key] for key in ("revision", "trust_remote_code", "dtype") if key in engine}
    own = own_draft(engine.get("quantization"), engine.get("device", "auto"), model, **reading)
    embedded = [short_name(name) for name in EMBEDDED_DRAFTERS] if model is None else []
    return [*speculative_configs(embedded, None, model), *([own] if own else [])]


def _deliver(advice: Advice, flags: AdviseFlags, files: list[Path]) -> None:
    from slipstream.tools.advise.report import render
    from slipstream.tools.advise.served import serve_file
    from slipstream.tools.advise.tables import tables
    from slipstream.tools.advise.verdict import remarks, verdict

    if files:
        as_json, page, serve = files
        write_json(as_json, advice.as_json())
        write_text(page, render(advice))
        chosen = SpeculativeConfig.from_mapping(advice.speculative)
        write_text(serve, serve_file(flags.model, chosen, flags.engine, [verdict(advice)]))
    if flags.json:
        print_json(advice.as_json())
    else:
        print_report(tables(advice), [verdict(advice), *remarks(advice)])
    say_written(files)
