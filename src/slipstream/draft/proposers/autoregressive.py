"""Drafters that grow the proposals of all sequences together, one pass a level.

Where their keys and values lie is a subclass's: `cached` has a cache of its own, `borrowed` computes over the target's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.proposers.correction import CorrectedOptions, Correction
from slipstream.draft.proposers.draft_tree import DraftNode, DraftTree, DraftTrees, Peaks, whole_chains
from slipstream.draft.proposers.proposal_shape import ProposalShape, ShapeOptions
from slipstream.draft.traits import DrafterTraits
from slipstream.kv.cache import KVCache
from slipstream.models.batch import RowGroup
from slipstream.models.executor.chains import Chains


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


class LevelDrafter(Drafter):
    """Grows a chain or a tree for all sequences at once. A subclass implements `_forward`, a pass over given rows."""

    traits = DrafterTraits(kinds=frozenset(ProposalKind), observes_all=False)
    first_entry = 0
    """Index of the first committed token that gets an entry."""

    def __init__(self, options: ShapeOptions, context: DraftContext, *, vocab_size: int) -> None:
        """`vocab_size` is the number of target tokens that the drafter has logits for.

        Raises `ConfigError` where the verifier cannot judge what the options ask for.
        """
        super().__init__(options, context)
        self.shape = ProposalShape.of(options, context.verifier)
        self.traits = self.shape.traits(self.traits, options)
        self._trees = DraftTrees(self.shape, vocab_size, self.by_sequence(), options.confidence_threshold)
        self._cache: KVCache | None = None
        file = options.correction if isinstance(options, CorrectedOptions) else None
        self._correction = None if file is None else Correction.read(file, vocab_size)

    @property
    def cache(self) -> KVCache:
        """The keys and values that a pass reads and writes."""
        assert self._cache is not None, "allocate() and attach() come before the first proposal"
        return self._cache

    def correction_bytes(self) -> int:
        """What the layer on its logits holds; 0 without one."""
        return 0 if self._correction is None else self._correction.num_bytes

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
    def _forward(self, feeds: Seq[Feed]) -> Tensor:
        """One pass over the rows of all feeds: logits [wanted rows, target's vocab], feed after feed."""

    def _has_room(self, sequence: Sequence) -> bool:
        """True where a draft can be begun for the sequence, and has slots."""
        raise NotImplementedError

    @abstractmethod
    def _committed(self, trees: list[DraftTree]) -> list[Feed]:
        """Feeds of committed tokens; logits are wanted behind the last one of the text."""

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

    def _draft(self, trees: list[DraftTree]) -> None:
        """Grow all proposals to the end."""
        feeds = self._draft_chains(self._committed(trees))
        while feeds:
            self._compute(feeds)
            growing = [feed.tree for feed in feeds if feed.rows.logit_rows and feed.tree.frontier]
            feeds = [self._frontier(tree) for tree in growing]

    def _draft_chains(self, feeds: list[Feed]) -> list[Feed]:
        """Draft the chains that one call can draw from end to end; returns the other feeds."""
        if self._correction is not None or not self.draws_chains():
            return feeds  # an executor draws from the logits as they are
        draws = whole_chains(feed.tree for feed in feeds if feed.rows.logit_rows)
        drawn = [feed for feed in feeds if feed.tree.sequence.id in draws]
        if not drawn:
            return feeds
        chains = self._chains(drawn, Chains(list(draws.values()), self._trees.vocab_size))
        for feed, token_ids in zip(drawn, chains, strict=True):
            self._commit(feed)
            feed.tree.take_chain(token_ids)
        return [feed for feed in feeds if feed.tree.sequence.id not in draws]

    def draws_chains(self) -> bool:
        """Whether `_chains` draws whole chains; False: level by level, from the logits of `_forward`."""
        return True

    def _chains(self, feeds: Seq[Feed], chains: Chains) -> list[list[int]]:
        """Feed the rows and draft a whole chain behind each feed; see `Executor.draft_chain`."""
        raise NotImplementedError

    def _compute(self, feeds: list[Feed]) -> None:
        """One pass: commits the entries of committed tokens and grows every tree for which there are logits."""
        logits = self._forward(feeds)
        if self._correction is not None:
            logits = self._correction(logits, [feed.rows for feed in feeds])
        peaks = Peaks.of(logits, [feed.tree for feed in feeds])
        end = 0
        for feed in feeds:
            begin, end = end, end + len(feed.rows.logit_rows)
            self._commit(feed)
            if end > begin:
                feed.tree.grow(logits[begin:end], peaks.rows(begin, end))

    def _commit(self, feed: Feed) -> None:
        """The entries of a feed's new committed tokens have been written."""
        return

    def _frontier(self, tree: DraftTree) -> Feed:
        """The rows of a tree's next level, whose entries lie behind those of the text."""
        nodes = [node for node in tree.frontier if node is not None]
        slots = self.cache.accounting.slots(tree.sequence.id)[self.first_entry :]
        rows = tree.store_frontier(slots, tree.length - self.first_entry, self._own_id)
        return Feed(tree, rows, tree.length + nodes[0].depth - 1, nodes)
