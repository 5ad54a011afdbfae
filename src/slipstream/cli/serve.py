"""`slipstream serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.flags.flags import FlagSet, Values, with_flags
from slipstream.cli.flags.options import (
    ENGINE,
    SPECULATION,
    ModelArgument,
    chosen_speculation,
    with_model,
)
from slipstream.cli.flags.settings import merged
from slipstream.labels import engine_labels
from slipstream.serve.config import ServeConfig

logger = logging.getLogger(__name__)

PROBE_SHARE = 0.005
"""Default `probe_share` of a server."""

SERVER = FlagSet(ServeConfig, "Server")


@with_model
@with_flags(server=SERVER, speculation=SPECULATION, engine=ENGINE)
def serve(
    model: ModelArgument = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML or YAML file of settings, named as the flags are, with underscores: port = 8000."
        ),
    ] = None,
    *,
    server: Values,
    speculation: Values,
    engine: Values,
) -> None:
    """Serve a model to OpenAI clients: /v1/chat/completions, /v1/completions, /v1/models and metrics.

    Every flag can also be set as an environment variable, --max-num-seqs as SLIPSTREAM_MAX_NUM_SEQS, and in the
    file of --config. Flags take precedence over the environment, the environment over the file.
    """
    sets = {"server": (SERVER, server), "speculation": (SPECULATION, speculation), "engine": (ENGINE, engine)}
    model, settings = merged(model, sets, config, os.environ)
    server_config = ServeConfig(**settings["server"])
    speculative = chosen_speculation(settings["speculation"], model)

    from slipstream.serve.network.listening import bind

    bound = bind(server_config.host, server_config.port)  # before loading the model: the port may be in use

    from slipstream.engine.async_engine import AsyncEngine
    from slipstream.engine.factory import make_engine
    from slipstream.serve import logs
    from slipstream.serve.app import create_app
    from slipstream.serve.lifecycle import DrainingServer

    if speculative.probe_share is None:  # probes provide the metrics of the realised gain
        speculative = replace(speculative, probe_share=PROBE_SHARE)
    logs.configure(server_config)  # from here on all lines have one format
    logs.take_over_transformers()
    made = make_engine(model, speculative, settings["engine"])
    for label in engine_labels(made):  # the engine has logged its memory plan itself
        logger.info("note: %s", label)
    async_engine = AsyncEngine(engine=made, stream_interval_s=server_config.stream_interval_s)
    try:
        app = create_app(async_engine, server_config, model or "embedded-pair")
        DrainingServer(app).run(sockets=[bound])
    finally:
        async_engine.close()
