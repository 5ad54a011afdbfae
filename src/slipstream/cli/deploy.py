"""`slipstream deploy`: replicas on Ray Serve."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

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
from slipstream.deploy.settings import DeploySettings
from slipstream.errors import ConfigError

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
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_CLUSTER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.", rich_help_panel=_CLUSTER)] = 8000,
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
    from slipstream.deploy import cluster

    if stop or status:
        cluster.connect(address or "auto")
        if stop:
            cluster.stop(name)
            notes().print(f"{name} is stopped", markup=False)
        else:
            print("\n".join(cluster.states(name)))
        return
    given = {"num_replicas": replicas, "max_replicas": max_replicas, "num_cpus": cpus, "num_gpus": gpus}
    settings = _settings(model, config, given, speculation, engine)
    if print_config:
        print(settings.as_serve_yaml(name, host, port), end="")
        return
    cluster.connect(address)
    console = notes()
    try:
        console.print(f"starting {settings.num_replicas} replicas; each loads the model", markup=False)
        cluster.run(settings, name, host, port)
        console.print(f"{name} serves at http://{host}:{port}", markup=False)
        if address is None:
            console.print("Ctrl-C ends it", markup=False)
            _wait_for_signal()
    finally:
        if address is None:
            cluster.shut_down()


def _settings(
    model: str | None, config: Path | None, given: dict[str, Any], speculation: Values, engine: Values
) -> DeploySettings:
    """Flags over the file; raises `ConfigError`."""
    from slipstream.assets import EMBEDDED_TARGET

    values: dict[str, Any] = {} if config is None else dict(read_file(config))
    values |= {name: value for name, value in given.items() if value is not None}
    if model is not None or "model" not in values:
        values["model"] = model or EMBEDDED_TARGET
    if not isinstance(values.get("engine", {}), dict):
        raise ConfigError(f"engine in {config} must hold names and values, got {values['engine']!r}")
    values["engine"] = {**values.get("engine", {}), **engine}
    if speculation:
        chosen = chosen_speculation(speculation, model)
        values["speculative_config"] = chosen.as_mapping()
    return DeploySettings.from_mapping(values)


def _wait_for_signal() -> None:
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    over.wait()
