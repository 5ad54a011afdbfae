"""`slipstream load`: puts a server under load and measures it through its clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from slipstream.cli.flags.flags import filled, parse_json, with_flags
from slipstream.cli.flags.options import Json, Workload
from slipstream.cli.flags.remote import MeasuredServerFlags, TimedSampling
from slipstream.cli.output.profile_plot import check_plot
from slipstream.cli.output.results import print_json, print_report, say_written, write_json
from slipstream.cli.output.writing import Overwrite, check_file
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.tools.bench.result import LoadResult
    from slipstream.tools.bench.server.load import LoadPlan

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """A load on a server."""

    url: Annotated[str, Argument()]
    """An OpenAI-compatible server, as in http://localhost:8000/v1."""
    concurrency: Annotated[int | None, Option(min=1)] = None
    """A closed loop of this many clients: each sends its next request after its last answer. 8 unless there is a
    --rate."""
    rate: Annotated[float | None, Option(min=0.001)] = None
    """An open loop: Poisson arrivals with this mean number of requests a second."""
    num_requests: Annotated[int | None, Option(min=1)] = None
    """Number of requests; 100 unless there is a --duration."""
    duration: Annotated[float | None, Option(min=0.001)] = None
    """Seconds of sending; running requests are then completed."""
    workload: Workload = "sample"
    task: list[str] | None = None
    """Only questions of this task; may be repeated. By default all tasks, interleaved."""
    max_tokens: Annotated[int, Option(min=1)] = 64
    """The most tokens in an answer."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: Annotated[int, Option(min=0)] = 0
    """Arrivals and each request's own seed are derived from it."""
    stream: Annotated[bool, Option("--stream/--no-stream")] = True
    """Stream the answers."""
    raw: Annotated[bool, Option("--raw")] = False
    """Send plain prompts to /completions instead of the chat."""
    send_task: Annotated[bool, Option("--send-task")] = False
    """Send each prompt's task as `task`, which Slipstream knows."""
    extra_body: Annotated[str | None, Option(metavar="JSON")] = None
    """Further keys, sent with every request."""
    server: MeasuredServerFlags
    json: Json = False
    output: Path | None = None
    """Write the JSON to this file."""
    plot: Path | None = None
    """Plot latencies and throughput over time: .svg, .png or .pdf."""
    overwrite: Overwrite = False
    sampling: TimedSampling

    def body(self) -> dict[str, Any]:
        """What is sent with every request; raises `ConfigError` or `RequestError`."""
        params = {**self.sampling, "temperature": self.temperature, "seed": self.seed}
        SamplingParams.from_mapping(params)  # raises for invalid values
        extra = {} if self.extra_body is None else parse_json(self.extra_body, "--extra-body")
        if not isinstance(extra, dict):
            raise ConfigError(f"--extra-body takes a JSON object, got {self.extra_body!r}")
        return params | extra

    def plan(self) -> LoadPlan:
        """The load, with everything checked that can be before it begins; gets the model's name from the server."""
        from slipstream.assets.workload.reading import read_workload
        from slipstream.tools.bench.result import Arrivals
        from slipstream.tools.bench.server.load import LoadPlan, first_turns

        if self.concurrency is not None and self.rate is not None:
            raise ConfigError("--concurrency is a closed loop and --rate an open one; give one of them")
        body = self.body()
        if self.plot is not None:
            check_plot(self.plot, self.overwrite)
        if self.output is not None:
            check_file(self.output, self.overwrite)
        questions = read_workload(self.workload)
        loop = None if self.rate else self.concurrency or DEFAULT_CONCURRENCY
        return filled(
            LoadPlan,
            self,
            workload=questions.source,
            prompts=first_turns(questions, self.task or [], self.max_tokens),
            server=self.server.measured(self.url),
            arrivals=Arrivals(loop, self.rate, self.seed),
            num_requests=self.num_requests or (None if self.duration else DEFAULT_REQUESTS),
            duration_s=self.duration,
            sampling=body,
        )


@with_flags
def load(flags: LoadFlags) -> None:
    """Put an OpenAI-compatible server under load, and report latencies, throughput, errors and acceptance.

    After Ctrl-C the report covers the requests finished by then.
    """
    from slipstream.tools.bench.server.load import run

    result = run(flags.plan())
    _deliver(result, flags)
    if not result.complete:
        raise typer.Exit(130)


def _deliver(result: LoadResult, flags: LoadFlags) -> None:
    from slipstream.tools.bench.report.load_report import load_remarks, load_tables, plot_load

    if flags.output is not None:
        write_json(flags.output, result.as_json())
    if flags.plot is not None and result.requests:
        plot_load(result, flags.plot)
    if flags.json:
        print_json(result.as_json())
    else:
        print_report(load_tables(result), load_remarks(result))
    say_written(file for file in (flags.output, flags.plot) if file is not None and file.exists())
