"""`slipstream deploy`: replicas on Ray Serve."""

from __future__ import annotations

import contextlib
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.assets import EMBEDDED, EMBEDDED_DRAFTERS
from slipstream.cli.flags.flags import Values, with_flags
from slipstream.cli.flags.options import (
    ENGINE,
    SPECULATION,
    ModelArgument,
    chosen_speculation,
    with_model,
)
from slipstream.cli.flags.settings import read_file
from slipstream.cli.output.console import notes
from slipstream.deploy import cluster
from slipstream.deploy.cluster import HOST, PORT
from slipstream.deploy.room import shortage
from slipstream.deploy.settings import DeploySettings
from slipstream.errors import ConfigError, DeployError
from slipstream.profiling.machine import num_cpus
from slipstream.reasoning.config import ReasoningConfig
from slipstream.serve.model_id import model_id
from slipstream.serve.network.listening import bind

_CLUSTER, _REPLICAS = "Cluster", "Replicas"


@with_model
@with_flags(speculation=SPECULATION, engine=ENGINE)
def deploy(
    model: ModelArgument = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML or TOML file of deployment settings: model, num_replicas, engine, serve, router and "
            "others, as in the guide. Flags take precedence."
        ),
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="How many.", rich_help_panel=_REPLICAS)] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Scale up to so many with the load.", rich_help_panel=_REPLICAS)
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(help="Cores for each, by default 1.", rich_help_panel=_REPLICAS)
    ] = None,
    gpus: Annotated[
        float | None, typer.Option(help="GPUs for each, by default none.", rich_help_panel=_REPLICAS)
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="A Ray cluster that exists: auto, HOST:PORT or ray://HOST:PORT. Without it one of this machine is "
            "started, which ends with this command.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(help="The application's name.", rich_help_panel=_CLUSTER)
    ] = "slipstream",
    host: Annotated[
        str | None,
        typer.Option(
            help=f"Address to listen on, by default {HOST}. A cluster has one for all its applications.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help=f"HTTP port, by default {PORT}.", rich_help_panel=_CLUSTER),
    ] = None,
    stop: Annotated[
        bool,
        typer.Option(help="Take the application off the cluster at --address.", rich_help_panel=_CLUSTER),
    ] = False,
    status: Annotated[
        bool, typer.Option(help="Say how the application at --address is.", rich_help_panel=_CLUSTER)
    ] = False,
    print_config: Annotated[
        bool, typer.Option(help="Print the config file for `serve deploy` and KubeRay, and do nothing.")
    ] = False,
    *,
    speculation: Values,
    engine: Values,
) -> None:
    """Serve a model by replicas on Ray Serve, behind a router that goes on elsewhere where one of them fails.

    Answers do not change where a replica dies under way: the rest comes from another one, token for token. Needs
    slipstream-llm[deploy].
    """
    if stop or status:
        _ask_cluster(address, name, stop)
        return
    given = {"num_replicas": replicas, "max_replicas": max_replicas, "num_cpus": cpus, "num_gpus": gpus}
    settings = _settings(model, config, given, speculation, engine)
    from slipstream.deploy.check import check_server

    check_server(settings)
    if print_config:
        print(settings.as_serve_yaml(name, host or HOST, port or PORT), end="")
        return
    _end_at_sigterm()
    if address is None:
        _deploy_here(settings, name, host, port)
    else:
        _deploy_there(settings, address, name, host, port)


def _ask_cluster(address: str | None, name: str, stop: bool) -> None:
    """Say how an application is, or stop it."""
    cluster.connect(address or "auto")
    if stop:
        cluster.stop(name)
        notes().print(f"{name} is stopped", markup=False)
    else:
        print("\n".join(cluster.standing(name).lines(cluster.address())))


def _deploy_here(settings: DeploySettings, name: str, host: str | None, port: int | None) -> None:
    """A cluster of this machine, until a signal."""
    cluster.require_ray()
    _refuse(shortage(settings, {"CPU": num_cpus()}, "this machine"))
    from slipstream.deploy.check import check_settings

    check_settings(settings)
    bind(host or HOST, port or PORT).close()  # it may be in use
    say = partial(notes().print, markup=False)
    say(f"starting {settings.num_replicas} replicas; each loads the model")
    cluster.connect(None, num_cpus())
    try:
        _end_at_sigterm()  # Ray has set a handler of its own
        _refuse(shortage(settings, cluster.resources(), "this machine"))
        where = cluster.run(settings, name, host, port, say)
        say(f"{name} serves {model_id(settings.served_name)} at {where}; Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        say("ending: answers under way have half a minute")
    finally:
        cluster.shut_down()


def _deploy_there(
    settings: DeploySettings, address: str, name: str, host: str | None, port: int | None
) -> None:
    """An application of a cluster that exists: everything is checked before one that runs is touched."""
    cluster.connect(address)
    _end_at_sigterm()
    cluster.check_address(host, port)
    cluster.check(settings)
    say = partial(notes().print, markup=False)
    missing = shortage(settings, cluster.resources(), "the cluster")
    if missing:
        say(f"{missing}; the rest wait until it grows")
    say(f"starting {settings.num_replicas} replicas, one after another where {name} runs already")
    where = cluster.run(settings, name, host, port, say)
    say(f"{name} serves {model_id(settings.served_name)} at {where}")


def _refuse(why: str) -> None:
    if why:
        raise DeployError(why)


def _settings(
    model: str | None, config: Path | None, given: dict[str, Any], speculation: Values, engine: Values
) -> DeploySettings:
    """Flags over the file; raises `ConfigError`."""
    values: dict[str, Any] = {} if config is None else dict(read_file(config))
    values |= {name: value for name, value in given.items() if value is not None}
    if model is not None or "model" not in values:
        values["model"] = model or EMBEDDED
    if not isinstance(values.get("engine", {}), dict):
        raise ConfigError(f"engine in {config} must hold names and values, got {values['engine']!r}")
    values["engine"] = {**values.get("engine", {}), **engine}
    is_embedded = values["model"] == EMBEDDED
    if speculation or (is_embedded and "speculative_config" not in values):
        chosen = chosen_speculation(speculation, None if is_embedded else values["model"])
        values["speculative_config"] = _portable(chosen.as_mapping())
    return DeploySettings.from_mapping(values)


def _portable(config: dict[str, Any]) -> dict[str, Any]:
    """With the embedded draft by its name: its folder is another one on another machine."""
    reasoning = config.get("reasoning") or {}
    if "model" in reasoning and reasoning["model"] == EMBEDDED_DRAFTERS.get(
        str(reasoning.get("method", ReasoningConfig.method))
    ):
        config = {**config, "reasoning": {**reasoning, "model": EMBEDDED}}
    if config.get("model") == EMBEDDED_DRAFTERS.get(config.get("method", "")):
        return {**config, "model": EMBEDDED}
    return config


def _end_at_sigterm() -> None:
    """SIGTERM ends the command as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
