"""`slipstream handoff vllm`: hands a model to vLLM with our setting, and watches it by its metrics."""

from __future__ import annotations

import json as json_
import shlex
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from slipstream.cli.flags.flags import PlainHelp, filled, with_flags
from slipstream.cli.flags.options import Json, ModelArgument, SpeculationValues, chosen_speculation
from slipstream.cli.flags.remote import api_key_of
from slipstream.cli.output.console import stderr
from slipstream.cli.output.writing import Overwrite
from slipstream.errors import ConfigError, RemoteError
from slipstream.profiling.provenance import without_folders

if TYPE_CHECKING:
    from slipstream.tools.handoff.pairs import ProbePrompts
    from slipstream.tools.handoff.plan import HandoffPlan
    from slipstream.tools.handoff.run import Handoff
    from slipstream.tools.handoff.setting import VllmSetting

app = typer.Typer(help="Hand a model to another engine with our speculative setting, and watch it.")

EMBEDDED_NAME = "embedded-pair"
NUM_SHOWN_LINES = 20
"""Lines that are shown of what a server printed that did not start, or ended."""


@dataclass(frozen=True, kw_only=True)
class StartFlags:
    """How vLLM is started, or where it runs."""

    vllm: Annotated[str | None, Option(metavar="PATH")] = None
    """vLLM's command; the one on the PATH by default."""
    host: str = "127.0.0.1"
    """Address that vLLM listens on."""
    port: Annotated[int, Option(min=1, max=65535)] = 8000
    """Port that vLLM listens on."""
    start_timeout_s: Annotated[float, Option(min=1)] = 1800.0
    """Seconds that loading may take."""
    vllm_log: Path | None = None
    """Append all that vLLM prints to this file."""
    nearest: Annotated[bool, Option("--nearest")] = False
    """Where vLLM cannot run the setting, start it with the nearest one."""
    checkpoint: Annotated[Path | None, Option(metavar="FOLDER")] = None
    """Where a head is written in vLLM's layout; by default a temporary folder, removed at the end."""
    attach: Annotated[str | None, Option(metavar="URL")] = None
    """Start nothing: watch the vLLM that runs there."""


@dataclass(frozen=True, kw_only=True)
class ProbeFlags:
    """The paired probes, and where their side without speculation is."""

    off_side: Annotated[str, Option(metavar="none|instance|canary")] = "none"
    """instance: a second server without speculation. canary: the one server, restarted without it."""
    off_port: Annotated[int, Option(min=1, max=65535)] = 8002
    """Port of the second server."""
    off_url: Annotated[str | None, Option(metavar="URL")] = None
    """A second server that runs already; none is started."""
    off_env: Annotated[list[str] | None, Option(metavar="NAME=VALUE")] = None
    """Environment variable of the second server alone, as CUDA_VISIBLE_DEVICES=1. May be repeated."""
    probe_every_s: Annotated[float, Option(min=0.1)] = 60.0
    """Seconds between the pairs of an instance."""
    probe_workload: str = "sample"
    """Prompts of the probes: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE."""
    probe_tokens: Annotated[int, Option(min=2)] = 64
    """The most tokens in a probe's answer."""
    canary_pairs: Annotated[int, Option(min=3)] = 24
    """Pairs of a canary's round."""
    canary_every_s: Annotated[float | None, Option(min=1)] = None
    """Repeat the canary's round so often; each restarts vLLM twice. By default one round, at the start."""


@dataclass(frozen=True, kw_only=True)
class WatchFlags:
    """Where the hand-off itself listens."""

    watch_host: str = "127.0.0.1"
    """Address of the dashboard and of its metrics."""
    watch_port: Annotated[int, Option(min=0, max=65535)] = 8001
    """Their port; 0 takes a free one."""


@dataclass(frozen=True, kw_only=True)
class HandoffFlags:
    """A hand-off."""

    model: ModelArgument = None
    extra: Annotated[list[str] | None, Argument(metavar="[-- FLAGS]")] = None
    """Further flags of vllm serve, behind --."""
    start: Annotated[StartFlags, "Start"]
    overwrite: Overwrite = False
    served_model: str | None = None
    """The model's name there; by default the first that it lists."""
    api_key_env: str | None = None
    """Environment variable with the key that vLLM and the dashboard's data require."""
    off: Annotated[ProbeFlags, "Off side of paired probes"]
    watch: Annotated[WatchFlags, "Watch"]
    json: Json = False
    speculation: SpeculationValues

    def in_place(self) -> HandoffFlags:
        """Return `model` and `extra` as they are meant: without a model vLLM's first flag is in its place."""
        from slipstream.tools.handoff.plan import check_extra

        words, model = list(self.extra or []), self.model
        if model is not None and model.startswith("-"):
            words.insert(0, model)
            model = None
        check_extra(words)
        if words and not words[0].startswith("-"):
            raise ConfigError(
                f"{words[0]!r} is no flag; flags of vllm serve come behind --: handoff vllm MODEL -- FLAGS"
            )
        return replace(self, model=model, extra=words)

    def check_attached(self) -> None:
        """Raise `ConfigError` for what would start a server, which --attach does not."""
        start = self.start
        given = {
            "MODEL": self.model,
            "--vllm": start.vllm,
            "flags behind --": self.extra or None,
            "--spec": self.speculation or None,
            "--nearest": start.nearest or None,
            "--checkpoint": start.checkpoint,
        }
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"--attach names a server that runs with a setting of its own; omit {name}, or let handoff start it"
                )

    def shared(self) -> dict[str, Any]:
        """What a plan takes from the flags, whether vLLM is started or runs already."""
        from slipstream.config import reject_unknown
        from slipstream.tools.handoff.plan import OffSide

        off = self.off
        reject_unknown([off.off_side], list(OffSide), "--off-side")
        key = api_key_of(self.api_key_env)
        probes = None if off.off_side == OffSide.NONE else _probes(off.probe_workload, off.probe_tokens)
        if off.off_url is not None and off.off_side != OffSide.INSTANCE:
            raise ConfigError("--off-url is the second server of --off-side instance")
        return {
            "off_side": OffSide(off.off_side),
            "served_model": self.served_model,
            "api_key": key,
            "start_timeout_s": self.start.start_timeout_s,
            "log": self.start.vllm_log,
            "probes": probes,
            "off_environment": _environment(off.off_env),
        }


@app.command(name="vllm", cls=PlainHelp)
@with_flags
def hand_to_vllm(flags: HandoffFlags) -> None:
    """Start vllm serve with the setting that slipstream export writes, or attach to a running vLLM, and watch it.

    bench --url, load and audit work on the server; dashboard, metrics and alarms come from its own metrics.
    """
    from slipstream.assets import EMBEDDED_TARGET
    from slipstream.tools.handoff import plan as plans
    from slipstream.tools.handoff.process import find_vllm, version_of
    from slipstream.tools.handoff.setting import VllmSetting, exported

    flags = flags.in_place()
    start, off_url, shared = flags.start, flags.off.off_url, flags.shared()
    if start.attach is not None:
        flags.check_attached()
        shared |= {"url": plans.plain_url(start.attach), "method": "vLLM's own"}
        shared["off_url"] = None if off_url is None else plans.plain_url(off_url)
        plan = filled(plans.HandoffPlan, flags.off, **shared)
        start_and_watch(plan, VllmSetting((), plan.method), flags.watch, flags.json)
        return
    program = find_vllm(start.vllm)
    # vLLM may be restarted from the folder, so it is there until the end.
    with tempfile.TemporaryDirectory(prefix="slipstream-handoff-") as temporary:
        setting = exported(
            chosen_speculation(flags.speculation, flags.model),
            flags.model or EMBEDDED_TARGET,
            version_of(program),
            start.checkpoint or Path(temporary),
            nearest=start.nearest,
            overwrite=flags.overwrite,
        )
        start_and_watch(_started(flags, program, setting, shared), setting, flags.watch, flags.json)


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


def _started(flags: HandoffFlags, program: str, setting: VllmSetting, shared: dict[str, Any]) -> HandoffPlan:
    """The plan of a server that is started; raises `ConfigError` before anything is."""
    from slipstream.assets import EMBEDDED_TARGET
    from slipstream.tools.handoff import plan as plans

    host, port, off, extra = flags.start.host, flags.start.port, flags.off, flags.extra or []
    plans.check_free(host, port, "--port")
    side = shared["off_side"]
    at_instance = side == plans.OffSide.INSTANCE and off.off_url is None
    if at_instance:
        if off.off_port == port:
            raise ConfigError(
                f"--off-port and --port are both {port}; the second server needs a port of its own"
            )
        plans.check_free(host, off.off_port, "--off-port")
    if side != plans.OffSide.NONE and not setting.flags:
        raise ConfigError(
            "without speculation there is nothing to compare: omit --off-side, or choose a --spec"
        )
    name = EMBEDDED_NAME if flags.model is None and "--served-model-name" not in extra else None
    model = flags.model or EMBEDDED_TARGET
    command = plans.ServeCommand(program, model, host, port, setting.flags, extra, name)
    without = replace(command, setting=(), port=off.off_port if at_instance else port)
    off_url = off.off_url and plans.plain_url(off.off_url)
    return filled(
        plans.HandoffPlan,
        off,
        url=plans.url_of(host, port),
        method=setting.method,
        command=command.words(),
        off_command=without.words() if at_instance or side == plans.OffSide.CANARY else None,
        off_url=plans.url_of(host, off.off_port) if at_instance else off_url,
        **shared,
    )


def start_and_watch(plan: HandoffPlan, setting: VllmSetting, watch: WatchFlags, json: bool) -> None:
    from slipstream.serve import logs
    from slipstream.serve.config import ServeConfig
    from slipstream.serve.network.listening import bind
    from slipstream.tools.handoff.plan import url_of
    from slipstream.tools.handoff.run import Handoff

    bound = bind(watch.watch_host, watch.watch_port)  # before vLLM loads the model: the port may be in use
    console = stderr()
    for note in setting.notes:
        console.print(f"note: {note}", markup=False)
    if plan.command is not None:
        console.print(f"starts: {without_folders(shlex.join(plan.command))}", markup=False)
    logs.configure(ServeConfig(log_level="warning", log_format="text"))
    handoff = Handoff(plan)
    try:
        handoff.start()
        _announce(handoff, url_of(watch.watch_host, bound.getsockname()[1]), json)
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
        document = {
            "url": plan.url,
            "model": handoff.watch.server.model,
            "method": plan.method,
            "command": None if plan.command is None else list(plan.command),
            "off_side": str(plan.off_side),
            "off_url": plan.off_url,
            "watch_url": watch_url,
            "pids": handoff.pids,
        }
        print(json_.dumps(document), flush=True)
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
        stderr().print(line, markup=False)
