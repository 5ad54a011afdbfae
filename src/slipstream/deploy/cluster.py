"""A Ray cluster: connected to or started, an application run on it and taken off it. Ray is imported here only."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from slipstream.deploy.settings import DeploySettings
from slipstream.deploy.standing import Standing, reason_in
from slipstream.errors import DeployError

HOST, PORT = "127.0.0.1", 8000
"""Where Serve listens unless something else is set."""
logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
CHECK_TIMEOUT_S = 180.0
POLL_S = 0.5


def require_ray() -> None:
    """Raise `DeployError` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise DeployError("slipstream deploy needs Ray: pip install 'slipstream-llm[deploy]'")


def connect(address: str | None, num_cpus: int | None = None) -> None:
    """Join the cluster at `address`, or start one of this machine; raises `DeployError`.

    `num_cpus` is what a cluster that is started may use, by default the machine's cores.
    """
    require_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody unless it is set
    # Serve ends an HTTP proxy that is not ready in 5 s, and starts another: a busy machine would never have one.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
    ray = _quiet_ray()
    if address is not None:
        _check_there(address)
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "job_config": _job_config(),
    }
    try:
        if address is None:
            ray.init(num_cpus=num_cpus, include_dashboard=False, **options)
        else:
            ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if address == "auto":
            reason = "none runs on this machine, and RAY_ADDRESS names none"
        if address is None:
            raise DeployError(f"no Ray cluster can be started here: {reason}") from None
        raise _not_there(address, reason) from None


class _NoFolders(list[str]):
    """A list of folders that stays empty."""

    def extend(self, folders: Iterable[str]) -> None:
        """Nothing is added."""


def _job_config() -> Any:
    """A job whose workers import nothing from this process's working directory: Ray puts it first in their path."""
    from ray.job_config import JobConfig

    config = JobConfig()
    config._py_driver_sys_path = _NoFolders()
    return config


def _quiet_ray() -> Any:
    """Ray, which from here on says nothing to the terminal by itself: what matters is said in our words."""
    # At a signal its C++ part writes its stack, before anything else hears of the signal.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    warnings.filterwarnings("ignore", module=r"ray(\.|$)")
    import ray
    import ray._private.worker as worker
    from ray import serve  # noqa: F401 - its import sets the level of its own messages

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def log(data: Any, *_: object, **__: object) -> None:
        """In place of the terminal: errors of other processes, such as of those that are being ended."""
        logger.info("Ray: %s", " ".join(map(str, data.get("lines", ()))))

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = log
    return ray


def _check_there(address: str) -> None:
    """Ray waits for minutes for a cluster that was not started: see first whether anything listens."""
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


def resources() -> dict[str, float]:
    """What the whole cluster has: cores as `CPU`, `GPU`s."""
    import ray

    has = ray.cluster_resources()
    return {kind: float(has.get(kind, 0.0)) for kind in ("CPU", "GPU")}


def check(settings: DeploySettings) -> None:
    """Have a machine of the cluster read what the settings name; raises `DeployError` where it cannot be loaded."""
    import ray
    from ray.exceptions import RayError

    from slipstream.deploy.check import refusal

    try:
        task = ray.remote(num_cpus=0, max_retries=0)(refusal)
        refused = ray.get(task.remote(settings), timeout=CHECK_TIMEOUT_S)
    except RayError as error:
        reason = reason_in(str(error)) or type(error).__name__
        raise DeployError(
            f"no machine of the cluster can read the settings: {reason}; install the same version of "
            "slipstream-llm[deploy] on all of them"
        ) from None
    if refused:
        raise DeployError(f"nothing was changed on the cluster: {refused}")


def check_address(host: str | None, port: int | None) -> None:
    """Serve listens at one address for all applications: raises `DeployError` where it is there already and at
    another one than what is requested."""
    there = listens()
    if there is None:
        return
    wanted = (host or there[0], port or there[1])
    if wanted != there:
        raise DeployError(
            f"Ray Serve runs on this cluster already and listens at {there[0]}:{there[1]} for all applications, not at "
            f"{wanted[0]}:{wanted[1]}; leave --host and --port out, or end it first by `serve shutdown`"
        )


def run(
    settings: DeploySettings,
    name: str,
    host: str | None = None,
    port: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Run the application, or update the one of that name; returns its address when it serves.

    Replicas are updated one after another: their requests go on elsewhere. `say` gets the progress, whenever that
    changes. Raises `DeployError` with the reason where it does not come to serve.
    """
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from slipstream.deploy.app import build

    check_address(host, port)
    try:
        if listens() is None:
            serve.start(http_options={"host": host or HOST, "port": port or PORT})
        target = serve.RunTarget(target=build(settings.as_json()), name=name, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
    except (RayServeException, RuntimeError, ValueError) as error:
        raise DeployError(f"{name} does not come to serve: {reason_in(str(error))}") from None
    _wait_until_it_serves(name, say)
    return address()


def _wait_until_it_serves(name: str, say: Callable[[str], None]) -> None:
    """Raises `DeployError` where it fails."""
    said = ""
    while (now := standing(name)).state != "RUNNING":
        if now.state == "DEPLOY_FAILED":
            raise DeployError(f"{name} does not come to serve: {now.reason or 'Ray gives no reason'}")
        words = "; ".join(f"{part}: {count}" for part, count in now.counts().items())
        words += f" ({now.reason})" if now.reason else ""
        if words and words != said:
            say(words)
            said = words
        time.sleep(POLL_S)


def standing(name: str) -> Standing:
    """How an application is; raises `DeployError` where there is none of that name."""
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None:
        raise DeployError(f"there is no application {name!r} on this cluster")
    parts = {
        part: ({_word(state): number for state, number in one.replica_states.items()}, one.message)
        for part, one in application.deployments.items()
    }
    return Standing(name, _word(application.status), application.message, parts)


def _word(state: Any) -> str:
    """Ray gives some of its states as an enumeration and some as words."""
    return str(getattr(state, "value", state))


def address() -> str:
    """Return where the cluster's applications are reached; empty where Serve does not run."""
    there = listens()
    return "" if there is None else f"http://{there[0]}:{there[1]}"


def listens() -> tuple[str, int] | None:
    """Host and port of Ray Serve, None where it does not run. Ray has no public function that tells."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else (str(client.http_config.host), int(client.http_config.port))


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
