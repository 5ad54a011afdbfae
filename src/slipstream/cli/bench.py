"""`slipstream bench`: speculative configurations against speculation off, or a server from its client's side."""

from __future__ import annotations

from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.flags.flags import Values, with_flags
from slipstream.cli.flags.options import ENGINE, Json, ModelArgument, print_json, with_model
from slipstream.cli.flags.remote import TIMED_SAMPLING, api_key_of, metrics_url_of
from slipstream.cli.flags.speculation import SpeculationFlags, speculative_config
from slipstream.cli.output.console import notes, wide_results
from slipstream.cli.output.writing import Overwrite, check_file, check_folder, write_text
from slipstream.config import SpeculativeConfig
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.bench.result import BenchResult, ServerResult
    from slipstream.bench.settings import BenchSettings

_TOKENIZER_FLAGS = ("tokenizer", "revision", "trust_remote_code")
_SPECULATION = "Speculation"
_SERVER = "A server instead of an engine"


@with_model
@with_flags(sampling=TIMED_SAMPLING, engine=ENGINE)
def bench(
    model: ModelArgument = None,
    workload: Annotated[
        str,
        typer.Option(
            "--workload", "-w", help="What is asked: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE."
        ),
    ] = "sample",
    prompts_per_task: Annotated[
        int, typer.Option(min=0, help="The first so many questions of each task; 0 takes all.")
    ] = 4,
    max_tokens: Annotated[
        str,
        typer.Option(
            metavar="N|data",
            help="The most tokens in an answer; `data` makes each exactly as long as the workload says.",
        ),
    ] = "64",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Each prompt's own seed is derived from it, the same everywhere.")
    ] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is timed.")] = 3,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,…", help="Requests under way at once; several are a sweep.")
    ] = "1",
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave plain prompts as they are, without the chat template.")
    ] = False,
    json: Json = False,
    output: Annotated[
        Path | None, typer.Option(help="A folder for bench.json and bench.html; made where there is none.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
    overwrite: Overwrite = False,
    spec: Annotated[
        list[str] | None,
        typer.Option(
            help="A drafter in short: ngram, suffix, token_recycling, lookahead, jacobi, draft:PATH, self:int8 or "
            "NAME:MODEL; may be repeated. "
            "The embedded pair's own draft unless given.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--speculative-config",
            metavar="JSON|FILE",
            help="All keys of a drafter; may be repeated.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Every drafter runs with each of these.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            help="coupled, rejection, block or package.module:Class, for every drafter.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="An OpenAI-compatible server, as in http://localhost:8000/v1.", rich_help_panel=_SERVER
        ),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            help="The model's name there; the first that it lists unless given.", rich_help_panel=_SERVER
        ),
    ] = None,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            help="Its Prometheus metrics; /metrics beside /v1 unless given.", rich_help_panel=_SERVER
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="Environment variable that holds the server's key.", rich_help_panel=_SERVER),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            min=0.001, help="Seconds until a silent server fails a request.", rich_help_panel=_SERVER
        ),
    ] = 600.0,
    *,
    sampling: Values,
    engine: Values,
) -> None:
    """Measure speculative configurations against speculation off, paired, prompt by prompt, task by task.

    With --url, measure a server as its clients see it instead, and compare with what its own counters say.
    """
    from slipstream.bench.engine.configurations import parse_counts
    from slipstream.bench.settings import BenchSettings
    from slipstream.workload.reading import read_workload

    files = _files(output, html, overwrite)
    asked = BenchSettings(
        workload=read_workload(workload),
        params=SamplingParams.from_mapping({**sampling, "temperature": temperature, "seed": seed}),
        prompts_per_task=prompts_per_task or None,
        max_tokens=_max_tokens(max_tokens),
        concurrencies=parse_counts(concurrency, "--concurrency"),
        repeats=repeats,
        raw=raw,
    )
    speculation = {
        "MODEL": model,
        "--spec": spec,
        "--speculative-config": config,
        "--num-speculative-tokens": num_speculative_tokens,
        "--verifier": verifier,
    }
    server = {"--served-model": served_model, "--metrics-url": metrics_url, "--api-key-env": api_key_env}
    if url is None:
        _refuse(server, "is about a server; give its --url")
        if num_speculative_tokens is not None:
            lengths = parse_counts(num_speculative_tokens, "--num-speculative-tokens")
        else:
            lengths = []
        result: BenchResult | ServerResult = _bench_engines(
            asked, model, _drafters(spec, config, verifier, model), lengths, engine
        )
    else:
        _refuse(speculation, "is about engines of our own, not about the server of --url")
        others = {name: value for name, value in engine.items() if name not in _TOKENIZER_FLAGS}
        _refuse(
            {f"--{name.replace('_', '-')}": value for name, value in others.items()}, "does not go with --url"
        )
        key = api_key_of(api_key_env)
        result = _bench_server(
            asked, url.rstrip("/"), served_model, metrics_url, key, timeout_s, sampling, engine
        )
    _deliver(result, json, files)
    if not result.complete:
        raise typer.Exit(130)


def _drafters(
    spec: list[str] | None, config: list[str] | None, verifier: str | None, model: str | None
) -> list[SpeculativeConfig]:
    """Every drafter that was asked for, in the order of the flags' help; the default one when none was."""
    asked = [
        *(SpeculationFlags(spec=short, verifier=verifier) for short in spec or []),
        *(SpeculationFlags(speculative_config=text, verifier=verifier) for text in config or []),
    ]
    return [speculative_config(flags, model) for flags in asked or [SpeculationFlags(verifier=verifier)]]


def _bench_engines(
    asked: BenchSettings,
    model: str | None,
    drafters: list[SpeculativeConfig],
    lengths: list[int],
    engine: Values,
) -> BenchResult:
    from slipstream.bench.engine.configurations import sweep

    configurations = sweep(drafters, lengths)
    from slipstream.bench.engine.local import (
        BenchPlan,
        run,
    )  # loads PyTorch: last, after all that can be refused without it

    return run(BenchPlan(asked, configurations, model, engine))


def _bench_server(
    asked: BenchSettings,
    url: str,
    model: str | None,
    metrics_url: str | None,
    api_key: str | None,
    timeout_s: float,
    sampling: Values,
    tokenizer: Values,
) -> ServerResult:
    from slipstream.bench.server.remote import RemotePlan, run
    from slipstream.client import ServerAddress, find_model

    name = model or find_model(url, api_key, timeout_s)
    server = ServerAddress(url, name, metrics_url or metrics_url_of(url), api_key, timeout_s)
    return run(RemotePlan(asked, server, sampling, _counter(tokenizer)))


def _counter(options: Values) -> Callable[[str], int] | None:
    """Counts tokens with the tokenizer that was named; None when none was."""
    if "tokenizer" not in options:
        return None
    from slipstream.models import load_tokenizer

    rest = {name: value for name, value in options.items() if name != "tokenizer"}
    tokenizer = load_tokenizer(options["tokenizer"], **rest)
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _max_tokens(text: str) -> int | None:
    """None for `data`."""
    if text == "data":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--max-tokens takes a whole number of at least 1, or data, got {text!r}")
    return int(text)


def _refuse(flags: dict[str, Any], why: str) -> None:
    for name, value in flags.items():
        if value is not None:
            raise ConfigError(f"{name} {why}")


def _files(output: Path | None, html: Path | None, overwrite: bool) -> dict[str, Path]:
    """Where JSON and page go; raises `ConfigError` now rather than after the work when they cannot be written there."""
    files: dict[str, Path] = {}
    if output is not None:
        check_folder(output)
        files = {"json": output / "bench.json", "html": output / "bench.html"}
    if html is not None:
        files["html"] = html
    for file in files.values():
        if file == html or output is None or output.exists():
            check_file(file, overwrite)
    return files


def _deliver(result: BenchResult | ServerResult, json: bool, files: dict[str, Path]) -> None:
    """Write the result and print it: files first, so that no closed pipe can lose it."""
    if "json" in files:
        write_text(files["json"], dumps(result.as_json(), ensure_ascii=False, indent=1) + "\n")
    if "html" in files:
        write_text(files["html"], _page(result))
    if json:
        print_json(result.as_json())
    else:
        _print(result)
    for file in files.values():
        notes().print(f"written: {file}", markup=False)


def _page(result: BenchResult | ServerResult) -> str:
    from slipstream.bench.report.engine_report import render
    from slipstream.bench.report.server_report import render_server
    from slipstream.bench.result import BenchResult

    return render(result) if isinstance(result, BenchResult) else render_server(result)


def _print(result: BenchResult | ServerResult) -> None:
    from slipstream.bench.report.engine_tables import remarks, tables
    from slipstream.bench.report.server_tables import server_remarks, server_tables
    from slipstream.bench.report.verdict import verdicts
    from slipstream.bench.result import BenchResult

    if isinstance(result, BenchResult):
        grids, lines = tables(result), [*verdicts(result), *remarks(result)]
    else:
        grids, lines = server_tables(result), server_remarks(result)
    console = wide_results()
    for grid in grids:
        console.print(grid.rich())
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
