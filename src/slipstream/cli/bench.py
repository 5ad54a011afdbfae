"""`slipstream bench`: speculative configurations against speculation off, or a server through its clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from slipstream.cli.flags.flags import Values, filled, refuse, with_flags
from slipstream.cli.flags.options import EngineValues, Json, ModelArgument, Workload
from slipstream.cli.flags.remote import SERVER_PANEL, MeasuredServerFlags, TimedSampling, Url
from slipstream.cli.flags.speculation import SpeculationFlags, speculative_config, speculative_configs
from slipstream.cli.output.console import stderr
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.results import files_in, print_json, print_report, say_written, write_json
from slipstream.cli.output.writing import Overwrite, check_file, write_text
from slipstream.config import SpeculativeConfig
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.tools.bench.result import BenchResult, ServerResult
    from slipstream.tools.bench.settings import BenchSettings

_TOKENIZER_FLAGS = ("tokenizer", "revision", "trust_remote_code")

MaxTokens = Annotated[
    str,
    Option(
        metavar="N|data", help="The most tokens in an answer; `data` uses the workload's lengths, exactly."
    ),
]
Temperature = Annotated[float, Option(help="0 is greedy.")]
Seed = Annotated[int, Option(min=0, help="Each prompt's own seed is derived from it.")]
Raw = Annotated[
    bool,
    Option("--raw", help="Give prompts and conversations as plain text, without the chat template."),
]


@dataclass(frozen=True, kw_only=True)
class BenchedDrafters:
    """The drafters that are measured."""

    spec: list[str] | None = None
    """A drafter in short: ngram, suffix, token_recycling, lookahead, jacobi, draft:PATH, self:int8 or NAME:MODEL; may
    be repeated. By default the embedded pair's own draft."""
    speculative_config: Annotated[list[str] | None, Option(metavar="JSON|FILE")] = None
    """All keys of a drafter; may be repeated."""
    num_speculative_tokens: Annotated[str | None, Option(metavar="N,N,…")] = None
    """Every drafter runs with each of these."""
    verifier: str | None = None
    """coupled, rejection, block or package.module:Class, for every drafter."""

    def chosen(self, model: str | None) -> list[SpeculativeConfig]:
        """The drafters, in the order of the flags' help; the default one when none is chosen."""
        chosen = speculative_configs(self.spec, self.speculative_config, model, self.verifier)
        return chosen or [speculative_config(SpeculationFlags(verifier=self.verifier), model)]


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """A benchmark."""

    model: ModelArgument = None
    workload: Workload = "sample"
    prompts_per_task: Annotated[int, Option(min=0)] = 4
    """Number of questions of each task, the first ones; 0 takes all."""
    max_tokens: MaxTokens = "64"
    temperature: Temperature = 0.0
    seed: Seed = 0
    repeats: Annotated[int, Option(min=1)] = 3
    """Number of times that everything is timed."""
    concurrency: Annotated[str, Option(metavar="N,N,…")] = "1"
    """Requests running at once; several are a sweep."""
    raw: Raw = False
    json: Json = False
    output: Path | None = None
    """A folder for bench.json and bench.html; created if it does not exist."""
    html: Path | None = None
    """Write the page to this file."""
    overwrite: Overwrite = False
    speculation: Annotated[BenchedDrafters, "Speculation"]
    url: Url = None
    server: Annotated[MeasuredServerFlags, SERVER_PANEL]
    sampling: TimedSampling
    engine: EngineValues

    def settings(self) -> BenchSettings:
        """What runs on either side; raises `ConfigError` or `RequestError`."""
        from slipstream.assets.workload.reading import read_workload
        from slipstream.tools.bench.engine.configurations import parse_counts
        from slipstream.tools.bench.settings import BenchSettings

        given = {**self.sampling, "temperature": self.temperature, "seed": self.seed}
        return filled(
            BenchSettings,
            self,
            workload=read_workload(self.workload),
            params=SamplingParams.from_mapping(given),
            prompts_per_task=self.prompts_per_task or None,
            max_tokens=parse_max_tokens(self.max_tokens),
            concurrencies=parse_counts(self.concurrency, "--concurrency"),
        )

    def files(self) -> dict[str, Path]:
        """Files for JSON and page; raises `ConfigError` before the work if they cannot be written."""
        names = ("bench.json", "bench.html") if self.html is None else ("bench.json",)
        files = dict(zip(("json", "html"), files_in(self.output, names, self.overwrite), strict=False))
        if self.html is not None:
            check_file(self.html, self.overwrite)
            files["html"] = self.html
        return files


@with_flags
def bench(flags: BenchFlags) -> None:
    """Measure speculative configurations against speculation off, paired, prompt by prompt, task by task.

    With --url, measure a server through its clients instead, and compare with its own counters.
    """
    files, settings = flags.files(), flags.settings()
    run = _bench_engines if flags.url is None else _bench_server
    result = run(flags, settings)
    _deliver(result, flags.json, files)
    if not result.complete:
        raise typer.Exit(130)


def _bench_engines(flags: BenchFlags, settings: BenchSettings) -> BenchResult | ServerResult:
    from slipstream.tools.bench.engine.configurations import parse_counts, sweep

    server, counts = flags.server, flags.speculation.num_speculative_tokens
    names = ("served_model", "metrics_url", "api_key_env")
    refuse({name: getattr(server, name) for name in names}, "is about a server; give its --url")
    lengths = [] if counts is None else parse_counts(counts, "--num-speculative-tokens")
    say_loading(flags.model, "measuring")
    configurations = sweep(flags.speculation.chosen(flags.model), lengths)
    # Imported last, because it loads PyTorch: all other errors are raised before.
    from slipstream.tools.bench.engine.local import BenchPlan, run

    return run(BenchPlan(settings, configurations, flags.model, flags.engine))


def _bench_server(flags: BenchFlags, settings: BenchSettings) -> BenchResult | ServerResult:
    """Benchmark a server. Of the engine's flags only those of the tokenizer are allowed; raises `ConfigError`."""
    from slipstream.tools.bench.server.remote import RemotePlan, run

    local = {"MODEL": flags.model, **asdict(flags.speculation)}
    refuse(local, "is for engines in this process, not for the server of --url")
    others = {name: value for name, value in flags.engine.items() if name not in _TOKENIZER_FLAGS}
    refuse(others, "cannot be used with --url")
    assert flags.url is not None
    stderr().print(f"measuring {flags.url}", markup=False)
    server = flags.server.measured(flags.url)
    return run(RemotePlan(settings, server, flags.sampling, _counter(flags.engine)))


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


def _deliver(result: BenchResult | ServerResult, json: bool, files: dict[str, Path]) -> None:
    if "json" in files:
        write_json(files["json"], result.as_json())
    if "html" in files:
        write_text(files["html"], _page(result))
    if json:
        print_json(result.as_json())
    else:
        _print(result)
    say_written(files.values())


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
    print_report(grids, lines)
