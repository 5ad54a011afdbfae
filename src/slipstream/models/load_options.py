"""How a checkpoint is loaded: the settings that a loaded model and the plan of one share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from slipstream.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """See `EngineConfig` for each; `max_model_len` matters to LongRoPE alone."""

    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None
    cpu_kernels: str = "auto"
    lora: str | None = None
    max_model_len: int | None = None
    attention_backend: str = "auto"
    executor: str = "auto"
    kv_cache_dtype: str = "auto"
    fast_prompts: bool = False
    exact_rows: bool = False
    reproducible: bool = True
    rounds_head: bool = False
    """Whether an output layer of 16 or 32 bits may be held in 8 bits besides, to find best tokens with."""

    @classmethod
    def of(cls, config: EngineConfig, **others: Any) -> LoadOptions:
        """Those of an engine's target, with `others` in their place."""
        own = {
            field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)
        }
        return cls(**{**own, "rounds_head": True} | others)

    @classmethod
    def of_draft(cls, config: EngineConfig, **others: Any) -> LoadOptions:
        """Those of a draft model, with `others` in their place: what only a target's text gains by is off."""
        return cls.of(config, **{"fast_prompts": False, "exact_rows": False, "rounds_head": False} | others)

    @property
    def fuses(self) -> bool:
        """Whether the native kernels may compute whole passes, as far as the executor goes."""
        return self.executor in ("auto", "cpu_kernels")
