"""The Ray Serve application: engines as one deployment, HTTP as another.

This is the file to read and to change. `slipstream deploy` runs what `build` returns; a Serve config file names it as
its import path:

    applications:
      - name: slipstream
        import_path: slipstream.deploy.app:build
        route_prefix: /
        args: {model: /models/mine, num_replicas: 2}

Ray starts replicas, restarts dead ones, scales and updates them. Tokens do not pass through Ray: fronts speak to
replicas over the replica protocol, since Serve's request router decides once for a request, and an answer must be able
to go on elsewhere under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from slipstream.deploy import autoscaling
from slipstream.deploy.check import check_server
from slipstream.deploy.directory import Directory
from slipstream.deploy.process import ReplicaDescription, start_replica
from slipstream.deploy.settings import DeploySettings
from slipstream.engine.async_engine import AsyncEngine
from slipstream.serve.config import ServeConfig

logger = logging.getLogger("ray.serve")

NAMESPACE = "slipstream"
MIN_LOOK_BACK_S, MAX_LOOK_BACK_S = 2.0, 30.0
"""Autoscaling goes by means over the time for which more replicas must be wanted, within these bounds."""


class ClusterDirectory:
    """The directory of an application, an actor of its cluster."""

    def __init__(self, application: str) -> None:
        actor = ray.remote(num_cpus=0, max_restarts=-1)(Directory)
        self._actor: Any = actor.options(
            name=f"directory-{application}", namespace=NAMESPACE, get_if_exists=True, lifetime="detached"
        ).remote()

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call one of `Directory`'s methods."""
        return await getattr(self._actor, method).remote(*arguments)


class Replica:
    """One engine. Ray watches it by `check_health` and calls its `record_autoscaling_stats`."""

    async def __init__(self, settings: DeploySettings) -> None:  # type: ignore[misc]  # Ray awaits it
        context = serve.get_replica_context()
        self._id = str(context.replica_id.unique_id)
        self._settings = settings
        self._directory = ClusterDirectory(context.app_name)
        self._engine = await asyncio.to_thread(
            AsyncEngine,
            settings.target,
            speculative_config=settings.speculative_config,
            **settings.engine_options,
        )
        described = ReplicaDescription(
            id=self._id,
            secret=await self._directory.ask("secret"),
            host=ray.util.get_node_ip_address(),
            generation=settings.generation,
        )
        self._server, *self._address = await start_replica(self._engine, described)
        await self.check_health()

    async def check_health(self) -> None:
        """Raises where the engine has stopped, so that Ray starts another replica; renews the address."""
        if self._engine.has_stopped:
            raise RuntimeError("the engine has stopped")
        if not self._server.is_draining:
            await self._directory.ask("register", self._id, *self._address)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `autoscaling.wanted` goes by."""
        server = self._server
        return autoscaling.stats_of(server.report, server.info.capacity, server.queue_share)

    async def __del__(self) -> None:
        """Ray stops the replica: its requests go on elsewhere first."""
        if not hasattr(self, "_server"):
            return  # it is stopped before it could serve
        await self._directory.ask("drop", self._id)
        if not await self._server.drain(self._settings.drain_s):
            logger.warning("requests were left on a replica that is stopped; they go on elsewhere")
        await self._server.close()
        await asyncio.to_thread(self._engine.close)


def build(args: Mapping[str, Any]) -> Application:
    """The application of `args`, the fields of `DeploySettings`; raises `ConfigError`."""
    settings = DeploySettings.from_mapping(args)
    check_server(settings)
    replica = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        health_check_period_s=2.0,
        health_check_timeout_s=15.0,
        graceful_shutdown_timeout_s=settings.drain_s + 10.0,
        graceful_shutdown_wait_loop_s=0.5,
        **_number_of(settings),
    )
    front = serve.deployment(
        _front(settings),
        name="Front",
        num_replicas=settings.num_fronts,
        max_ongoing_requests=100_000,  # the router bounds and answers what waits
        ray_actor_options={
            "num_cpus": 0
        },  # it waits for replicas; a core of its own would be one less for them
        graceful_shutdown_timeout_s=_longest_answer_s(settings) + 10.0,  # an update lets its streams end
    )
    return front.bind(replica.bind(settings))


def _number_of(settings: DeploySettings) -> dict[str, Any]:
    if settings.max_replicas is None:
        return {"num_replicas": settings.num_replicas}
    look_back_s = min(max(settings.upscale_delay_s, MIN_LOOK_BACK_S), MAX_LOOK_BACK_S)
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.min_replicas or 1,
            initial_replicas=settings.num_replicas,
            max_replicas=settings.max_replicas,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            look_back_period_s=look_back_s,
            metrics_interval_s=look_back_s / 4,
            policy=AutoscalingPolicy(
                policy_function=autoscaling.ScalingPolicy,
                policy_kwargs={
                    autoscaling.TARGET: settings.target_load,
                    autoscaling.MOST_CACHE: settings.max_cache_usage,
                    autoscaling.LEAST_RATE: settings.min_tokens_per_s,
                },
            ),
        )
    }


def _longest_answer_s(settings: DeploySettings) -> float:
    return ServeConfig(**settings.serve).request_timeout_s


def _front(settings: DeploySettings) -> type:
    """The HTTP deployment: the same server as `slipstream serve`, with the replicas as its engine."""

    def make_app() -> Any:
        from slipstream.deploy.front import FrontApp  # where the front runs, not where it is built

        directory = ClusterDirectory(serve.get_replica_context().app_name)
        return FrontApp(settings, directory.ask)

    @serve.ingress(make_app)
    class Front:
        def __init__(self, replicas: Any) -> None:
            """`replicas` makes them a part of the application; they are found through the directory."""

    return Front
