"""`slipstream deploy`: replicas on Ray Serve."""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from slipstream.assets import EMBEDDED
from slipstream.assets.embedded import portable
from slipstream.cli.flags.flags import with_flags
from slipstream.cli.flags.options import EngineValues, ModelArgument, SpeculationValues, chosen_speculation
from slipstream.cli.flags.settings import read_file
from slipstream.cli.output.console import stderr
from slipstream.core.model_path import model_id
from slipstream.core.pretrained import name_of
from slipstream.deploy import cluster
from slipstream.deploy.cluster import HOST, PORT
from slipstream.deploy.room import shortage
from slipstream.deploy.settings import DeploySettings
from slipstream.errors import ConfigError, DeployError
from slipstream.profiling.machine import num_cpus
from slipstream.serve.network.listening import bind


@dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    """The replicas."""

    num_replicas: Annotated[int | None, Option("--replicas", min=1)] = None
    """How many."""
    max_replicas: Annotated[int | None, Option(min=1)] = None
    """Scale up to so many with the load."""
    num_cpus: Annotated[float | None, Option("--cpus")] = None
    """Cores for each, by default 1."""
    num_gpus: Annotated[float | None, Option("--gpus")] = None
    """GPUs for each, by default none."""


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """The application, and the cluster on which it runs."""

    address: str | None = None
    """A Ray cluster that exists: auto, HOST:PORT or ray://HOST:PORT. Without it one of this machine is started, which
    ends with this command."""
    name: str = "slipstream"
    """The application's name."""
    host: Annotated[
        str | None,
        Option(help=f"Address to listen on, by default {HOST}. A cluster has one for all its applications."),
    ] = None
    port: Annotated[int | None, Option(min=1, max=65535, help=f"HTTP port, by default {PORT}.")] = None
    stop: bool = False
    """Take the application off the cluster at --address."""
    status: bool = False
    """Say how the application at --address is."""


@dataclass(frozen=True, kw_only=True)
class DeployFlags:
    """A deployment."""

    model: ModelArgument = None
    config: Path | None = None
    """YAML or TOML file of deployment settings: model, num_replicas, engine, serve, router and others, as in the guide.
    Flags take precedence."""
    replicas: Annotated[ReplicaFlags, "Replicas"]
    cluster: Annotated[ClusterFlags, "Cluster"]
    print_config: bool = False
    """Print the config file for `serve deploy` and KubeRay, and do nothing."""
    speculation: SpeculationValues
    engine: EngineValues

    def settings(self) -> DeploySettings:
        """Flags over the file; raises `ConfigError`."""
        values: dict[str, Any] = {} if self.config is None else dict(read_file(self.config))
        values |= {name: value for name, value in asdict(self.replicas).items() if value is not None}
        if self.model is not None or "model" not in values:
            values["model"] = EMBEDDED if self.model is None else name_of(self.model)
        if not isinstance(values.get("engine", {}), dict):
            raise ConfigError(f"engine in {self.config} must hold names and values, got {values['engine']!r}")
        values["engine"] = {**values.get("engine", {}), **self.engine}
        if not isinstance(values["model"], str):
            raise ConfigError(f"model in {self.config} must be a folder or hub id, got {values['model']!r}")
        is_embedded = values["model"] == EMBEDDED
        if self.speculation or (is_embedded and "speculative_config" not in values):
            chosen = chosen_speculation(self.speculation, None if is_embedded else values["model"])
            values["speculative_config"] = portable(chosen.as_mapping())
        return DeploySettings.from_mapping(values)


@with_flags
def deploy(flags: DeployFlags) -> None:
    """Serve a model by replicas on Ray Serve, behind a router that goes on elsewhere where one of them fails.

    Answers do not change where a replica dies under way: the rest comes from another one, token for token. Needs
    slipstream-llm[deploy].
    """
    where = flags.cluster
    if where.stop or where.status:
        _ask_cluster(where)
        return
    settings = flags.settings()
    from slipstream.deploy.check import check_server

    check_server(settings)
    if flags.print_config:
        print(settings.as_serve_yaml(where.name, where.host or HOST, where.port or PORT), end="")
        return
    _end_at_sigterm()
    if where.address is None:
        _deploy_here(settings, where)
    else:
        _deploy_there(settings, where, where.address)


def _ask_cluster(where: ClusterFlags) -> None:
    """Say how an application is, or stop it."""
    cluster.connect(where.address or "auto")
    if where.stop:
        cluster.stop(where.name)
        stderr().print(f"{where.name} is stopped", markup=False)
    else:
        print("\n".join(cluster.standing(where.name).lines(cluster.address())))


def _deploy_here(settings: DeploySettings, where: ClusterFlags) -> None:
    """A cluster of this machine, until a signal."""
    cluster.require_ray()
    _refuse(shortage(settings, {"CPU": num_cpus()}, "this machine"))
    from slipstream.deploy.check import check_settings

    check_settings(settings)
    bind(where.host or HOST, where.port or PORT).close()  # it may be in use
    say = partial(stderr().print, markup=False)
    say(f"starting {settings.num_replicas} replicas; each loads the model")
    cluster.connect(None, num_cpus())
    try:
        _end_at_sigterm()  # Ray has set a handler of its own
        _refuse(shortage(settings, cluster.resources(), "this machine"))
        url = cluster.run(settings, where.name, where.host, where.port, say)
        say(f"{where.name} serves {model_id(settings.served_name)} at {url}; Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        say("ending: answers under way have half a minute")
    finally:
        cluster.shut_down()


def _deploy_there(settings: DeploySettings, where: ClusterFlags, address: str) -> None:
    """An application of a cluster that exists: everything is checked before one that runs is touched."""
    cluster.connect(address)
    _end_at_sigterm()
    cluster.check_address(where.host, where.port)
    cluster.check(settings)
    say = partial(stderr().print, markup=False)
    missing = shortage(settings, cluster.resources(), "the cluster")
    if missing:
        say(f"{missing}; the rest wait until it grows")
    say(f"starting {settings.num_replicas} replicas, one after another where {where.name} runs already")
    url = cluster.run(settings, where.name, where.host, where.port, say)
    say(f"{where.name} serves {model_id(settings.served_name)} at {url}")


def _refuse(why: str) -> None:
    if why:
        raise DeployError(why)


def _end_at_sigterm() -> None:
    """SIGTERM ends the command as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
