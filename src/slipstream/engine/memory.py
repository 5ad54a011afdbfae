"""What will be held in memory, decided before the first request."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from slipstream.config import EngineConfig
from slipstream.errors import CapacityError, ConfigError
from slipstream.models import CausalLM
from slipstream.profiling.memory import available_bytes, total_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and how many tokens' keys and values fit.

    Activations and logits of a step come on top; they grow with `max_num_batched_tokens`, not with the requests.
    """

    target_bytes: int
    draft_bytes: int
    kv_bytes_per_token: int
    """Target and drafter together."""
    num_slots: int
    max_model_len: int
    """Prompt and answer together; less than the model could when the cache is too small for more."""
    weight_format: str | None = None
    """Of the target; None where its weights are the checkpoint's."""

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_per_token * self.num_slots

    def __str__(self) -> str:
        weights = "" if self.weight_format is None else f" in {self.weight_format}"
        return (
            f"target{weights} {format_bytes(self.target_bytes)}, draft {format_bytes(self.draft_bytes)}, "
            f"keys and values {format_bytes(self.kv_bytes)} for {self.num_slots:,} tokens, "
            f"at most {self.max_model_len:,} a request"
        )


def plan_memory(
    config: EngineConfig,
    model: CausalLM,
    draft_bytes: int,
    draft_kv_bytes_per_token: int,
    max_draft_tokens: int,
) -> MemoryPlan:
    """Bound the cache by `kv_cache_bytes`, by a share of the memory or of what is free, and by what can ever be used.

    Raises `CapacityError` when not even a short request would fit, and where nobody has set `max_model_len` and the
    drafter's share of `kv_cache_bytes` would shorten it: the same request must not end earlier with a drafter. Where
    the cache is a share of the free memory, that is only a warning.
    """
    max_model_len = config.max_model_len or model.context_length
    if max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the model's context of {model.context_length}"
        )
    unit = model.kv_unit
    per_token = model.kv_bytes_per_token + draft_kv_bytes_per_token
    allowed = config.kv_cache_bytes or _allowed_bytes(config, model.device, model.weight_bytes + draft_bytes)
    useful = config.max_num_seqs * (
        max_model_len + max_draft_tokens + unit
    )  # what a request holds is rounded to units
    num_slots = min(useful, allowed // per_token)
    longest = min(num_slots - unit, max_model_len)  # without room for draft tokens a step decodes without
    without_draft = config.kv_cache_bytes or _allowed_bytes(config, model.device, model.weight_bytes)
    alone = min(without_draft // model.kv_bytes_per_token - unit, max_model_len)
    needed = min(config.max_model_len or unit, max_model_len)
    if longest < needed:
        limit = f"max_model_len to {needed} and " if alone > longest and config.max_model_len is None else ""
        raise CapacityError(
            f"{format_bytes(allowed)} hold the keys and values of {allowed // per_token} tokens, too few for a request "
            f"of {needed}; set {limit}kv_cache_bytes to at least {_mebibytes(needed + unit, per_token)} MiB"
        )
    if longest < alone:
        what = f"{format_bytes(allowed)} hold requests of {alone} tokens without the drafter and of {longest} with it"
        advice = f"set max_model_len to {longest} or less, with and without it"
        if config.kv_cache_bytes:
            raise CapacityError(
                f"{what}, so texts would end earlier with it; {advice}, or kv_cache_bytes to at least "
                f"{_mebibytes(max_model_len + unit, per_token)} MiB"
            )
        logger.warning("%s; for texts that end alike %s", what, advice)
    elif longest < max_model_len:
        logger.warning(
            "the cache has room for requests of %d tokens, the model for %d", longest, max_model_len
        )
    return MemoryPlan(model.weight_bytes, draft_bytes, per_token, num_slots, longest, model.quantization)


def _mebibytes(num_tokens: int, bytes_per_token: int) -> int:
    """What so many tokens need."""
    return math.ceil(num_tokens * bytes_per_token / 2**20)


def _allowed_bytes(config: EngineConfig, device: torch.device, weight_bytes: int) -> int:
    """For keys and values, where `kv_cache_bytes` is not set."""
    free = available_bytes(device)
    if config.gpu_memory_utilization is None:
        return int(free * config.kv_memory_fraction)
    share = int(total_bytes(device) * config.gpu_memory_utilization)
    if share <= weight_bytes:
        raise CapacityError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} is {format_bytes(share)} of the device's "
            f"{format_bytes(total_bytes(device))}, and the weights alone take {format_bytes(weight_bytes)}; raise it"
        )
    return min(free, share - weight_bytes)


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
