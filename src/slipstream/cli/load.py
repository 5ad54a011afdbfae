"""`slipstream load`: puts a server under load and measures it through its clients."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.flags.flags import Values, parse_json, with_flags
from slipstream.cli.flags.options import Json, print_json
from slipstream.cli.flags.remote import TIMED_SAMPLING, api_key_of, metrics_url_of
from slipstream.cli.output.console import notes, wide_results
from slipstream.cli.output.profile_plot import check_plot
from slipstream.cli.output.writing import Overwrite, check_file, write_text
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8


@with_flags(sampling=TIMED_SAMPLING)
def load(
    url: Annotated[str, typer.Argument(help="An OpenAI-compatible server, as in http://localhost:8000/v1.")],
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"A closed loop of this many clients: each sends its next request after its last answer. "
            f"{DEFAULT_CONCURRENCY} unless there is a --rate.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="An open loop: Poisson arrivals with this mean number of requests a second.",
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of requests; {DEFAULT_REQUESTS} unless there is a --duration."),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds of sending; running requests are then completed."),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            "--workload", "-w", help="Prompts: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE."
        ),
    ] = "sample",
    task: Annotated[
        list[str] | None,
        typer.Option(help="Only questions of this task; may be repeated. By default all tasks, interleaved."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens in an answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Arrivals and each request's own seed are derived from it.")
    ] = 0,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Stream the answers.")] = True,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send plain prompts to /completions instead of the chat.")
    ] = False,
    send_task: Annotated[
        bool, typer.Option("--send-task", help="Send each prompt's task as `task`, which Slipstream knows.")
    ] = False,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Further keys, sent with every request.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="The model's name there; by default the first that it lists.")
    ] = None,
    metrics_url: Annotated[
        str | None, typer.Option(help="Its Prometheus metrics; by default /metrics beside /v1.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the server's API key.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Seconds without a byte until a request fails.")
    ] = 600.0,
    json: Json = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot latencies and throughput over time: .svg, .png or .pdf.")
    ] = None,
    overwrite: Overwrite = False,
    *,
    sampling: Values,
) -> None:
    """Put an OpenAI-compatible server under load, and report latencies, throughput, errors and acceptance.

    After Ctrl-C the report covers the requests finished by then.
    """
    from slipstream.assets.workload.reading import read_workload
    from slipstream.rpc.client import ServerAddress, find_model, find_url
    from slipstream.tools.bench.server.load import LoadPlan, first_turns, run
    from slipstream.tools.bench.server.load_result import Arrivals

    if concurrency is not None and rate is not None:
        raise ConfigError("--concurrency is a closed loop and --rate an open one; give one of them")
    SamplingParams.from_mapping(
        {**sampling, "temperature": temperature, "seed": seed}
    )  # raises for invalid values
    extra = _extra(extra_body)
    if plot is not None:
        check_plot(plot, overwrite)
    if output is not None:
        check_file(output, overwrite)
    questions = read_workload(workload)
    prompts = first_turns(questions, task or [], max_tokens)
    key = api_key_of(api_key_env)
    found_url = find_url(url, key, timeout_s)
    name = served_model or find_model(found_url, key, timeout_s)
    result = run(
        LoadPlan(
            server=ServerAddress(found_url, name, metrics_url or metrics_url_of(found_url), key, timeout_s),
            workload=questions.source,
            prompts=prompts,
            arrivals=Arrivals(None if rate else concurrency or DEFAULT_CONCURRENCY, rate, seed),
            num_requests=num_requests or (None if duration else DEFAULT_REQUESTS),
            duration_s=duration,
            sampling={**sampling, "temperature": temperature, "seed": seed, **extra},
            stream=stream,
            raw=raw,
            send_task=send_task,
        )
    )
    _deliver(result, json, output, plot)
    if not result.complete:
        raise typer.Exit(130)


def _extra(text: str | None) -> dict[str, Any]:
    value = {} if text is None else parse_json(text, "--extra-body")
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body takes a JSON object, got {text!r}")
    return value


def _deliver(result: Any, json: bool, output: Path | None, plot: Path | None) -> None:
    """Write and print the result; files first, so that a closed pipe does not lose them."""
    from slipstream.tools.bench.report.load_report import load_remarks, load_tables, plot_load

    if output is not None:
        text = json_.dumps(result.as_json(), ensure_ascii=False, indent=1)
        write_text(output, text + "\n")
    if plot is not None and result.requests:
        plot_load(result, plot)
    if json:
        print_json(result.as_json())
    else:
        console = wide_results()
        for grid in load_tables(result):
            console.print(grid.rich())
        for line in load_remarks(result):
            console.print(line, markup=False, soft_wrap=True)
    for file in (output, plot):
        if file is not None and file.exists():
            notes().print(f"written: {file}", markup=False)
