"""What will be held in memory, decided before the first request."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from slipstream.config import EngineConfig
from slipstream.errors import CapacityError, ConfigError
from slipstream.kv.accounting import CHUNK
from slipstream.models import CausalLM

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

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_per_token * self.num_slots

    def __str__(self) -> str:
        return (
            f"target {format_bytes(self.target_bytes)}, draft {format_bytes(self.draft_bytes)}, "
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
    """Bound the cache by `kv_cache_bytes` or by a fraction of what is free, and by what can ever be used.

    Raises `CapacityError` when not even a short request would fit.
    """
    max_model_len = config.max_model_len or model.context_length
    if max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the model's context of {model.context_length}"
        )
    per_token = model.kv_bytes_per_token + draft_kv_bytes_per_token
    allowed = config.kv_cache_bytes or int(available_bytes(model.device) * config.kv_memory_fraction)
    margin = max_draft_tokens + CHUNK  # draft nodes, and the rounding of segments
    useful = config.max_num_seqs * (max_model_len + margin)
    num_slots = min(useful, allowed // per_token)
    longest = num_slots - margin
    needed = config.max_model_len or CHUNK
    if longest < min(needed, max_model_len):
        raise CapacityError(
            f"{format_bytes(allowed)} hold the keys and values of {allowed // per_token} tokens, too few for a request "
            f"of {needed}; set kv_cache_bytes to at least {math.ceil((needed + margin) * per_token / 2**20)} MiB"
        )
    if longest < max_model_len:
        logger.warning(
            "the cache has room for requests of %d tokens, the model for %d", longest, max_model_len
        )
    return MemoryPlan(model.weight_bytes, draft_bytes, per_token, num_slots, min(max_model_len, longest))


def available_bytes(device: torch.device) -> int:
    """Free memory of the device; on a CPU no more than the container's limit leaves."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (text := (group / "memory.max").read_text().strip()).isdigit():
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(
            stat["inactive_file"]
        )  # file cache gives way
        available = min(available, max(0, int(text) - used))
    return int(available)


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
