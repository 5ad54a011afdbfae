"""From what a user writes to the configuration of an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from slipstream.assets import EMBEDDED
from slipstream.config import EngineConfig, options_from
from slipstream.vllm_names import own_engine_keys


def engine_config(model: str | os.PathLike[str] | None, engine_options: Mapping[str, Any]) -> EngineConfig:
    """The configuration that `make_engine` makes of the same arguments; raises `ConfigError`."""
    return options_from(
        EngineConfig,
        {"model": EMBEDDED if model is None else model, **own_engine_keys(engine_options)},
        "engine",
    )
