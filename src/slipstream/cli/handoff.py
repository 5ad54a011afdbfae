"""`slipstream handoff vllm`: hands a model to vLLM with our setting, and watches it by its metrics."""

from __future__ import annotations

import json as json_
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.flags.flags import Values, with_flags
from slipstream.cli.flags.help import PlainHelp
from slipstream.cli.flags.options import SPECULATION, Json, ModelArgument, chosen_speculation, with_model
from slipstream.cli.flags.remote import api_key_of
from slipstream.cli.output.console import notes
from slipstream.cli.output.writing import Overwrite
from slipstream.errors import ConfigError, RemoteError
from slipstream.profiling.provenance import without_folders

if TYPE_CHECKING:
    from slipstream.tools.handoff.pairs import ProbePrompts
    from slipstream.tools.handoff.plan import HandoffPlan, OffSide
    from slipstream.tools.handoff.run import Handoff
    from slipstream.tools.handoff.setting import VllmSetting

app = typer.Typer(help="Hand a model to another engine with our speculative setting, and watch it.")

_START, _OFF, _WATCH = "Start", "Off side of paired probes", "Watch"
EMBEDDED_NAME = "embedded-pair"
NUM_SHOWN_LINES = 20
"""Of what a server printed that did not start, or ended."""


@app.command(name="vllm", cls=PlainHelp)
@with_model
@with_flags(speculation=SPECULATION)
def hand_to_vllm(
    model: ModelArgument = None,
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAGS]", help="Further flags of vllm serve, behind --.")
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="vLLM's command; the one on the PATH by default.", rich_help_panel=_START
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address that vLLM listens on.", rich_help_panel=_START)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port that vLLM listens on.", rich_help_panel=_START)
    ] = 8000,
    start_timeout_s: Annotated[
        float, typer.Option(min=1, help="Seconds that loading may take.", rich_help_panel=_START)
    ] = 1800.0,
    vllm_log: Annotated[
        Path | None, typer.Option(help="Append all that vLLM prints to this file.", rich_help_panel=_START)
    ] = None,
    nearest: Annotated[
        bool,
        typer.Option(
            "--nearest",
            help="Where vLLM cannot run the setting, start it with the nearest one.",
            rich_help_panel=_START,
        ),
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where a head is written in vLLM's layout; by default a temporary folder, removed at the end.",
            rich_help_panel=_START,
        ),
    ] = None,
    overwrite: Overwrite = False,
    attach: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Start nothing: watch the vLLM that runs there.", rich_help_panel=_START
        ),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="The model's name there; by default the first that it lists.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="Environment variable with the key that vLLM and the dashboard's data ask for."),
    ] = None,
    off_side: Annotated[
        str,
        typer.Option(
            metavar="none|instance|canary",
            help="instance: a second server without speculation. canary: the one server, restarted without it.",
            rich_help_panel=_OFF,
        ),
    ] = "none",
    off_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the second server.", rich_help_panel=_OFF)
    ] = 8002,
    off_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="A second server that runs already; none is started.", rich_help_panel=_OFF
        ),
    ] = None,
    off_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Environment variable of the second server alone, as CUDA_VISIBLE_DEVICES=1. May be repeated.",
            rich_help_panel=_OFF,
        ),
    ] = None,
    probe_every_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds between the pairs of an instance.", rich_help_panel=_OFF)
    ] = 60.0,
    probe_workload: Annotated[
        str,
        typer.Option(
            help="Prompts of the probes: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE.",
            rich_help_panel=_OFF,
        ),
    ] = "sample",
    probe_tokens: Annotated[
        int, typer.Option(min=2, help="The most tokens in a probe's answer.", rich_help_panel=_OFF)
    ] = 64,
    canary_pairs: Annotated[
        int, typer.Option(min=3, help="Pairs of a canary's round.", rich_help_panel=_OFF)
    ] = 24,
    canary_every_s: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Repeat the canary's round so often; each restarts vLLM twice. By default one round, at the start.",
            rich_help_panel=_OFF,
        ),
    ] = None,
    watch_host: Annotated[
        str, typer.Option(help="Address of the dashboard and of its metrics.", rich_help_panel=_WATCH)
    ] = "127.0.0.1",
    watch_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Their port; 0 takes a free one.", rich_help_panel=_WATCH)
    ] = 8001,
    json: Json = False,
    *,
    speculation: Values,
) -> None:
    """Start vllm serve with the setting that slipstream export writes, or attach to a running vLLM, and watch it.

    bench --url, load and audit work on the server; dashboard, metrics and alarms come from its own metrics.
    """
    from slipstream.assets import EMBEDDED_TARGET
    from slipstream.tools.handoff import plan as plans
    from slipstream.tools.handoff.process import find_vllm, version_of
    from slipstream.tools.handoff.setting import VllmSetting, exported

    model, words = _words(model, extra)
    side = _side(off_side)
    key = api_key_of(api_key_env)
    probes = _probes(probe_workload, probe_tokens) if side != plans.OffSide.NONE else None
    if off_url is not None and side != plans.OffSide.INSTANCE:
        raise ConfigError("--off-url is the second server of --off-side instance")
    shared: dict[str, Any] = {
        "off_side": side,
        "served_model": served_model,
        "api_key": key,
        "start_timeout_s": start_timeout_s,
        "log": vllm_log,
        "probes": probes,
        "probe_every_s": probe_every_s,
        "canary_pairs": canary_pairs,
        "canary_every_s": canary_every_s,
        "off_environment": _environment(off_env),
    }
    if attach is not None:
        _refuse_with_attach(model, words, vllm, speculation, nearest, checkpoint)
        plan = plans.HandoffPlan(
            url=plans.plain_url(attach),
            method="vLLM's own",
            off_url=None if off_url is None else plans.plain_url(off_url),
            **shared,
        )
        start_and_watch(plan, VllmSetting((), plan.method), watch_host, watch_port, json)
        return
    program = find_vllm(vllm)
    with tempfile.TemporaryDirectory(
        prefix="slipstream-handoff-"
    ) as temporary:  # vLLM may be restarted from it
        setting = exported(
            chosen_speculation(speculation, model),
            EMBEDDED_TARGET if model is None else model,
            version_of(program),
            checkpoint or Path(temporary),
            nearest=nearest,
            overwrite=overwrite,
        )
        plan = _started(model, words, program, (host, port), setting, (off_port, off_url), shared)
        start_and_watch(plan, setting, watch_host, watch_port, json)


def _words(model: str | None, extra: list[str] | None) -> tuple[str | None, list[str]]:
    """(the model, vLLM's own flags); without a model the first flag comes in its place."""
    from slipstream.tools.handoff.plan import check_extra

    words = list(extra or [])
    if model is not None and model.startswith("-"):
        words.insert(0, model)
        model = None
    check_extra(words)
    if words and not words[0].startswith("-"):
        raise ConfigError(
            f"{words[0]!r} is no flag; flags of vllm serve come behind --: handoff vllm MODEL -- FLAGS"
        )
    return model, words


def _side(name: str) -> OffSide:
    from slipstream.config import reject_unknown
    from slipstream.tools.handoff.plan import OffSide

    reject_unknown([name], list(OffSide), "--off-side")
    return OffSide(name)


def _environment(given: list[str] | None) -> dict[str, str]:
    for text in given or []:
        if not text.partition("=")[0] or "=" not in text:
            raise ConfigError(f"--off-env takes NAME=VALUE, got {text!r}")
    return dict(text.split("=", 1) for text in given or [])


def _probes(workload: str, max_tokens: int) -> ProbePrompts:
    from slipstream.assets.workload.reading import read_workload
    from slipstream.tools.bench.server.load import first_turns
    from slipstream.tools.handoff.pairs import ProbePrompts

    return ProbePrompts(first_turns(read_workload(workload), [], max_tokens))


def _refuse_with_attach(
    model: str | None,
    extra: list[str],
    vllm: str | None,
    speculation: Values,
    nearest: bool,
    checkpoint: Path | None,
) -> None:
    """Raise `ConfigError` for what would start a server."""
    given = {
        "MODEL": model,
        "--vllm": vllm,
        "flags behind --": extra or None,
        "--spec": speculation or None,
        "--nearest": nearest or None,
        "--checkpoint": checkpoint,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"--attach names a server that runs with a setting of its own; omit {name}, or let handoff start it"
            )


def _started(
    model: str | None,
    extra: list[str],
    program: str,
    where: tuple[str, int],
    setting: VllmSetting,
    off: tuple[int, str | None],
    shared: dict[str, Any],
) -> HandoffPlan:
    """The plan of a server that is started; raises `ConfigError` before anything is."""
    from slipstream.assets import EMBEDDED_TARGET
    from slipstream.tools.handoff.plan import (
        HandoffPlan,
        OffSide,
        ServeCommand,
        check_free,
        plain_url,
        url_of,
    )

    target = EMBEDDED_TARGET if model is None else model
    host, port = where
    off_port, off_url = off
    check_free(host, port, "--port")
    side = shared["off_side"]
    if side == OffSide.INSTANCE and off_url is None:
        if off_port == port:
            raise ConfigError(
                f"--off-port and --port are both {port}; the second server needs a port of its own"
            )
        check_free(host, off_port, "--off-port")
    if side != OffSide.NONE and not setting.flags:
        raise ConfigError(
            "without speculation there is nothing to compare: omit --off-side, or choose a --spec"
        )
    name = EMBEDDED_NAME if model is None and "--served-model-name" not in extra else None
    command = ServeCommand(program, target, host, port, setting.flags, extra, name)
    without = replace(command, setting=())
    starts_off = side == OffSide.CANARY or (side == OffSide.INSTANCE and off_url is None)
    at_instance = side == OffSide.INSTANCE and off_url is None
    return HandoffPlan(
        url=url_of(host, port),
        method=setting.method,
        command=command.words(),
        off_command=(replace(without, port=off_port) if at_instance else without).words()
        if starts_off
        else None,
        off_url=url_of(host, off_port) if at_instance else None if off_url is None else plain_url(off_url),
        **shared,
    )


def start_and_watch(plan: HandoffPlan, setting: VllmSetting, host: str, port: int, json: bool) -> None:
    from slipstream.serve import logs
    from slipstream.serve.config import ServeConfig
    from slipstream.serve.network.listening import bind
    from slipstream.tools.handoff.plan import url_of
    from slipstream.tools.handoff.run import Handoff

    bound = bind(host, port)  # before vLLM loads the model: the port may be in use
    console = notes()
    for note in setting.notes:
        console.print(f"note: {note}", markup=False)
    if plan.command is not None:
        console.print(f"starts: {without_folders(shlex.join(plan.command))}", markup=False)
    logs.configure(ServeConfig(log_level="warning", log_format="text"))
    handoff = Handoff(plan)
    try:
        handoff.start()
        _announce(handoff, url_of(host, bound.getsockname()[1]), json)
        handoff.serve(bound)
    except RemoteError:
        for line in handoff.last_lines[-NUM_SHOWN_LINES:]:
            console.print(f"  {line}", markup=False)
        raise
    finally:
        handoff.stop()
        bound.close()


def _announce(handoff: Handoff, watch_url: str, json: bool) -> None:
    """Say where everything is, on standard error; with `json` as one object on standard output."""
    plan = handoff.plan
    assert handoff.watch is not None
    if json:
        told = {
            "url": plan.url,
            "model": handoff.watch.server.model,
            "method": plan.method,
            "command": None if plan.command is None else list(plan.command),
            "off_side": str(plan.off_side),
            "off_url": plan.off_url,
            "watch_url": watch_url,
            "pids": handoff.pids,
        }
        print(json_.dumps(told), flush=True)
        return
    lines = [
        f"vLLM       {plan.url}/v1",
        f"dashboard  {watch_url}/dashboard, metrics and alarms at {watch_url}/metrics",
        f"bench      slipstream bench --url {plan.url}/v1",
        f"load       slipstream load {plan.url}",
    ]
    if plan.off_url is not None:
        lines.append(f"audit      slipstream audit {plan.url} --against {plan.off_url}")
    for line in lines:
        notes().print(line, markup=False)
