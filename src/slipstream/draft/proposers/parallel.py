"""From the target's last hidden state: drafters without keys and values, and heads that draft a level each.

They read only the state of the token that the target computed last, so there is nothing to catch up with and nothing
to roll back. What attends over the target's keys and values without writing any, as Gemma 4's assistant does, is of
this kind too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from slipstream.config import check_types
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Observation
from slipstream.draft.footprint import Footprint
from slipstream.draft.heads.checkpoints import (
    WEIGHT_FILES,
    check_fits,
    held_bytes,
    outline_checkpoint,
    stored_bytes,
)
from slipstream.draft.heads.head_executor import head_bytes, heads_executor, pack_head
from slipstream.draft.heads.residual import ProjectedHeads
from slipstream.draft.proposers.draft_tree import DraftTree, whole_chains
from slipstream.draft.proposers.growing import GrowingDrafter
from slipstream.draft.proposers.proposal_shape import ProposalShape, ShapeOptions
from slipstream.draft.proposers.whole_drafts import WholeDrafts
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.kv.upload import upload
from slipstream.models.causal_lm import CausalLM
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.recorded_drafts import FirstStates
from slipstream.models.linear.formats import check_quantization


@dataclass(frozen=True, kw_only=True)
class HeadOptions(ShapeOptions):
    """The keys that drafters of heads have in common."""

    method: ClassVar[str] = "a head"
    """The drafter's name in messages."""
    model: str
    """Folder or hub id of the head, or set of heads; it must have been trained for this target."""
    num_speculative_tokens: int = 4
    """Depth: draft tokens in a chain, levels in a tree; reduced to the number of heads."""
    quantization: str | None = None
    """Weight format of the head, such as `int8`, on a CPU. None: as the target's, or int8 where its file
    holds its matrices quantised. The text stays the target's."""
    revision: str | None = None

    def __post_init__(self) -> None:
        check_types(self, self.method)
        self.check_shape(self.method)
        check_quantization(self.quantization, self.method)


class StateDrafter(GrowingDrafter):
    """Drafts where the target has computed all of the text but its last token, from the state before that token."""

    weight_files: ClassVar[tuple[str, ...]] = WEIGHT_FILES
    """Names that the heads' file may have."""

    def __init__(
        self, options: HeadOptions, context: DraftContext, *, most_levels: int | None = None
    ) -> None:
        """`most_levels` is the number of levels that it can draft; None is any."""
        self.target = target_of(options, context)
        super().__init__(options, context, vocab_size=self.target.vocab_size, most_levels=most_levels)
        self.traits = replace(self.traits, feature_layers=(self.target.num_layers,))
        self.target_cache: KVCache | None = None
        self._taken: list[nn.Module] = []

    def take(self, head: nn.Module) -> None:
        """Move a head to the target's device and dtype, pack its linear layers, and count its bytes."""
        head.to(self.target.device, self.target.dtype).eval().requires_grad_(False)
        pack_head(head, self.target, self.target.head_format(self.options.quantization))
        self._taken.append(head)

    def memory_bytes(self) -> int:
        return super().memory_bytes() + sum(map(head_bytes, self._taken))

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
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
        return Footprint(
            traits=replace(cls.configured(options, context), feature_layers=(target.num_layers,)),
            head_bytes=held_bytes(tensors, target, options.quantization),
            head_stored_bytes=stored_bytes(tensors),
            head_bytes_per_row=2 * widest * target.dtype.itemsize,
            logit_rows=shape.depth * shape.logit_rows,  # Medusa computes all levels at once
        )

    def attach(self, cache: KVCache) -> None:
        self.target_cache = cache

    def states(self, trees: Seq[DraftTree]) -> Tensor:
        """[trees, hidden]: what the target's final norm put out for the token before the last one of each text."""
        assert self.target_cache is not None, "attach() comes before the first proposal"
        read = self.target_cache.features
        last = [(tree.sequence.id, tree.sequence.num_computed) for tree in trees]
        return torch.cat([read(sequence_id, computed - 1, computed) for sequence_id, computed in last])

    def _has_room(self, sequence: Sequence) -> bool:
        return 0 < sequence.num_computed == len(sequence.token_ids) - 1 and super()._has_room(sequence)

    def _draft(self, trees: list[DraftTree]) -> None:
        if trees := [tree for tree in trees if tree.frontier]:
            super()._draft(trees)


class HeadDrafter(StateDrafter):
    """A set of heads, one for each level."""

    traits = StateDrafter.traits  # `observe` reads no logits

    def __init__(self, options: HeadOptions, context: DraftContext) -> None:
        """Moves the heads to the target's device and dtype, and packs them for its kernels."""
        target = target_of(options, context)
        heads = self.load(options, target)
        config = heads.config
        check_fits(options.model, config.hidden_size, config.vocab_size, target)
        super().__init__(options, context, most_levels=config.num_heads)
        if self.shape.depth > config.num_heads:
            raise ConfigError(
                f"tree_choices is {self.shape.depth} levels deep, but {options.model!r} has "
                f"{config.num_heads} heads; omit the deeper nodes"
            )
        heads.to(target.device, target.dtype).eval().requires_grad_(False)
        self.executor = heads_executor(heads, target, options.quantization)

    @classmethod
    @abstractmethod
    def load(cls, options: HeadOptions, target: CausalLM) -> ProjectedHeads:
        """The heads that the options name; raises `ModelError` where they cannot be read."""

    def memory_bytes(self) -> int:
        return super().memory_bytes() + self.executor.footprint()

    def let_pend(self, device: torch.device) -> None:
        self.pends_on = device if self.target.device == device else None

    def observe(self, observations: Seq[Observation]) -> None:
        """See whether what was pending was finite."""
        for seen in observations:
            self._checked(seen.sequence, self._unobserved.pop(seen.sequence.id, None))

    def _draft(self, trees: list[DraftTree]) -> None:
        super()._draft(trees)
        self._unobserved.update({tree.sequence.id: tree for tree in trees if tree.pending is not None})

    def grow(self, trees: list[DraftTree]) -> None:
        """What one call can draw apart from the others."""
        if self.may_pend:
            self._grow_pending(trees)
        left = [tree for tree in trees if tree.pending is None]
        draws = whole_chains(left)
        drawn = [tree for tree in left if tree.sequence.id in draws]
        if drawn:
            chains = self.executor.draft_chain(
                self.states(drawn),
                [tree.sequence.token_ids[-1] for tree in drawn],
                Chains(list(draws.values()), self._trees.vocab_size),
            )
            for tree, token_ids in zip(drawn, chains, strict=True):
                tree.take_chain(token_ids)
        others = [tree for tree in left if tree.sequence.id not in draws]
        if others:
            grow = self._grow_in_turn if self.executor.reads_tokens else self._grow_at_once
            grow(others, self.states(others))

    def _grow_pending(self, trees: list[DraftTree]) -> None:
        """Have the executor draw whole drafts on the device, where it can."""
        cache, whole = self.target_cache, WholeDrafts.of(trees, self._trees.vocab_size, self.pends_on)
        assert cache is not None, "attach() comes before the first proposal"
        if whole is None:
            return
        texts = [tree.sequence for tree in whole.trees]
        places = [cache.accounting.slots(text.id)[text.num_computed - 1] for text in texts]
        states, last = FirstStates(cache.features_at, places), [text.token_ids[-1] for text in texts]
        drawn = self.executor.draft(cache.pool, whole.drafts, states, last)
        if drawn is not None:
            whole.take(drawn)

    def _grow_at_once(self, trees: list[DraftTree], states: Tensor) -> None:
        """One pass gives the logits of all levels; all nodes of a level share them."""
        depth = max(tree.max_depth for tree in trees)
        logits = self.executor.forward(states, 0, depth)  # [depth, trees, vocab]
        for number, tree in enumerate(trees):
            for level in range(tree.max_depth):
                if tree.frontier:
                    tree.grow(logits[level, number].expand(len(tree.frontier), -1))

    def _grow_in_turn(self, trees: list[DraftTree], states: Tensor) -> None:
        """A pass over one head a level, with a row for each node of the frontier.

        A row is its parent's row, or the target's state for the committed text, and the embedding of its own token.
        """
        for tree, state in zip(trees, states, strict=True):
            tree.state = state
        level, growing = 0, trees
        while growing:
            above = [state for tree in growing for state in tree.states_above()]
            tokens = [token_id for tree in growing for token_id in tree.frontier_tokens()]
            embeds = self.target.embed(upload(tokens, self.target.device))
            rows = torch.cat([torch.stack(above), embeds], dim=-1)
            logits = self.executor.forward(rows, level, 1)[0]
            end = 0
            for tree in growing:
                begin, end = end, end + len(tree.frontier)
                tree.keep_states(rows[begin:end])
                tree.grow(logits[begin:end])
            level, growing = level + 1, [tree for tree in growing if tree.frontier]


def target_of(options: HeadOptions, context: DraftContext) -> CausalLM:
    """The loaded target; raises `ConfigError` where there is none."""
    if context.target is None:
        raise ConfigError(f"{options.method} reads the target's hidden states, and no target is loaded")
    return context.target
