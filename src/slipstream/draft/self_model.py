"""The quantised target drafts for the target itself: no other model, and nearly every guess is right.

A step is bound by the bytes of the weights, so a target in a quarter of the bytes drafts at about a quarter of a
step's price. The verifier is the unquantised target, whose text comes out: quantisation costs acceptance, never
exactness. (A quantised target as its own draft: Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical
Quantized KV Cache", ICML 2025.)
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import QUANTIZATIONS, check_at_least, check_types, reject_unknown
from slipstream.draft.base import DraftContext
from slipstream.draft.draft_model import DraftModelDrafter, DraftModelOptions
from slipstream.errors import ConfigError


@dataclass(frozen=True)
class SelfOptions:
    """Keys of `speculative_config` for `method: self`."""

    quantization: str = "int8"
    """How the target's weights are held for drafting."""
    num_speculative_tokens: int = 3
    """Depth: draft tokens in a chain, levels in a tree."""
    tree_top_k: int = 1
    """Guesses kept at each level; 1 is a chain."""
    num_draft_nodes: int | None = None
    """Nodes of a tree; None is `num_speculative_tokens * tree_top_k`."""
    draft_sample_method: str = "auto"
    """As for `draft_model`."""

    def __post_init__(self) -> None:
        check_types(self, "self")
        check_at_least(
            "self", 1, num_speculative_tokens=self.num_speculative_tokens, tree_top_k=self.tree_top_k
        )
        reject_unknown([self.quantization], QUANTIZATIONS, "self quantization")
        if self.num_draft_nodes is not None and self.tree_top_k == 1:
            raise ConfigError("self num_draft_nodes is for trees; set tree_top_k above 1")
        self.as_draft_model("target", None)

    def as_draft_model(self, model: str, revision: str | None) -> DraftModelOptions:
        """The same for the drafter that runs any model."""
        return DraftModelOptions(
            model=model,
            num_speculative_tokens=self.num_speculative_tokens,
            tree_top_k=self.tree_top_k,
            num_draft_nodes=self.num_draft_nodes,
            draft_sample_method=self.draft_sample_method,
            quantization=self.quantization,
            revision=revision,
        )


class SelfDrafter(DraftModelDrafter):
    """Drafts with the target's own weights, quantised, over a cache of its own."""

    Options = SelfOptions  # type: ignore[assignment]

    def __init__(self, options: SelfOptions, context: DraftContext) -> None:
        config = context.engine_config
        if config.quantization is not None:
            raise ConfigError(
                f"the target is {config.quantization} already and cannot draft more cheaply for itself; "
                "leave the target's quantization out, or choose another drafter"
            )
        super().__init__(options.as_draft_model(config.model, config.revision), context)
