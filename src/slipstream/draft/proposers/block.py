"""A whole block in one pass: what DFlash's heads do, and those that grew from them.

An entry of the cache belongs to a committed token and is made of the target's features of that token. The block is the
*anchor*, which is the last committed token, whose features the target has not computed yet, and mask tokens behind it.
Its rows lie behind the entries during a pass, and nothing of them is kept: accepted tokens get their entries from the
features of the pass that verified them.

Without a left-to-right head a row's distribution is a marginal, the same whatever is drafted before it: `marginals`
says what becomes of them. With one, each level is drawn from logits that were corrected by the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.heads.block_executor import BlockExecutor
from slipstream.draft.heads.dflash_head import DFlashConfig
from slipstream.draft.proposers.draft_tree import DraftTree, Peaks, whole_chains
from slipstream.draft.proposers.growing import Feed
from slipstream.draft.proposers.marginals import grow_tree, take_chains
from slipstream.draft.proposers.own_cache import CachedDrafter
from slipstream.draft.proposers.proposal_shape import ShapeOptions
from slipstream.draft.proposers.whole_drafts import WholeDrafts
from slipstream.kv.cache import KVCache
from slipstream.kv.pool import LayerShape
from slipstream.kv.upload import upload
from slipstream.models.batch import ForwardBatch
from slipstream.models.causal_lm import CausalLM
from slipstream.models.executor.chains import Chains, Draw
from slipstream.models.executor.recorded_drafts import FirstStates
from slipstream.models.rows import RowGroup


class BlockDrafter(CachedDrafter):
    """Drafts with a head whose executor a subclass makes."""

    keeps_accepted = False
    executor: BlockExecutor
    target_cache: KVCache | None = None

    def __init__(
        self, options: ShapeOptions, context: DraftContext, *, config: DFlashConfig, like: CausalLM
    ) -> None:
        """`config` is the head's, which drafts for the target `like`; at most as deep as its block is."""
        self.block = config
        super().__init__(
            options,
            context,
            vocab_size=context.vocab_size,
            context_length=config.max_position_embeddings,
            shapes=entry_shapes(config),
            like=like,
        )
        is_used = options.confidence_threshold > 0 or self.shape.is_dynamic
        self._estimates = config.confidence is not None and is_used
        """Whether what the head says of its tokens ends chains, or weights the nodes of dynamic trees."""

    def attach(self, cache: KVCache) -> None:
        self.target_cache = cache

    def weight_bytes(self) -> int:
        return self.executor.footprint()

    def _num_ready(self, sequence: Sequence) -> int:
        return min(len(sequence.token_ids) - 1, sequence.num_computed)

    def _max_stored(self) -> int:
        return self._num_rows(self.shape.depth) - 1

    def _num_rows(self, levels: int) -> int:
        """Rows of a block of which so many levels are used. Fewer rows change what is drafted unless all layers are
        causal: then a row does not see those behind it. A refiner reads the mean of all."""
        correction = self.block.left_to_right
        reads_all = not all(self.block.causal) or (correction is not None and correction.kind == "refiner")
        return self.block.block_size if reads_all else self.block.first_slot + levels

    def grow(self, trees: list[DraftTree]) -> None:
        feeds = self.pending_feeds(trees)
        for feed in feeds:
            self.commit_feed(feed)
        ready = [tree for tree in trees if tree.frontier and self._is_ready(tree)]
        if not self._grow_pending(feeds, ready) and feeds:
            features = torch.cat([self._features(feed) for feed in feeds])
            self.executor.store(ForwardBatch([feed.rows for feed in feeds]), self.cache.pool, features)
        if left := [tree for tree in ready if tree.frontier]:
            self._draft_blocks(left)

    def _grow_pending(self, feeds: Seq[Feed], trees: list[DraftTree]) -> bool:
        """Store the feeds' entries and draft all that nothing but logits decides about; False where nothing is done."""
        if not self.may_pend or self._estimates or self.target_cache is None:
            return False
        whole = WholeDrafts.of(trees, self._trees.vocab_size, self.pends_on)
        if whole is None:
            return False
        places: list[int] = []
        for feed in feeds:
            slots = self.target_cache.accounting.slots(feed.tree.sequence.id)
            places += slots[feed.first : feed.first + len(feed.rows.token_ids)]
        texts = [tree.sequence.token_ids[-2:] for tree in whole.trees]
        drawn = self.executor.draft(
            [feed.rows for feed in feeds],
            FirstStates(self.target_cache.features_at, places),
            self._blocks(whole.trees),
            ([text[-1] for text in texts], [text[0] for text in texts]),
            self.cache.pool,
            whole.drafts,
        )
        if drawn is not None:
            whole.take(drawn)
        return drawn is not None

    def _is_ready(self, tree: DraftTree) -> bool:
        """True where all tokens before the anchor have entries."""
        return self.cache.accounting.num_valid(tree.sequence.id) == tree.length - 1

    def _features(self, feed: Feed) -> Tensor:
        """[rows, width]: the target's features of a feed's tokens."""
        assert self.target_cache is not None, "attach() comes before the first proposal"
        end = feed.first + len(feed.rows.token_ids)
        return self.target_cache.features(feed.tree.sequence.id, feed.first, end)

    def _blocks(self, trees: list[DraftTree]) -> list[RowGroup]:
        """The rows of all trees' blocks."""
        levels = max(tree.max_depth for tree in trees)
        masks = [self.block.mask_token_id] * (self._num_rows(levels) - 1)
        wanted = range(self.block.first_slot, self.block.first_slot + levels)
        return [
            RowGroup(
                self.cache.accounting.slots(tree.sequence.id),
                tree.length - 1,
                [tree.sequence.token_ids[-1], *masks],
                wanted,
            )
            for tree in trees
        ]

    def _draft_blocks(self, trees: list[DraftTree]) -> None:
        states, logits = self.executor.forward(self._blocks(trees), self.cache.pool)
        if self.block.left_to_right is None and (self.shape.is_dynamic or not self._estimates):
            self._grow_at_once(trees, states, logits)
            return
        draws = {} if self._estimates else whole_chains(trees)
        if len(draws) in (0, len(trees)):
            self._grow_alike(trees, states, logits, draws)
            return
        for are_drawn in (True, False):
            numbers = [n for n, tree in enumerate(trees) if (tree.sequence.id in draws) == are_drawn]
            some = [trees[number] for number in numbers]
            self._grow_alike(some, states[numbers], logits[numbers], draws if are_drawn else {})

    def _grow_alike(
        self, trees: list[DraftTree], states: Tensor, logits: Tensor, draws: dict[int, Draw]
    ) -> None:
        """Grow trees of which the kernels draw all or none, by what a left-to-right head reads."""
        if draws:
            self._draw_in_turn(trees, states, logits, Chains(list(draws.values()), self._trees.vocab_size))
        else:
            self._grow_in_turn(trees, states, logits)

    def _grow_at_once(self, trees: list[DraftTree], states: Tensor, logits: Tensor) -> None:
        """From marginals. `states` and `logits` are as for `_grow_in_turn`."""
        rows, firsts = logits.flatten(0, 1), range(0, logits.shape[0] * logits.shape[1], logits.shape[1])

        def draw(chains: Chains, own: Seq[int]) -> list[list[int]]:
            return self.executor.draw_levels(chains, rows, own)

        take_chains(trees, firsts, self._trees.vocab_size, draw)
        for tree, own, levels in zip(trees, states, logits, strict=True):
            if tree.frontier:
                found = self.executor.spread(levels[: tree.max_depth])
                grow_tree(tree, found, self._estimates_of_levels(tree, own) if self._estimates else None)

    def _estimates_of_levels(self, tree: DraftTree, states: Tensor) -> list[float] | None:
        """What the head says of the levels of marginals, by the block's `states` [rows, hidden]."""
        own = states[self.block.first_slot :][: tree.max_depth]
        # Any token will do: a confidence head reads those before only as a left-to-right head embeds them.
        return self.executor.confidence(own, self._ids([tree.sequence.token_ids[-1]] * len(own)))

    def _draw_in_turn(self, trees: list[DraftTree], states: Tensor, logits: Tensor, chains: Chains) -> None:
        """The trees' chains, a level at a time: as `_grow_in_turn`, but a token is drawn by the executor."""
        previous, before = self._ends(trees)
        read, above = self.executor.begin(states, previous, before)
        growing, level = list(range(len(trees))), 0
        while growing:
            slot = self.block.first_slot + level
            found, after = self.executor.step(
                slot, read[growing, slot], logits[growing, level], previous, above
            )
            going = self.executor.draw_level(chains, found, growing)
            above = after[[growing.index(chain) for chain in going]]
            previous = self._ids([chains.drawn[chain][-1] for chain in going])
            growing, level = going, level + 1
        for tree, token_ids in zip(trees, chains.drawn, strict=True):
            tree.take_chain(token_ids)

    def _grow_in_turn(self, trees: list[DraftTree], states: Tensor, logits: Tensor) -> None:
        """A level at a time, from the tokens of the one before.

        `states` [trees, rows, hidden] and `logits` [trees, levels, draft vocab] are what a pass gave.
        """
        read, begun = self.executor.begin(states, *self._ends(trees))
        for tree, state in zip(trees, begun, strict=True):
            tree.state = state
        for level in range(logits.shape[1]):
            rows = [number for number, tree in enumerate(trees) for _ in tree.frontier]
            if not rows:
                return
            slot = self.block.first_slot + level
            previous = self._ids([token_id for tree in trees for token_id in tree.frontier_tokens()])
            above = torch.stack([state for tree in trees for state in tree.states_above()])
            found, after = self.executor.step(slot, read[rows, slot], logits[rows, level], previous, above)
            found = self.executor.spread(found)
            likely = self.executor.confidence(states[rows, slot], previous) if self._estimates else None
            peaks, end = Peaks.of(found, trees), 0
            for tree in trees:
                begin, end = end, end + len(tree.frontier)
                if end > begin:
                    tree.keep_states(after[begin:end])
                    tree.grow(found[begin:end], peaks.rows(begin, end), likely[begin:end] if likely else None)

    def _ends(self, trees: list[DraftTree]) -> tuple[Tensor, Tensor]:
        """The anchors int64 [trees], and the tokens before them: the anchors again where there are none."""
        ends = [tree.sequence.token_ids[-2:] for tree in trees]
        return self._ids([end[-1] for end in ends]), self._ids([end[0] for end in ends])

    def _ids(self, token_ids: list[int]) -> Tensor:
        return upload(token_ids, self.device)


def entry_shapes(config: DFlashConfig) -> list[LayerShape]:
    """What each layer of a head holds of a token."""
    return [LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)] * config.num_layers
