"""From what a user writes to an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig, options_from
from slipstream.engine.engine import Engine
from slipstream.garbage import uncollected
from slipstream.vllm_names import own_engine_keys


def engine_config(model: str | os.PathLike[str] | None, engine_options: Mapping[str, Any]) -> EngineConfig:
    """The configuration that `make_engine` makes of what a user writes; raises `ConfigError`."""
    return options_from(
        EngineConfig,
        {"model": EMBEDDED_TARGET if model is None else model, **own_engine_keys(engine_options)},
        "engine",
    )


def make_engine(
    model: str | os.PathLike[str] | None,
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None,
    engine_options: Mapping[str, Any],
    like: Engine | None = None,
) -> Engine:
    """The engine that `LLM` and `AsyncEngine` are made of.

    `model` None is the small target that ships with the package; `engine_options` are the fields of `EngineConfig`, or
    vLLM's keys.
    `like` is an engine of the same target, whose weights are shared.
    Raises `ConfigError`, `ModelError` or `CapacityError` for what cannot be loaded or does not fit.
    """
    config = engine_config(model, engine_options)
    if speculative_config is not None and not isinstance(speculative_config, SpeculativeConfig):
        speculative_config = SpeculativeConfig.from_mapping(speculative_config)
    with uncollected():
        return Engine(config, speculative_config, like=like)
