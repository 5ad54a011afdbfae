"""EAGLE: a head of one layer, or a few, drafts from the target's own features (`eagle_head` names the papers)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint
from slipstream.draft.heads.checkpoints import held_bytes, outline_checkpoint, stored_bytes
from slipstream.draft.heads.eagle_files import check_head, eagle_config, load_eagle
from slipstream.draft.heads.eagle_head import EagleConfig
from slipstream.draft.heads.head_executor import eagle_executor
from slipstream.draft.proposers.correction import CorrectedOptions, correction_bytes
from slipstream.draft.proposers.features import FeatureDrafter
from slipstream.draft.proposers.parallel import HeadOptions, target_of
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.errors import ConfigError
from slipstream.kv.pool import LayerShape, bytes_per_token


@dataclass(frozen=True, kw_only=True)
class EagleOptions(CorrectedOptions, HeadOptions):
    """Keys of `speculative_config` for `method: eagle` (EAGLE-1, EAGLE-2) and `method: eagle3`."""

    method: ClassVar[str] = "eagle"
    num_speculative_tokens: int = 5
    """Depth: draft tokens in a chain, levels in a tree."""
    tree_top_k: int = 4
    num_draft_nodes: int | None = 16


class EagleDrafter(FeatureDrafter):
    """Drafts with an EAGLE head; chains, fixed trees and EAGLE-2's dynamic trees."""

    Options = EagleOptions
    version: ClassVar[int | None] = None
    """EAGLE version of the heads that it accepts; None accepts both."""

    def __init__(self, options: EagleOptions, context: DraftContext) -> None:
        self.target = target_of(options, context)
        self.head = load_eagle(options.model, self.target, revision=options.revision)
        self._check_config(self.head.config, options.model)
        mask, self.head.mask_hidden = self.head.mask_hidden, None  # no executor knows it
        self.mask_features = None if mask is None else mask[0]
        """[1, width]: what a P-EAGLE head reads in place of features that are not there yet."""
        self.executor = eagle_executor(self.head, self.target, options.quantization)
        config = self.head.config
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        super().__init__(
            options,
            context,
            vocab_size=context.vocab_size,
            context_length=config.max_position_embeddings,
            shapes=[shape] * config.num_layers,
            like=self.target,
        )
        self.traits = replace(self.traits, feature_layers=config.feature_layers)

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """Return its own weights as the header of the file has them, and entries of its layers.

        An embedding table in the file is counted where it cannot be a copy of the target's.
        """
        target = context.target_outline
        if target is None:
            raise ConfigError("eagle drafts from a target's features; give the target with it")
        raw, tensors = outline_checkpoint(options.model, revision=options.revision)
        config = eagle_config(raw, tensors, target, options.model)
        check_head(config, target, options.model)
        cls._check_config(config, options.model)
        table = tensors.pop("embed_tokens.weight", None)
        own_table = 0 if table is None or table.shape[1] == target.hidden_size else table.numel()
        entry = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        width = max(2 * config.intermediate_size, len(config.feature_layers) * config.target_hidden_size)
        return Footprint(
            traits=replace(
                cls.configured(options, context),
                context_length=config.max_position_embeddings,
                kv_bytes_per_token=bytes_per_token([entry] * config.num_layers, target.cache_dtype),
                feature_layers=config.feature_layers,
            ),
            head_bytes=held_bytes(tensors, target, options.quantization)
            + own_table * target.dtype.itemsize
            + correction_bytes(options),
            head_stored_bytes=stored_bytes(tensors) + correction_bytes(options),
            head_bytes_per_row=(2 * width + 6 * config.hidden_size) * target.dtype.itemsize,
            # Of its own vocabulary, then of the target's.
            logit_rows=2 * ProposalShape.of(options, context.verifier).logit_rows,
        )

    @classmethod
    def _check_config(cls, config: EagleConfig, path: str) -> None:
        """Raise an error for a head that another method runs."""
        found = config.version
        if cls.version not in (None, found):
            own = {1: "eagle", 3: "eagle3"}[found]
            raise ConfigError(f"{path!r} is an EAGLE-{found} head; use method {own!r}")


class Eagle1Drafter(EagleDrafter):
    """Drafts with an EAGLE-1 head: chains, fixed trees and EAGLE-2's dynamic trees."""

    version = 1


class Eagle3Drafter(EagleDrafter):
    """Drafts with an EAGLE-3 head: chains, fixed trees and dynamic trees."""

    version = 3
