"""A Ray cluster: connected to or started, an application run on it and taken off it. Ray is imported here only."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from typing import Any

from slipstream.deploy.settings import DeploySettings
from slipstream.errors import DeployError

CONNECT_TIMEOUT_S = 5.0


def require_ray() -> None:
    """Raise `DeployError` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise DeployError("slipstream deploy needs Ray: pip install 'slipstream-llm[deploy]'")


def connect(address: str | None, num_cpus: int | None = None) -> None:
    """Join the cluster at `address`, or start one of this machine; raises `DeployError`.

    `num_cpus` is what a cluster that is started may use, by default the machine's cores.
    """
    require_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody unless it is asked for
    import ray

    if address is not None:
        _check_there(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        if address is None:
            ray.init(num_cpus=num_cpus, include_dashboard=False, **options)
        else:
            ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if address is None:
            raise DeployError(f"no Ray cluster can be started here: {reason}") from None
        raise _not_there(address, reason) from None


def _check_there(address: str) -> None:
    """Ray waits for minutes for a cluster that nobody has started: see first whether anybody listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # `auto`
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _not_there(address, error.strerror or str(error)) from None


def _not_there(address: str, reason: str) -> DeployError:
    advice = "start one by `ray start --head`, or leave --address out"
    return DeployError(f"no Ray cluster answers at {address}: {reason}; {advice}")


def run(settings: DeploySettings, name: str, host: str, port: int) -> None:
    """Run the application, or update the one of that name; returns when it serves.

    Replicas are updated one after another: their requests go on elsewhere. Raises `DeployError` with Ray's reason
    where it does not come to serve.
    """
    from ray import serve

    from slipstream.deploy.app import build

    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(build(settings.as_json()), name=name, route_prefix="/")
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or ["no reason given"]
        raise DeployError(f"the application does not come to serve: {lines[-1].strip()}") from None


def states(name: str) -> list[str]:
    """A line for each deployment of an application: how many of its replicas are in which state."""
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None:
        raise DeployError(f"there is no application {name!r} on this cluster")
    lines = [f"{name}: {application.status}"]
    for deployment, status in application.deployments.items():
        counts = ", ".join(f"{number} {state}" for state, number in status.replica_states.items() if number)
        lines.append(f"  {deployment}: {status.status}, {counts or 'no replicas'}")
    return lines


def stop(name: str) -> None:
    """Take an application off the cluster; raises `DeployError` where there is none of that name."""
    from ray import serve

    if name not in serve.status().applications:
        raise DeployError(f"there is no application {name!r} on this cluster")
    serve.delete(name)


def shut_down() -> None:
    """End what `connect` began: Serve too, where the cluster was started here."""
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()
