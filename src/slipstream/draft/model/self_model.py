"""A quantised copy of the target as its own draft model: no other model is needed, and acceptance is high.

A step is bound by the bytes of the weights, so a copy with a quarter of the bytes drafts at about a quarter of a step's
cost. The unquantised target verifies, so quantisation lowers acceptance, never exactness. (A quantised target as its
own draft: Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical
Quantized KV Cache", ICML 2025.)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from slipstream.config import EngineConfig, check_types
from slipstream.draft.base import DraftContext, Fit
from slipstream.draft.model.correction import CorrectedOptions
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions, outline_of
from slipstream.draft.model.growth import GrowthOptions
from slipstream.draft.outline import DraftOutline
from slipstream.errors import ConfigError
from slipstream.models.linear.formats import UNCHANGED, check_quantization, weight_format
from slipstream.models.outline import ModelOutline, outline_model

DRAFT_FORMAT = "int8"
"""Weight format of the target's own copies where none is named."""


@dataclass(frozen=True, kw_only=True)
class SelfOptions(CorrectedOptions):
    """Keys of `speculative_config` for `method: self`."""

    quantization: str = DRAFT_FORMAT
    """Weight format of the target's copy that drafts."""
    num_speculative_tokens: int = 3

    def __post_init__(self) -> None:
        check_types(self, "self")
        self.check_growth("self")
        check_quantization(self.quantization, "self")


def self_model(quantization: str, shape: GrowthOptions, context: DraftContext) -> DraftModelOptions:
    """Options for the quantised target as a draft model; raises `ConfigError` where the target is quantised already."""
    config = context.engine_config
    target = context.target or context.target_outline
    held = config.quantization if target is None else target.weight_format.name
    if not is_smaller(quantization, held):
        raise ConfigError(
            f"the target is {held or UNCHANGED} already and cannot draft more cheaply for itself "
            f"in {quantization}; choose a format of fewer bits, or another drafter"
        )
    return DraftModelOptions(
        model=config.model,
        revision=config.revision,
        lora=config.lora,
        quantization=quantization,
        correction=shape.correction if isinstance(shape, CorrectedOptions) else None,
        **{field.name: getattr(shape, field.name) for field in fields(GrowthOptions)},
    )


def is_smaller(quantization: str, target: str | None) -> bool:
    """Whether weights in one format are fewer bytes than the target's, so that drafting with a copy can pay."""
    return weight_format(quantization).bytes_per_weight < weight_format(target).bytes_per_weight


def copy_options(quantization: str, config: EngineConfig, computes: torch.dtype) -> dict[str, Any]:
    """How the target of `config`, which computes in this type, is loaded in another weight format."""
    return {
        "dtype": "auto" if computes == torch.float32 else config.dtype,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "quantization": quantization,
        "cpu_kernels": config.cpu_kernels,
        "max_model_len": config.max_model_len,
        "attention_backend": config.attention_backend,
        "kv_cache_dtype": config.kv_cache_dtype,
    }


def target_copy(quantization: str, config: EngineConfig, computes: torch.dtype) -> ModelOutline:
    """The outline of such a copy."""
    options = copy_options(quantization, config, computes)
    return outline_model(config.model, device=config.device, lora=config.lora, **options)


class SelfDrafter(DraftModelDrafter):
    """Drafts with the target's own weights, quantised, over a cache of its own."""

    summary = f"the target's own weights in {DRAFT_FORMAT}, with a cache of their own"

    Options = SelfOptions  # type: ignore[assignment]

    @classmethod
    def fit(cls, context: DraftContext) -> Fit:
        """The target's weights in the format that is taken where none is named, and keys and values as the target's."""
        target, fmt = context.target, weight_format(DRAFT_FORMAT)
        if not is_smaller(DRAFT_FORMAT, context.engine_config.quantization):
            return Fit("can never run: the target is quantised already", None, None, None)
        if context.device.type not in fmt.devices:
            return Fit(f"can never run: {DRAFT_FORMAT} weights are for CPUs", None, None, None)
        if target is None:
            return Fit("", None, None, 0)
        return Fit("", fmt.num_bytes(target.num_parameters), target.kv_bytes_per_token, 0)

    @classmethod
    def outline(cls, options: Any, context: DraftContext) -> DraftOutline:
        return outline_of(self_model(options.quantization, options, context), context)

    def __init__(self, options: SelfOptions, context: DraftContext) -> None:
        super().__init__(self_model(options.quantization, options, context), context)
