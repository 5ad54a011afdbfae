"""The target of an engine's configuration."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.models import CausalLM, load_model, load_tokenizer
from slipstream.models.load_options import LoadOptions
from slipstream.models.support import context_length

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine

_PRIVATE_FIELDS = {
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("kv_cache_bytes", "kv_memory_fraction", "gpu_memory_utilization", "enable_prefix_caching", "seed"),
    *("allow_lossy", "overlap_steps", "generation_config", "override_generation_config"),
}
"""Fields of `EngineConfig` in which engines that share a target may differ."""


def load_target(config: EngineConfig) -> tuple[CausalLM, Any]:
    """The target model and its tokenizer."""
    model = load_model(config.model, LoadOptions.of(config))
    tokenizer = load_tokenizer(
        config.tokenizer or config.model,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    return model, tokenizer


def shared_target(like: Engine, config: EngineConfig) -> tuple[CausalLM, Any]:
    """The model and tokenizer of an engine, for another of `config`; `ConfigError` where it needs others."""
    check_same_target(like.model, like.config, config)
    return like.model, like.tokenizer


def check_same_target(model: CausalLM, mine: EngineConfig, other: EngineConfig) -> None:
    """Raise `ConfigError` where an engine of `other` may not share the `model` that was loaded for `mine`."""
    for name in {field.name for field in fields(other)} - _PRIVATE_FIELDS:
        if getattr(mine, name) != getattr(other, name):
            raise ConfigError(
                f"engines that share a target need one {name}, "
                f"got {getattr(mine, name)!r} and {getattr(other, name)!r}"
            )
    if context_length(model.config, other.max_model_len) != model.context_length:
        raise ConfigError(
            "engines that share a target with LongRoPE need the same of its two sets of frequencies, got max_model_len "
            f"{mine.max_model_len} and {other.max_model_len}"
        )
