"""From what a user writes to an engine in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.errors import ConfigError
from slipstream.models import load_tokenizer
from slipstream.rpc.children import SocketChild
from slipstream.serve.config import ServeConfig
from slipstream.serve.learning import session_settings
from slipstream.serve.logs import chosen_format
from slipstream.serve.process.launch import as_loaded, start_engine
from slipstream.serve.process.protocol import Load
from slipstream.serve.process.remote import RemoteEngine


def make_remote_engine(
    model: str | None,
    speculative: SpeculativeConfig,
    engine_options: Mapping[str, Any],
    server: ServeConfig,
    spawned: SocketChild | None = None,
) -> RemoteEngine:
    """The engine of `make_engine`, loaded in another process for a server of this one; in the one that was `spawned`.

    Raises what `make_engine` raises, and `EngineStoppedError` where the process ends without a word.
    """
    try:
        config = EngineConfig.from_options(model, engine_options)
    except ConfigError:
        if spawned is not None:
            spawned.kill()
        raise
    load = load_message(model, speculative, engine_options, server)
    link = start_engine(load, spawned)
    try:
        tokenizer = load_tokenizer(
            config.tokenizer or config.model,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
        return RemoteEngine(
            link, tokenizer, partial(start_engine, as_loaded(load, link.info)), server.engine_restarts
        )
    except BaseException:
        link.end()
        raise


def load_message(
    model: str | None,
    speculative: SpeculativeConfig,
    engine_options: Mapping[str, Any],
    server: ServeConfig,
) -> Load:
    """What the engine's process is to load."""
    return Load(
        model,
        speculative,
        dict(engine_options),
        bool(server.api_key),
        server.stream_interval_s,
        server.log_level,
        chosen_format(server),
        session_settings(server),
    )
