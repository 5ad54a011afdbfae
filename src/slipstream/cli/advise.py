"""`slipstream advise`: what to run, and whether to speculate at all."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.assets import EMBEDDED_DRAFTERS
from slipstream.cli.bench import MaxTokens, Raw, Seed, Temperature, parse_max_tokens
from slipstream.cli.flags.flags import Values, with_flags
from slipstream.cli.flags.options import ENGINE, Json, ModelArgument, print_json, with_model
from slipstream.cli.flags.remote import TIMED_SAMPLING
from slipstream.cli.flags.speculation import SpeculationFlags, speculative_config
from slipstream.cli.output.console import notes, wide_results
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.writing import Overwrite, check_file, check_folder, write_text
from slipstream.config import SpeculativeConfig
from slipstream.draft.methods import short_name
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.tools.advise.advice import Advice

_TRAFFIC, _SPECULATION = "Traffic", "Speculation"
JSON_NAME, PAGE_NAME, SERVE_NAME = "advice.json", "advice.html", "serve.toml"

WorkloadFlag = Annotated[
    str | None,
    typer.Option(
        "--workload",
        "-w",
        help="Prompts by task: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE. The sample by default.",
        rich_help_panel=_TRAFFIC,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="A trace instead: JSON lines of prompts with arrival_s, the seconds at which each came.",
        rich_help_panel=_TRAFFIC,
    ),
]
Log = Annotated[
    Path | None,
    typer.Option(
        help="The JSON log of a running server: when requests came, and of which tasks. Where it has no texts, "
        "give prompts of the same kind with --workload.",
        rich_help_panel=_TRAFFIC,
    ),
]
PromptsPerTask = Annotated[
    int,
    typer.Option(
        min=0,
        help="Number of prompts of each task, the first ones; of a trace on average. 0 takes all.",
        rich_help_panel=_TRAFFIC,
    ),
]
Concurrency = Annotated[
    str,
    typer.Option(
        metavar="N,N,…", help="Requests at once, for which costs are measured.", rich_help_panel=_TRAFFIC
    ),
]
Spec = Annotated[
    list[str] | None,
    typer.Option(
        help="A drafter to consider: draft:PATH, eagle3:PATH, self:int8 or NAME:MODEL; may be repeated. ngram and "
        "suffix are always considered, and without this flag the embedded target's own draft and head, and the target "
        "itself in int8.",
        rich_help_panel=_SPECULATION,
    ),
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON|FILE",
        help="All keys of a drafter to consider; may be repeated.",
        rich_help_panel=_SPECULATION,
    ),
]
Trees = Annotated[bool, typer.Option(help="Consider trees beside chains.", rich_help_panel=_SPECULATION)]
Minutes = Annotated[
    float,
    typer.Option(min=0.01, max=600.0, help="About how long to record and measure, loading apart."),
]
Check = Annotated[bool, typer.Option(help="Measure the advised setting, the runner-up and off.")]
Output = Annotated[
    Path | None,
    typer.Option(help=f"A folder for {JSON_NAME}, {PAGE_NAME} and {SERVE_NAME}, which serve --config takes."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the finished parts of the --output folder.")
]


@with_model
@with_flags(sampling=TIMED_SAMPLING, engine=ENGINE)
def advise(
    model: ModelArgument = None,
    workload: WorkloadFlag = None,
    trace: Trace = None,
    log: Log = None,
    prompts_per_task: PromptsPerTask = 4,
    max_tokens: MaxTokens = "64",
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    concurrency: Concurrency = "1,4,16",
    raw: Raw = False,
    spec: Spec = None,
    config: Config = None,
    trees: Trees = True,
    minutes: Minutes = 5.0,
    check: Check = True,
    json: Json = False,
    output: Output = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    *,
    sampling: Values,
    engine: Values,
) -> None:
    """Say what to run on this machine for this traffic: which drafter, how deep, at which load, or none.

    The target answers the prompts once; every drafter is scored on what came, costs are measured, and the best setting
    is checked. "Do not enable" is an answer.
    """
    from slipstream.tools.advise.traffic import read_traffic
    from slipstream.tools.bench.engine.configurations import parse_counts

    files = _files(output, overwrite)
    if resume and output is None:
        raise ConfigError("--resume needs the --output folder of the advice that was stopped")
    requests = read_traffic(workload, trace, log)
    loads = sorted(parse_counts(concurrency, "--concurrency"))
    params = SamplingParams.from_mapping({**sampling, "temperature": temperature, "seed": seed})
    length = parse_max_tokens(max_tokens)
    say_loading(model, "advising on")
    chosen = _drafters(spec, config, model, engine)
    # Imported last, because it loads PyTorch: all other errors are raised before.
    from slipstream.tools.advise.candidates import make_candidates
    from slipstream.tools.advise.job import AdviceJob
    from slipstream.tools.advise.kept_parts import forget_parts, has_parts
    from slipstream.tools.advise.run import advise as run

    if resume and output is not None and not has_parts(output):
        notes().print(f"no finished parts of an advice in {str(output)!r}: it begins anew", markup=False)
    job = AdviceJob(
        requests=requests,
        candidates=make_candidates(chosen, trees),
        params=params,
        model=model,
        engine_options=engine,
        loads=loads,
        prompts_per_task=prompts_per_task or None,
        max_tokens=length,
        budget_s=60 * minutes,
        checks=check,
        raw=raw,
        folder=output,
        resume=resume,
    )
    _deliver(run(job), json, files, model, engine)
    if output is not None:
        forget_parts(output)


def _drafters(
    spec: list[str] | None, config: list[str] | None, model: str | None, engine: Values
) -> list[SpeculativeConfig]:
    """The drafters to consider beside the lookups."""
    flags = [
        *(SpeculationFlags(spec=short) for short in spec or []),
        *(SpeculationFlags(speculative_config=text) for text in config or []),
    ]
    if flags:
        return [speculative_config(each, model) for each in flags]
    from slipstream.tools.advise.candidates import own_draft

    reading = {key: engine[key] for key in ("revision", "trust_remote_code", "dtype") if key in engine}
    own = own_draft(engine.get("quantization"), engine.get("device", "auto"), model, **reading)
    embedded = (
        [SpeculationFlags(spec=short) for short in map(short_name, EMBEDDED_DRAFTERS)]
        if model is None
        else []
    )
    return [*(speculative_config(each, model) for each in embedded), *([own] if own else [])]


def _files(output: Path | None, overwrite: bool) -> dict[str, Path]:
    """Files by kind; raises `ConfigError` before the work if they cannot be written."""
    if output is None:
        return {}
    check_folder(output)
    files = {"json": output / JSON_NAME, "html": output / PAGE_NAME, "toml": output / SERVE_NAME}
    if output.exists():
        for file in files.values():
            check_file(file, overwrite)
    return files


def _deliver(advice: Advice, json: bool, files: dict[str, Path], model: str | None, engine: Values) -> None:
    """Write the files and print the advice; files first, so that a closed pipe does not lose them."""
    from slipstream.tools.advise.report import render
    from slipstream.tools.advise.served import serve_file
    from slipstream.tools.advise.tables import tables
    from slipstream.tools.advise.verdict import remarks, verdict

    if files:
        write_text(files["json"], dumps(advice.as_json(), ensure_ascii=False, indent=1) + "\n")
        write_text(files["html"], render(advice))
        told = SpeculativeConfig.from_mapping(advice.speculative)
        write_text(files["toml"], serve_file(model, told, engine, [verdict(advice)]))
    if json:
        print_json(advice.as_json())
    else:
        console = wide_results()
        for grid in tables(advice):
            console.print(grid.rich())
        for line in [verdict(advice), *remarks(advice)]:
            console.print(line, markup=False, soft_wrap=True)
    for file in files.values():
        notes().print(f"written: {file}", markup=False)
