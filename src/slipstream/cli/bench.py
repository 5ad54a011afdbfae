"""`slipstream bench`: speculative configurations against speculation off, or a server through its clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.flags.flags import Values, with_flags
from slipstream.cli.flags.options import ENGINE, Json, ModelArgument, print_json, with_model
from slipstream.cli.flags.remote import (
    TIMED_SAMPLING,
    ApiKeyEnv,
    MetricsUrl,
    ServedModel,
    TimeoutS,
    Url,
    api_key_of,
    metrics_url_of,
)
from slipstream.cli.flags.speculation import SpeculationFlags, speculative_config
from slipstream.cli.output.console import notes, wide_results
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.writing import Overwrite, check_file, check_folder, write_text
from slipstream.config import SpeculativeConfig
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.tools.bench.result import BenchResult, ServerResult
    from slipstream.tools.bench.settings import BenchSettings

_TOKENIZER_FLAGS = ("tokenizer", "revision", "trust_remote_code")
_SPECULATION = "Speculation"

WorkloadFlag = Annotated[
    str,
    typer.Option("--workload", "-w", help="Prompts: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE."),
]
PromptsPerTask = Annotated[
    int, typer.Option(min=0, help="Number of questions of each task, the first ones; 0 takes all.")
]
MaxTokens = Annotated[
    str,
    typer.Option(
        metavar="N|data", help="The most tokens in an answer; `data` uses the workload's lengths, exactly."
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int, typer.Option(min=0, help="Each prompt's own seed is derived from it.")]
Repeats = Annotated[int, typer.Option(min=1, help="Number of times that everything is timed.")]
Concurrency = Annotated[
    str, typer.Option(metavar="N,N,…", help="Requests running at once; several are a sweep.")
]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Give prompts and conversations as plain text, without the chat template."),
]
Output = Annotated[
    Path | None, typer.Option(help="A folder for bench.json and bench.html; created if it does not exist.")
]
Html = Annotated[Path | None, typer.Option(help="Write the page to this file.")]
Spec = Annotated[
    list[str] | None,
    typer.Option(
        help="A drafter in short: ngram, suffix, token_recycling, lookahead, jacobi, draft:PATH, self:int8 or "
        "NAME:MODEL; may be repeated. By default the embedded pair's own draft.",
        rich_help_panel=_SPECULATION,
    ),
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON|FILE",
        help="All keys of a drafter; may be repeated.",
        rich_help_panel=_SPECULATION,
    ),
]
NumSpeculativeTokens = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,…", help="Every drafter runs with each of these.", rich_help_panel=_SPECULATION
    ),
]
Verifier = Annotated[
    str | None,
    typer.Option(
        help="coupled, rejection, block or package.module:Class, for every drafter.",
        rich_help_panel=_SPECULATION,
    ),
]


@with_model
@with_flags(sampling=TIMED_SAMPLING, engine=ENGINE)
def bench(
    model: ModelArgument = None,
    workload: WorkloadFlag = "sample",
    prompts_per_task: PromptsPerTask = 4,
    max_tokens: MaxTokens = "64",
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    repeats: Repeats = 3,
    concurrency: Concurrency = "1",
    raw: Raw = False,
    json: Json = False,
    output: Output = None,
    html: Html = None,
    overwrite: Overwrite = False,
    spec: Spec = None,
    config: Config = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    verifier: Verifier = None,
    url: Url = None,
    served_model: ServedModel = None,
    metrics_url: MetricsUrl = None,
    api_key_env: ApiKeyEnv = None,
    timeout_s: TimeoutS = 600.0,
    *,
    sampling: Values,
    engine: Values,
) -> None:
    """Measure speculative configurations against speculation off, paired, prompt by prompt, task by task.

    With --url, measure a server through its clients instead, and compare with its own counters.
    """
    from slipstream.assets.workload.reading import read_workload
    from slipstream.tools.bench.engine.configurations import parse_counts
    from slipstream.tools.bench.settings import BenchSettings

    files = _files(output, html, overwrite)
    settings = BenchSettings(
        workload=read_workload(workload),
        params=SamplingParams.from_mapping({**sampling, "temperature": temperature, "seed": seed}),
        prompts_per_task=prompts_per_task or None,
        max_tokens=parse_max_tokens(max_tokens),
        concurrencies=parse_counts(concurrency, "--concurrency"),
        repeats=repeats,
        raw=raw,
    )
    server = _ServerFlags(url, served_model, metrics_url, api_key_env, timeout_s)
    if url is None:
        _refuse(server.optional(), "is about a server; give its --url")
        lengths: list[int] = []
        if num_speculative_tokens is not None:
            lengths = parse_counts(num_speculative_tokens, "--num-speculative-tokens")
        say_loading(model, "measuring")
        drafters = _drafters(spec, config, verifier, model)
        result: BenchResult | ServerResult = _bench_engines(settings, model, drafters, lengths, engine)
    else:
        speculation = {
            "MODEL": model,
            "--spec": spec,
            "--speculative-config": config,
            "--num-speculative-tokens": num_speculative_tokens,
            "--verifier": verifier,
        }
        _refuse(speculation, "is for engines in this process, not for the server of --url")
        result = _bench_server(settings, server, sampling, engine)
    _deliver(result, json, files)
    if not result.complete:
        raise typer.Exit(130)


@dataclass(frozen=True)
class _ServerFlags:
    """The flags of a benchmark of a server."""

    url: str | None
    served_model: str | None
    metrics_url: str | None
    api_key_env: str | None
    timeout_s: float

    def optional(self) -> dict[str, str | None]:
        """Flag to value, for flags that need `--url`."""
        return {
            "--served-model": self.served_model,
            "--metrics-url": self.metrics_url,
            "--api-key-env": self.api_key_env,
        }


def _drafters(
    spec: list[str] | None, config: list[str] | None, verifier: str | None, model: str | None
) -> list[SpeculativeConfig]:
    """The chosen drafters, in the order of the flags' help; the default one when none is chosen."""
    flags = [
        *(SpeculationFlags(spec=short, verifier=verifier) for short in spec or []),
        *(SpeculationFlags(speculative_config=text, verifier=verifier) for text in config or []),
    ]
    return [speculative_config(each, model) for each in flags or [SpeculationFlags(verifier=verifier)]]


def _bench_engines(
    settings: BenchSettings,
    model: str | None,
    drafters: list[SpeculativeConfig],
    lengths: list[int],
    engine: Values,
) -> BenchResult:
    from slipstream.tools.bench.engine.configurations import sweep

    configurations = sweep(drafters, lengths)
    # Imported last, because it loads PyTorch: all other errors are raised before.
    from slipstream.tools.bench.engine.local import BenchPlan, run

    return run(BenchPlan(settings, configurations, model, engine))


def _bench_server(
    settings: BenchSettings, flags: _ServerFlags, sampling: Values, engine: Values
) -> ServerResult:
    """Benchmark a server. Of the `engine` flags only those of the tokenizer are allowed; raises `ConfigError`."""
    from slipstream.rpc.client import ServerAddress, find_model, find_url
    from slipstream.tools.bench.server.remote import RemotePlan, run

    others = {name: value for name, value in engine.items() if name not in _TOKENIZER_FLAGS}
    _refuse(
        {f"--{name.replace('_', '-')}": value for name, value in others.items()}, "cannot be used with --url"
    )
    api_key = api_key_of(flags.api_key_env)
    notes().print(f"measuring {flags.url}", markup=False)
    url = find_url(flags.url or "", api_key, flags.timeout_s)
    name = flags.served_model or find_model(url, api_key, flags.timeout_s)
    server = ServerAddress(url, name, flags.metrics_url or metrics_url_of(url), api_key, flags.timeout_s)
    return run(RemotePlan(settings, server, sampling, _counter(engine)))


def _counter(options: Values) -> Callable[[str], int] | None:
    """A function that counts tokens with the tokenizer in `options`; None without one."""
    if "tokenizer" not in options:
        return None
    from slipstream.models import load_tokenizer

    rest = {name: value for name, value in options.items() if name != "tokenizer"}
    tokenizer = load_tokenizer(options["tokenizer"], **rest)
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def parse_max_tokens(text: str) -> int | None:
    """The number in `--max-tokens`; None for `data`. Raises `ConfigError`."""
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
    """Files for JSON and page; raises `ConfigError` before the work if they cannot be written."""
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
    """Write the result and print it; files first, so that a closed pipe does not lose them."""
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
    from slipstream.tools.bench.report.engine_report import render
    from slipstream.tools.bench.report.server_report import render_server
    from slipstream.tools.bench.result import BenchResult

    return render(result) if isinstance(result, BenchResult) else render_server(result)


def _print(result: BenchResult | ServerResult) -> None:
    from slipstream.tools.bench.report.engine_tables import remarks, tables
    from slipstream.tools.bench.report.server_tables import server_remarks, server_tables
    from slipstream.tools.bench.report.verdict import verdicts
    from slipstream.tools.bench.result import BenchResult

    if isinstance(result, BenchResult):
        grids, lines = tables(result), [*verdicts(result), *remarks(result)]
    else:
        grids, lines = server_tables(result), server_remarks(result)
    console = wide_results()
    for grid in grids:
        console.print(grid.rich())
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
