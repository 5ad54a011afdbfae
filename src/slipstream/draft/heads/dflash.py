"""DFlash and its successors: a small head drafts a whole block in one pass (`dflash_head` names the papers)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint
from slipstream.draft.heads.block_executor import block_executor, planned_bytes
from slipstream.draft.heads.checkpoints import held_bytes, outline_checkpoint, stored_bytes
from slipstream.draft.heads.dflash_files import check_dflash, dflash_config, load_dflash
from slipstream.draft.heads.dflash_head import DFlashConfig
from slipstream.draft.proposers.block import BlockDrafter, entry_shapes
from slipstream.draft.proposers.parallel import HeadOptions, target_of
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.errors import ConfigError
from slipstream.kv.pool import bytes_per_token
from slipstream.models.outline import ModelOutline


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(HeadOptions):
    """Keys of `speculative_config` for `method: dflash` (DFlash, DSpark and the others with their backbone)."""

    method: ClassVar[str] = "dflash"
    num_speculative_tokens: int = 7
    """Depth: draft tokens in a chain, levels in a tree; reduced to what a block of the head drafts."""


class DFlashDrafter(BlockDrafter):
    """Drafts with a block head; chains, fixed trees, and dynamic trees that grow best-first."""

    Options = DFlashOptions

    def __init__(self, options: DFlashOptions, context: DraftContext) -> None:
        self.target = target_of(options, context)
        head = load_dflash(options.model, self.target, revision=options.revision)
        self.executor = block_executor(head, self.target, options.quantization)
        options = _within_block(options, head.config)
        super().__init__(options, context, config=head.config, like=self.target)
        self.traits = replace(self.traits, feature_layers=head.config.feature_layers)

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """Return its own weights, and entries of its layers.

        An embedding and an output layer in the file are counted where they cannot be copies of the target's.
        """
        target = context.target_outline
        if target is None:
            raise ConfigError("dflash drafts from a target's features; give the target with it")
        raw, tensors = outline_checkpoint(options.model, revision=options.revision)
        config = dflash_config(raw, tensors, target, options.model)
        check_dflash(config, target, options.model)
        options = _within_block(options, config)
        width = max(2 * config.intermediate_size, len(config.feature_layers) * config.target_hidden_size)
        return Footprint(
            traits=replace(
                cls.configured(options, context),
                context_length=config.max_position_embeddings,
                kv_bytes_per_token=bytes_per_token(entry_shapes(config), target.cache_dtype),
                feature_layers=config.feature_layers,
            ),
            head_bytes=planned_bytes(config, target, options.quantization)
            + _own_bytes(tensors, target, options.quantization),
            head_stored_bytes=stored_bytes(tensors),
            head_bytes_per_row=(2 * width + 6 * config.hidden_size) * target.dtype.itemsize,
            # Of all levels at once, in its own vocabulary and then in the target's.
            logit_rows=2 * config.num_drafts + ProposalShape.of(options, context.verifier).logit_rows,
        )


def _own_bytes(tensors: Mapping[str, Tensor], target: ModelOutline, quantization: str | None) -> int:
    """Bytes of an embedding and an output layer that cannot be copies of the target's."""
    own = 0
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight") and tensor.shape[1] != target.hidden_size:
            own += tensor.numel() * target.dtype.itemsize
        if name.endswith("lm_head.weight") and tensor.shape != (target.vocab_size, target.hidden_size):
            own += held_bytes({name: tensor}, target, quantization)
    return own


def _within_block(options: DFlashOptions, config: DFlashConfig) -> DFlashOptions:
    """`options` with no more levels than a block drafts; raises `ConfigError` for a fixed tree that is deeper."""
    deepest = max(map(len, options.tree_choices or []), default=0)
    if deepest > config.num_drafts:
        raise ConfigError(
            f"tree_choices is {deepest} levels deep, but a block of {options.model!r} drafts {config.num_drafts} "
            "tokens; omit the deeper nodes"
        )
    depth = min(options.num_speculative_tokens, config.num_drafts)
    return replace(options, num_speculative_tokens=depth)
