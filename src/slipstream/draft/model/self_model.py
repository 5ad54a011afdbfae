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
from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint, NoGainError
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions, footprint_of
from slipstream.draft.proposers.correction import CorrectedOptions
from slipstream.draft.proposers.proposal_shape import ShapeOptions
from slipstream.models.causal_lm import CausalLM
from slipstream.models.linear.formats import UNCHANGED, check_quantization, weight_format
from slipstream.models.load_options import LoadOptions
from slipstream.models.outline import ModelOutline, outline_model

DRAFT_FORMAT = "int8"
"""Weight format of the target's own copies where none is named."""
WORTHWHILE = 0.9
"""A copy that reads more than this share of the target's bytes gains next to nothing even if all its draft tokens are
accepted, and holds the weights twice."""


@dataclass(frozen=True, kw_only=True)
class SelfOptions(CorrectedOptions):
    """Keys of `speculative_config` for `method: self`."""

    quantization: str = DRAFT_FORMAT
    """Weight format of the target's copy that drafts."""
    num_speculative_tokens: int = 3

    def __post_init__(self) -> None:
        check_types(self, "self")
        self.check_shape("self")
        check_quantization(self.quantization, "self")


def self_model(quantization: str, shape: ShapeOptions, context: DraftContext) -> DraftModelOptions:
    """Options for the quantised target as a draft model; raises `ConfigError` as `check_copy` does."""
    config = context.engine_config
    check_copy("self", quantization, context)
    return DraftModelOptions(
        model=config.model,
        revision=config.revision,
        lora=config.lora,
        quantization=quantization,
        correction=shape.correction if isinstance(shape, CorrectedOptions) else None,
        **{field.name: getattr(shape, field.name) for field in fields(ShapeOptions)},
    )


def no_gain(quantization: str, target: CausalLM | ModelOutline | None, held: str | None = None) -> str:
    """Why a copy of the target in this weight format reads about as many bytes a token as the target itself, so that
    drafting with it cannot gain speed; empty where it reads fewer.

    `held` is the format of a target of which nothing else is known.
    """
    held = held if target is None else target.weight_format.name
    ours, theirs = (weight_format(name).bytes_per_weight for name in (quantization, held))
    if target is None:
        return "" if ours < theirs else f"the target is {held or UNCHANGED} already"
    plain, kept = target.num_parameters - target.kept.num_weights, target.kept.num_bytes
    if kept + plain * ours <= WORTHWHILE * (kept + plain * theirs):
        return ""
    if kept > plain * theirs:
        return f"its file holds the target's weights quantised ({target.stored_as}), and a copy keeps them so"
    return f"the target is {held} already"


def _no_gain(quantization: str, context: DraftContext) -> str:
    """As `no_gain`, for the context's target."""
    target = context.target or context.target_outline
    return no_gain(quantization, target, context.engine_config.quantization)


def copy_pays(quantization: str, context: DraftContext) -> bool:
    """Whether a copy of the context's target can be had in this format on its device, and drafts more cheaply."""
    has_kernels = context.device.type in weight_format(quantization).devices
    return has_kernels and not _no_gain(quantization, context)


def check_copy(what: str, quantization: str, context: DraftContext) -> None:
    """Raise `NoGainError` where the drafter `what` could gain nothing by a copy of the target in this format."""
    reason = _no_gain(quantization, context)
    if reason:
        raise NoGainError(what, quantization, reason)


def copy_options(quantization: str, config: EngineConfig, computes: torch.dtype) -> LoadOptions:
    """How the target of `config`, which computes in this type, is loaded in another weight format."""
    dtype = "auto" if computes == torch.float32 else config.dtype
    return LoadOptions.of_draft(config, dtype=dtype, quantization=quantization)


def target_copy(quantization: str, config: EngineConfig, computes: torch.dtype) -> ModelOutline:
    """The outline of such a copy."""
    return outline_model(config.model, copy_options(quantization, config, computes))


class SelfDrafter(DraftModelDrafter):
    """Drafts with the target's own weights, quantised, over a cache of its own."""

    Options = SelfOptions  # type: ignore[assignment]

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        copy = self_model(options.quantization, options, context)
        return footprint_of(copy, context, cls.configured(options, context))

    def __init__(self, options: SelfOptions, context: DraftContext) -> None:
        super().__init__(self_model(options.quantization, options, context), context)
