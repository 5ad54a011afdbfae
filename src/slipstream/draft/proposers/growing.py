"""The base of drafters that grow proposals: for all sequences together, as chains or trees.

A drafter is a model or head, a proposer and a policy of keys and values. The proposer is its `grow`, and by whose keys
and values it reads a text it extends one of three classes:

| keys and values | class |
|---|---|
| none: the target's last hidden state is enough | `parallel.StateDrafter` |
| its own | `own_cache.CachedDrafter` |
| the target's | `draft.model.shared_kv.SharedKVDrafter` |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.proposers.draft_tree import DraftNode, DraftTree, NotFiniteError
from slipstream.draft.proposers.draft_trees import DraftTrees
from slipstream.draft.proposers.proposal_shape import ProposalShape, ShapeOptions
from slipstream.draft.traits import DrafterTraits
from slipstream.kv.cache import KVCache
from slipstream.models.rows import RowGroup


class GrowingDrafter(Drafter):
    """Begins a tree for each sequence that has room for one, and grows all of them together."""

    traits = DrafterTraits(kinds=frozenset(ProposalKind), observes_all=False, reads_logits=False)
    pends_on: torch.device | None = None
    """The device where whole drafts may be pending; None where they may not."""

    @classmethod
    def configured(cls, options: Any, context: DraftContext) -> DrafterTraits:
        """Raises `ConfigError` where the verifier cannot judge what the options request."""
        return ProposalShape.of(options, context.verifier).traits(
            super().configured(options, context), options
        )

    def __init__(
        self, options: ShapeOptions, context: DraftContext, *, vocab_size: int, most_levels: int | None = None
    ) -> None:
        """`vocab_size` is the number of target tokens that the drafter has logits for; `num_speculative_tokens` is
        reduced to `most_levels`.

        Raises `ConfigError` where the verifier cannot judge what the options request.
        """
        super().__init__(options, context)
        if most_levels is not None:
            depth = min(options.num_speculative_tokens, most_levels)
            options = replace(options, num_speculative_tokens=depth)
        self.shape = ProposalShape.of(options, context.verifier)
        self.traits = self.shape.traits(self.traits, options)  # of fewer levels, maybe
        self._trees = DraftTrees(self.shape, vocab_size, self.by_sequence(), options.confidence_threshold)

        self._unobserved: dict[int, DraftTree] = self.by_sequence()
        """The last proposal of each sequence, until its verdict has been observed; without pending ones the host need
        not keep it."""
        self._damaged: dict[int, bool] = self.by_sequence()
        """Sequences whose last draft was not finite, which was seen once it was checked."""

    @property
    def may_pend(self) -> bool:
        """Whether whole drafts may be pending."""
        return self.pends_on is not None

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        # Reserve room for all sequences first: reserving for one may move another's entries.
        roomy = [self._has_room(sequence) for sequence in sequences]
        trees = {
            sequence.id: self._begin(sequence, budget)
            for sequence, budget, fits in zip(sequences, budgets, roomy, strict=True)
            if fits
        }
        self._draft(list(trees.values()))
        return [
            trees[sequence.id].proposal() if sequence.id in trees else EMPTY_PROPOSAL
            for sequence in sequences
        ]

    @abstractmethod
    def grow(self, trees: list[DraftTree]) -> None:
        """Grow all trees to the end: `DraftTree.grow` takes the logits of a level, `take_chain` a whole chain."""

    def _has_room(self, sequence: Sequence) -> bool:
        """True where a draft can be begun for the sequence, and has slots."""
        return self._trees.may_draft(sequence)

    def _begin(self, sequence: Sequence, budget: int) -> DraftTree:
        return self._trees.begin(sequence, budget)

    def _draft(self, trees: list[DraftTree]) -> None:
        self._grow_sound(trees)

    def _grow_sound(self, trees: list[DraftTree]) -> None:
        """`grow`; raises `NotFiniteError` for a sequence whose last draft was not finite."""
        for tree in trees:
            if tree.sequence.id in self._damaged:
                raise NotFiniteError(tree.sequence.id)
        self.grow(trees)

    def _checked(self, sequence: Sequence, tree: DraftTree | None) -> DraftTree | None:
        """A proposal that the target has checked meanwhile, with its nodes; None where there is none or it was not
        finite."""
        try:
            if tree is not None:
                tree.resolve()
        except NotFiniteError:
            self._damaged[sequence.id] = True
            return None
        return tree


@dataclass(slots=True)
class Feed:
    """One sequence's rows in a pass of the drafter: committed tokens, or the frontier of its tree."""

    tree: DraftTree
    rows: RowGroup
    first: int
    """Position in the text of the first row's token."""
    nodes: list[DraftNode] | None = None
    """One a row when the rows are draft tokens; None when they are committed tokens."""
    num_new: int = 0
    """How many of the last rows are committed tokens without a cache entry."""
    num_masks: int = 0
    """How many of the last rows are masks, behind the text."""


class EntriesDrafter(GrowingDrafter):
    """One whose passes read and write keys and values; whose these are, its subclasses say."""

    first_entry = 0
    """Index of the first committed token that gets an entry."""
    _cache: KVCache | None = None

    @property
    def cache(self) -> KVCache:
        """The keys and values that a pass reads and writes."""
        assert self._cache is not None, "allocate() and attach() come before the first proposal"
        return self._cache

    @abstractmethod
    def pending_feeds(self, trees: list[DraftTree]) -> list[Feed]:
        """Feeds of committed tokens; logits are wanted behind the last one of the text."""

    def commit_feed(self, feed: Feed) -> None:
        """The entries of a feed's new committed tokens have been written."""
        return

    def _token_ids(self, sequence: Sequence) -> list[int]:
        """The committed text in the drafter's own tokens; its cache holds a prefix of it."""
        return sequence.token_ids

    def _own_id(self, token_id: int) -> int:
        """The drafter's own id of a draft token."""
        return token_id

    def _begin(self, sequence: Sequence, budget: int) -> DraftTree:
        tree = self._trees.begin(sequence, budget, self.cache.accounting.slots(sequence.id))
        tree.length = len(self._token_ids(sequence))
        return tree
