"""The quantised target drafts for the target itself: no other model, and nearly every guess is right.

A step is bound by the bytes of the weights, so a target in a quarter of the bytes drafts at about a quarter of a
step's price. The verifier is the unquantised target, whose text comes out: quantisation costs acceptance, never
exactness. (A quantised target as its own draft: Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical
Quantized KV Cache", ICML 2025.)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from slipstream.config import QUANTIZATIONS, check_types, reject_unknown
from slipstream.draft.base import DraftContext, Fit
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions
from slipstream.draft.model.growth import GrowthOptions
from slipstream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SelfOptions(GrowthOptions):
    """Keys of `speculative_config` for `method: self`."""

    quantization: str = "int8"
    """How the target's weights are held for drafting."""
    num_speculative_tokens: int = 3

    def __post_init__(self) -> None:
        check_types(self, "self")
        self.check_growth("self")
        reject_unknown([self.quantization], QUANTIZATIONS, "self quantization")


def self_model(quantization: str, shape: GrowthOptions, context: DraftContext) -> DraftModelOptions:
    """The target, quantised, as a draft model of the same shape; `ConfigError` where it is quantised already."""
    config = context.engine_config
    if config.quantization is not None:
        raise ConfigError(
            f"the target is {config.quantization} already and cannot draft more cheaply for itself; "
            "leave the target's quantization out, or choose another drafter"
        )
    return DraftModelOptions(
        model=config.model,
        revision=config.revision,
        lora=config.lora,
        quantization=quantization,
        **{field.name: getattr(shape, field.name) for field in fields(GrowthOptions)},
    )


class SelfDrafter(DraftModelDrafter):
    """Drafts with the target's own weights, quantised, over a cache of its own."""

    summary = "the target's own weights in int8, with a cache of their own"

    Options = SelfOptions  # type: ignore[assignment]

    @classmethod
    def fit(cls, context: DraftContext) -> Fit:
        """A byte a weight, and keys and values as the target's."""
        target = context.target
        if context.engine_config.quantization is not None:
            return Fit("can never run: the target is quantised already", None, None, None)
        if context.device.type != "cpu":
            return Fit("can never run: int8 weights are for CPUs", None, None, None)
        if target is None:
            return Fit("", None, None, 0)
        return Fit("", target.num_parameters, target.kv_bytes_per_token, 0)

    def __init__(self, options: SelfOptions, context: DraftContext) -> None:
        super().__init__(self_model(options.quantization, options, context), context)
