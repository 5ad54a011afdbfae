"""`slipstream serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from slipstream.assets import EMBEDDED_NAME
from slipstream.cli.flags.flags import FlagSet, Values, with_flags
from slipstream.cli.flags.options import (
    ENGINE,
    SPECULATION,
    EngineValues,
    ModelArgument,
    SpeculationValues,
    chosen_speculation,
    target_path,
)
from slipstream.cli.flags.settings import merged
from slipstream.cli.output.loading import loaded_name
from slipstream.core.pretrained import name_of
from slipstream.engine.labels import engine_labels
from slipstream.errors import LearnError
from slipstream.serve.config import ServeConfig

if TYPE_CHECKING:
    from slipstream.config import SpeculativeConfig
    from slipstream.engine.async_engine import AsyncEngine
    from slipstream.learn.storage.retention import RetentionThread
    from slipstream.rpc.children import SocketChild
    from slipstream.serve.process.remote import RemoteEngine

logger = logging.getLogger(__name__)

PROBE_SHARE = 0.005
"""Default `probe_share` of a server."""

SERVER = FlagSet(ServeConfig, "Server")


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """A server."""

    model: ModelArgument = None
    config: Path | None = None
    """TOML or YAML file of settings, named as the flags are, with underscores: port = 8000."""
    server: Annotated[Values, SERVER]
    speculation: SpeculationValues
    engine: EngineValues


@with_flags
def serve(flags: ServeFlags) -> None:
    """Serve a model to OpenAI clients: /v1/chat/completions, /v1/completions, /v1/models and metrics.

    Every flag can also be set as an environment variable, --max-num-seqs as SLIPSTREAM_MAX_NUM_SEQS, and in the
    file of --config. Flags take precedence over the environment, the environment over the file.
    """
    sets = {
        "server": (SERVER, flags.server),
        "speculation": (SPECULATION, flags.speculation),
        "engine": (ENGINE, flags.engine),
    }
    model, settings = merged(flags.model, sets, flags.config, os.environ)
    model = target_path(model)
    server_config = ServeConfig(**settings["server"])

    from slipstream.serve import logs

    logs.configure(server_config)  # from here on all lines have one format
    logger.info("loading %s", loaded_name(model))
    speculative = chosen_speculation(settings["speculation"], model)

    speculative, no_learning = _with_versions(speculative, server_config)
    requested = server_config
    if no_learning:  # serving goes on
        server_config = replace(server_config, learn=None)

    from slipstream.serve.network.listening import bind

    bound = bind(server_config.host, server_config.port)  # before loading the model: the port may be in use

    spawned = None
    if not server_config.one_process:
        from slipstream.serve.process.spawn import spawn_engine

        spawned = spawn_engine()

    from slipstream.serve.app import create_app
    from slipstream.serve.lifecycle import DrainingServer

    if speculative.probe_share is None:  # probes provide the metrics of the realised gain
        speculative = replace(speculative, probe_share=PROBE_SHARE)
    logs.take_over_transformers()
    retention = _retention_alone(no_learning, requested) if no_learning else None
    served = _engine(model, speculative, settings["engine"], server_config, spawned)
    try:
        app = create_app(served, server_config, EMBEDDED_NAME if model is None else name_of(model))
        DrainingServer(app).run(sockets=[bound])
    finally:
        served.close()
        if retention is not None:
            retention.close()


def _with_versions(speculative: SpeculativeConfig, config: ServeConfig) -> tuple[SpeculativeConfig, str]:
    """(the drafter, as the base of versions where they are learned; why it cannot learn, or nothing)."""
    if config.learn is None:
        return speculative, ""
    from slipstream.learn.learners.registry import check_learns

    try:
        check_learns(speculative, config.learner)
    except LearnError as error:
        return speculative, str(error)
    options = {
        "drafter": {"method": speculative.method, **speculative.options},
        "num_versions": config.learn_versions,
    }
    return replace(speculative, method="versions", options=options), ""


def _retention_alone(why: str, config: ServeConfig) -> RetentionThread | None:
    """Tell why nothing is learned; what deletes old answers all the same, if anything should."""
    from slipstream.serve.learning import retention_thread

    logger.warning("nothing is learned: %s; serving goes on", why)
    return retention_thread(config)


def _engine(
    model: str | None,
    speculative: SpeculativeConfig,
    options: Values,
    config: ServeConfig,
    spawned: SocketChild | None,
) -> AsyncEngine | RemoteEngine:
    """The engine, loaded: in the process that was `spawned` for it, or in this one."""
    if spawned is not None:
        from slipstream.serve.process.start import make_remote_engine

        return make_remote_engine(model, speculative, options, config, spawned)

    from slipstream.engine.async_engine import AsyncEngine
    from slipstream.engine.factory import make_engine

    made = make_engine(model, speculative, options)
    for label in engine_labels(made):  # the engine has logged its memory plan itself
        logger.info("note: %s", label)
    return AsyncEngine(engine=made, stream_interval_s=config.stream_interval_s)
