"""From what a user writes to an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.core.garbage import uncollected
from slipstream.engine.engine import Engine
from slipstream.engine.settings import engine_config


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
