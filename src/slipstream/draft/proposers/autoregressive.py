"""Level by level: a pass for each level of all trees, or a whole chain in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.draft.base import DraftContext
from slipstream.draft.proposers.correction import CorrectedOptions, Correction
from slipstream.draft.proposers.device_tree import DeviceTrees, grows_on_device, tree_shape
from slipstream.draft.proposers.draft_tree import DraftTree, Peaks, whole_chains
from slipstream.draft.proposers.growing import EntriesDrafter, Feed
from slipstream.draft.proposers.proposal_shape import ShapeOptions
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.levels import BlankDrafts, ChainsShape, DraftShape, PendingDrafts, blank_rows
from slipstream.models.executor.recorded_drafts import most_wanted


class AutoregressiveDrafter(EntriesDrafter):
    """Each level is computed from the tokens of the one before. A subclass implements `_forward`."""

    def __init__(self, options: ShapeOptions, context: DraftContext, *, vocab_size: int) -> None:
        super().__init__(options, context, vocab_size=vocab_size)
        file = options.correction if isinstance(options, CorrectedOptions) else None
        self._correction = None if file is None else Correction.read(file, vocab_size)

    def memory_bytes(self) -> int:
        correction = 0 if self._correction is None else self._correction.num_bytes
        return super().memory_bytes() + correction

    @abstractmethod
    def _forward(self, feeds: Seq[Feed]) -> Tensor:
        """One pass over the rows of all feeds: logits [wanted rows, target's vocab], feed after feed."""

    def grow(self, trees: list[DraftTree]) -> None:
        feeds = self._draft_trees(self._draft_chains(self.pending_feeds(trees)))
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
        draw = Chains(list(draws.values()), self._trees.vocab_size, self.may_pend, self.pends_on)
        chains = self._chains(drawn, draw)
        for feed, token_ids in zip(drawn, chains, strict=True):
            self.commit_feed(feed)
            feed.tree.take_chain(token_ids)
        return [feed for feed in feeds if feed.tree.sequence.id not in draws]

    def _draft_trees(self, feeds: list[Feed]) -> list[Feed]:
        """Grow the trees that a device can grow by itself; returns the other feeds."""
        if self._correction is not None or not (self.may_pend and self.grows_on_device()):
            return feeds
        grown = [feed for feed in feeds if feed.rows.logit_rows and grows_on_device(feed.tree)]
        if not grown:
            return feeds
        firsts = []
        for feed in grown:
            slots = self.cache.accounting.slots(feed.tree.sequence.id)[self.first_entry :]
            firsts.append((slots, feed.tree.length - self.first_entry))
        trees = DeviceTrees([feed.tree for feed in grown], self._trees.vocab_size, firsts, self.pends_on)
        if not self._grow_pending(grown, trees):
            return feeds
        for feed in grown:
            self.commit_feed(feed)
        return [feed for feed in feeds if feed.tree.pending is None]

    def grows_on_device(self) -> bool:
        """Whether `_grow_pending` can grow trees whose tokens and paths are known on the device only."""
        return False

    def _grow_pending(self, feeds: Seq[Feed], trees: DeviceTrees) -> bool:
        """Feed the rows and grow a whole tree behind each feed; False where that cannot be done, and was not."""
        raise NotImplementedError

    def record_drafts(self, draw: Callable[[ForwardBatch, PendingDrafts], object]) -> None:
        """Have `draw` draw the usual numbers of usual drafts from blank rows, the most first."""
        shape, vocab_size = self.shape, self._trees.vocab_size
        if self._correction is not None or shape.widths is not None or shape.method == "probabilistic":
            return
        own: DraftShape = ChainsShape(shape.depth, vocab_size, False)
        if not shape.is_chain:
            own = tree_shape(shape, vocab_size, shape.depth)
        widest = max((1, *own.fed))
        most = min(self.context.engine_config.max_num_seqs, most_wanted(widest) // widest)
        scratch = self.cache.pool.scratch[:1]
        for number in (1 << bits for bits in reversed(range(most.bit_length()))):
            rows = [row for _ in range(number) for row in blank_rows(1, scratch)]
            with torch.inference_mode():
                draw(ForwardBatch(rows), BlankDrafts(own, number))

    def draws_chains(self) -> bool:
        """Whether `_chains` draws whole chains; False: level by level, from the logits of `_forward`."""
        return True

    def _chains(self, feeds: Seq[Feed], chains: Chains) -> Seq[Seq[int]]:
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
            self.commit_feed(feed)
            if end > begin:
                feed.tree.grow(logits[begin:end], peaks.rows(begin, end))

    def _frontier(self, tree: DraftTree) -> Feed:
        """The rows of a tree's next level, whose entries lie behind those of the text."""
        nodes = [node for node in tree.frontier if node is not None]
        slots = self.cache.accounting.slots(tree.sequence.id)[self.first_entry :]
        rows = tree.store_frontier(slots, tree.length - self.first_entry, self._own_id)
        return Feed(tree, rows, tree.length + nodes[0].depth - 1, nodes)
