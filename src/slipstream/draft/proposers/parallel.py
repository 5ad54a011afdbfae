"""Drafters of heads on the target: they read only the hidden state of its last computed token.

They have no keys and values of their own, so there is nothing to catch up with and nothing to roll back.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.config import check_types
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.heads.checkpoints import (
    WEIGHT_FILES,
    check_fits,
    held_bytes,
    outline_checkpoint,
    stored_bytes,
)
from slipstream.draft.heads.head_executor import heads_executor
from slipstream.draft.heads.residual import ProjectedHeads
from slipstream.draft.outline import DraftOutline
from slipstream.draft.proposers.draft_tree import DraftTree, DraftTrees, whole_chains
from slipstream.draft.proposers.proposal_shape import ProposalShape, ShapeOptions
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.models.causal_lm import CausalLM
from slipstream.models.executor.chains import Chains
from slipstream.models.linear.formats import check_quantization


@dataclass(frozen=True, kw_only=True)
class HeadOptions(ShapeOptions):
    """The keys that drafters of heads have in common."""

    model: str
    """Folder or hub id of the heads; they must have been trained for this target."""
    num_speculative_tokens: int = 4
    """Depth: draft tokens in a chain, levels in a tree; reduced to the number of heads."""
    quantization: str | None = None
    """Weight format of the heads, such as `int8`, on a CPU. None: as the target's. The text stays the target's."""
    revision: str | None = None

    def check(self, what: str) -> None:
        """Raise `ConfigError` for an invalid value; `what` is the drafter's name in the message."""
        check_types(self, what)
        self.check_shape(what)
        check_quantization(self.quantization, what)


class HeadDrafter(Drafter):
    """Grows a chain or a tree for all sequences at once; a subclass computes the logits."""

    traits = DrafterTraits(kinds=frozenset(ProposalKind))
    weight_files: ClassVar[tuple[str, ...]] = WEIGHT_FILES
    """Names that the heads' file may have."""

    def __init__(
        self,
        options: HeadOptions,
        context: DraftContext,
        target: CausalLM,
        heads: ProjectedHeads,
    ) -> None:
        """Moves `heads` to the target's device and dtype, and packs them for its kernels."""
        super().__init__(options, context)
        config = heads.config
        check_fits(options.model, config.hidden_size, config.vocab_size, target)
        depth = min(options.num_speculative_tokens, config.num_heads)
        self.shape = ProposalShape.of(
            dataclasses.replace(options, num_speculative_tokens=depth), context.verifier
        )
        if self.shape.depth > config.num_heads:
            raise ConfigError(
                f"tree_choices is {self.shape.depth} levels deep, but {options.model!r} has "
                f"{config.num_heads} heads; omit the deeper nodes"
            )
        heads.to(target.device, target.dtype).eval().requires_grad_(False)
        self.executor = heads_executor(heads, target, options.quantization)
        self.target = target
        own = dataclasses.replace(self.traits, feature_layers=(target.num_layers,))
        self.traits = self.shape.traits(own, options)
        self._trees = DraftTrees(
            self.shape, config.vocab_size, self.by_sequence(), options.confidence_threshold
        )
        self.target_cache: KVCache | None = None

    @classmethod
    def outline(cls, options: Any, context: DraftContext) -> DraftOutline:
        """Return their weights, as the header of the file has them, and the hidden state that they read."""
        target = context.target_outline
        if target is None:
            raise ConfigError("heads read the target's hidden states; give the target with them")
        raw, tensors = outline_checkpoint(
            options.model, revision=options.revision, weight_files=cls.weight_files
        )
        sizes = raw.get("hidden_size", target.hidden_size), raw.get("vocab_size", target.vocab_size)
        check_fits(options.model, *sizes, target)
        if raw.get("original_lm_head"):  # a copy of the target's output layer is not kept
            tensors = {name: weight for name, weight in tensors.items() if len(weight) != target.vocab_size}
        shape = ProposalShape.of(options, context.verifier)
        widest = max((weight.shape[-1] for weight in tensors.values()), default=0)
        return DraftOutline(
            max_nodes=shape.num_nodes,
            head_bytes=held_bytes(tensors, target, options.quantization),
            head_stored_bytes=stored_bytes(tensors),
            head_bytes_per_row=2 * widest * target.dtype.itemsize,
            feature_layers=(target.num_layers,),
            logit_rows=shape.depth * shape.logit_rows,  # Medusa computes all levels at once
        )

    @abstractmethod
    def _grow(self, trees: Seq[DraftTree], features: Tensor) -> None:
        """Grow all trees to the end; `features` [trees, hidden] are the states of the tokens computed last."""

    def attach(self, cache: KVCache) -> None:
        self.target_cache = cache

    def memory_bytes(self) -> int:
        return self.executor.footprint()

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        trees = {
            sequence.id: self._trees.begin(sequence, budget)
            for sequence, budget in zip(sequences, budgets, strict=True)
            # The heads predict the tokens after the single token that the target has not computed.
            if budget > 0
            and 0 < sequence.num_computed == len(sequence.token_ids) - 1
            and self._trees.may_draft(sequence)
        }
        if trees:
            self._draft(list(trees.values()))
        return [
            trees[sequence.id].proposal() if sequence.id in trees else EMPTY_PROPOSAL
            for sequence in sequences
        ]

    def _draft(self, trees: list[DraftTree]) -> None:
        """Grow all trees; chains that one call can draw apart from the others."""
        draws = whole_chains(trees)
        drawn = [tree for tree in trees if tree.sequence.id in draws]
        if drawn:
            chains = self.executor.draft_chain(
                self._features(drawn),
                [tree.sequence.token_ids[-1] for tree in drawn],
                Chains(list(draws.values()), self._trees.vocab_size),
            )
            for tree, token_ids in zip(drawn, chains, strict=True):
                tree.take_chain(token_ids)
        others = [tree for tree in trees if tree.sequence.id not in draws]
        if others:
            self._grow(others, self._features(others))

    def _features(self, trees: Seq[DraftTree]) -> Tensor:
        """[trees, hidden]"""
        return torch.cat([self._feature(tree.sequence) for tree in trees])

    def _feature(self, sequence: Sequence) -> Tensor:
        """[1, hidden]: the hidden state of the token that the target computed last."""
        assert self.target_cache is not None, "attach() comes before the first proposal"
        return self.target_cache.features(sequence.id, sequence.num_computed - 1, sequence.num_computed)


def target_of(context: DraftContext, what: str) -> CausalLM:
    """The loaded target; raises `ConfigError` where there is none."""
    if context.target is None:
        raise ConfigError(f"{what} reads the target's hidden states, and no target is loaded")
    return context.target
