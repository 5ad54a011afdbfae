"""Attention backends by name, and the choice of one for a model.

A package adds a backend with one line of its own `pyproject.toml`:

    [project.entry-points."slipstream.attention"]
    my_backend = "my_package.module:MyBackend"

and code with `ATTENTION.register("my_backend", MyBackend)`. Without either, `attention_backend` may itself be
`"my_package.module:MyBackend"`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.config import reject_unknown
from slipstream.errors import ConfigError
from slipstream.models.attention.base import AttentionBackend, ModelTraits, Variant
from slipstream.models.linear.formats import WeightFormat
from slipstream.registry import Registry

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "slipstream.attention"

AUTO = "auto"

_RENAMED = {"posed": "cache_adapter"}
"""Names of the release before, which work with a warning for one release."""
BY_PREFERENCE = ("cache_adapter", "native", "native_layers", "triton", "packed")
"""What `auto` takes: the first that can run the model."""

ATTENTION: Registry[AttentionBackend] = Registry(
    "attention backend",
    AttentionBackend,  # type: ignore[type-abstract]
    ENTRY_POINT_GROUP,
    {
        "native": "slipstream.models.attention.native:NativeBackend",
        "native_layers": "slipstream.models.attention.native_layers:NativeLayersBackend",
        "packed": "slipstream.models.attention.packed:PackedBackend",
        "triton": "slipstream.models.attention.triton:TritonBackend",
        "cache_adapter": "slipstream.models.attention.cache_adapter:CacheAdapterBackend",
    },
)


def choose_backend(name: str, traits: ModelTraits) -> AttentionBackend:
    """The backend called `name`, or with `auto` the best built-in one, for a model with these traits.

    Raises `ConfigError` for an unknown name, and where the named backend cannot run the model.
    """
    if name == AUTO:
        found = (ATTENTION.load(each) for each in BY_PREFERENCE)
        return next(backend for backend in found if backend.refusal(traits) is None)(traits)
    if name in _RENAMED:
        log.warning("attention backend %r is now called %r", name, _RENAMED[name])
        name = _RENAMED[name]
    if ":" not in name:
        reject_unknown([name], [AUTO, *ATTENTION.names()], "attention backend")
    backend = ATTENTION.load(name)
    reason = backend.refusal(traits)
    if reason is not None:
        raise cannot_run(name, traits, reason)
    return backend(traits)


def fitting_backend(
    backend: AttentionBackend,
    name: str,
    traits: ModelTraits,
    model: Any,
    variants: Sequence[Variant],
    fmt: WeightFormat,
) -> AttentionBackend:
    """The backend that was chosen by `name`, or with `auto` another where it does not compute the probed model.

    Raises `ConfigError` where a named one does not.
    """
    reason = backend.misfit(model, variants, fmt)
    if reason is None:
        return backend
    if name != AUTO:
        raise cannot_run(name, traits, reason)
    log.info("%s runs layer by layer: %s", traits.config.model_type, reason)
    return choose_backend(AUTO, replace(traits, fuses=False))


def cannot_run(name: str, traits: ModelTraits, reason: str) -> ConfigError:
    """The error for a backend that was chosen by name."""
    return ConfigError(
        f"attention backend {name!r} cannot run {traits.config.model_type}: {reason}; use {AUTO!r}"
    )
