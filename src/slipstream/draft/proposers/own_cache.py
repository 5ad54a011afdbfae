"""Drafters whose keys and values are their own.

Committed tokens that the cache does not hold yet (the last draft token after full acceptance, a stretch decoded without
speculation, a whole prompt) are all handled alike: they are fed before the first draft token is computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from slipstream.core.pending import PendingNumbers, PendingTail
from slipstream.core.pending_tree import PendingTree
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Observation
from slipstream.draft.proposers.draft_tree import DraftNode, DraftTree, NotFiniteError
from slipstream.draft.proposers.growing import EntriesDrafter, Feed
from slipstream.draft.proposers.proposal_shape import ShapeOptions
from slipstream.kv.cache import KVCache
from slipstream.kv.pool import KVPool, LayerShape, bytes_per_token
from slipstream.models.causal_lm import CausalLM
from slipstream.models.rows import RowGroup


class CachedDrafter(EntriesDrafter):
    """By default every committed token has a cache entry, and accepted draft tokens keep theirs."""

    keeps_accepted = True
    """False where a draft token's entry is an estimate, so that accepted tokens are computed again."""

    traits = EntriesDrafter.traits  # `observe` reads no logits

    def __init__(
        self,
        options: ShapeOptions,
        context: DraftContext,
        *,
        vocab_size: int,
        context_length: int,
        shapes: Seq[LayerShape],
        like: CausalLM,
        kept_width: int = 0,
    ) -> None:
        """Keys and values are computed and held in the types of the model `like`, and where it is. `kept_width` numbers
        are kept with those of a token."""
        super().__init__(options, context, vocab_size=vocab_size)
        self._shapes, self._dtype = tuple(shapes), like.dtype
        self.device = like.device
        """Where drafts are drawn."""
        self._cache_dtype, self._kept_width = like.cache_dtype, kept_width
        self._num_scratch = like.executor.num_scratch_slots
        self.traits = replace(
            self.traits,
            context_length=context_length,
            kv_bytes_per_token=bytes_per_token(self._shapes, self._cache_dtype)
            + kept_width * like.dtype.itemsize,
        )
        self._behind: dict[int, DraftTree] = self.by_sequence()
        """The proposal before the last one, where that has not been observed either."""

    def _num_ready(self, sequence: Sequence) -> int:
        """How many of the committed tokens can be fed now."""
        return len(self._token_ids(sequence))

    def _can_read(self, token_ids: Seq[int]) -> bool:
        """False where the drafter has no embedding for some token."""
        return True

    # --- the contract -----------------------------------------------------------------------------------------

    def let_pend(self, device: torch.device) -> None:
        is_reached = self.device.type == device.type == "cuda"  # what is drawn is copied there without a wait
        self.pends_on = device if is_reached or self.device == device else None

    def allocate(self, num_tokens: int) -> None:
        super().allocate(num_tokens)
        prefix_caching = self.context.engine_config.enable_prefix_caching
        self._cache = self._new_cache(num_tokens, prefix_caching)

    def _new_cache(self, num_tokens: int, prefix_caching: bool) -> KVCache:
        """In the layout that passes read."""
        pool = KVPool(
            self._shapes, num_tokens, self._dtype, self.device, self._kept_width, self._cache_dtype,
            self._num_scratch,
        )  # fmt: skip
        return KVCache(pool, prefix_caching)

    def memory_bytes(self) -> int:
        cached = self.cache.memory_bytes() if self._cache else 0
        return super().memory_bytes() + self.weight_bytes() + cached

    def weight_bytes(self) -> int:
        """Bytes of the weights that are the drafter's own."""
        return 0

    def observe(self, observations: Seq[Observation]) -> None:
        """Keep the entries of the accepted path; a path's deepest token was never fed, so it has none."""
        for seen in observations:
            sequence = seen.sequence
            is_behind = sequence.id in self._behind
            last = (self._behind if is_behind else self._unobserved).pop(sequence.id, None)
            if sequence.id not in self.cache.accounting:
                continue
            tree = self._checked(sequence, last)
            if sequence.id in self._damaged:
                self._drop_entries(sequence.id)
                continue
            if is_behind:
                self._enter_text(sequence)
                continue
            if tree is None or not self.keeps_accepted:
                continue
            first = tree.length
            token_ids = self._token_ids(sequence)[first : first + seen.num_accepted]
            slots, end = self.cache.accounting.slots(sequence.id), first + len(tree.stored)
            moved = slots[first:end] != tree.slots[first:end]
            if moved or self.cache.accounting.num_valid(sequence.id) != first:
                continue  # the entries were moved, without the draft's; or the text was retokenised
            by_path = {self._own_path(node): node.stored for node in tree.stored}
            kept: list[int] = []
            while len(kept) < len(token_ids):
                stored = by_path.get(tuple(token_ids[: len(kept) + 1]))
                if stored is None:
                    break
                kept.append(stored)
            self.cache.commit(sequence.id, token_ids[: len(kept)], kept)

    def _enter_text(self, sequence: Sequence) -> None:
        """The text is known behind which the last chain was drawn: all of its entries are there."""
        token_ids, accounting = self._token_ids(sequence), self.cache.accounting
        accounting.commit(sequence.id, token_ids[accounting.num_valid(sequence.id) :])
        if sequence.id in self._unobserved:
            self._unobserved[sequence.id].length = len(token_ids)

    def rewind(self, sequence: Sequence) -> None:
        """Cut the entries to the sequence's text."""
        self._unobserved.pop(sequence.id, None)
        self._behind.pop(sequence.id, None)
        if sequence.id in self.cache.accounting:
            self.cache.accounting.truncate(sequence.id, len(self._token_ids(sequence)))

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        self.cache.close_encoded(sequence.id)
        if sequence.id in self.cache.accounting:
            self.cache.accounting.close(sequence.id)

    def reset(self) -> None:
        super().reset()
        self.cache.clear()

    def num_held(self) -> int:
        return max(super().num_held(), self.cache.accounting.num_owners, self.cache.num_encoded_held)

    def integrity(self) -> list[str]:
        faults = [f"draft: {fault}" for fault in self.cache.integrity()]
        return faults + super().integrity()

    # --- drafting ---------------------------------------------------------------------------------------------

    def _drop_entries(self, sequence_id: int) -> None:
        """Drop a sequence's entries after non-finite logits, and all retained ones: they may be damaged too. Of a chain
        that was drawn ahead of the verdict nothing is kept either."""
        self._unobserved.pop(sequence_id, None)
        self.cache.accounting.close(sequence_id, retain=False)
        self.cache.accounting.clear()

    def _has_room(self, sequence: Sequence) -> bool:
        """True when the committed text and the draft fit the drafter's context and its cache."""
        token_ids = self._token_ids(sequence)
        length = len(token_ids)
        limit = self.traits.context_length
        if not length or (limit is not None and length + self.shape.depth > limit):
            return False
        accounting = self.cache.accounting
        opened = sequence.id in accounting
        seen = accounting.num_valid(sequence.id) if opened else 0
        if not self._can_read(token_ids[seen:]):
            return False
        if not opened and accounting.open(sequence.id, token_ids, sequence.prefix_account) is None:
            return False
        return accounting.reserve(sequence.id, length + self._max_stored())

    def _max_stored(self) -> int:
        """The most entries behind the committed ones at any time."""
        return self.shape.max_stored

    def _begin(self, sequence: Sequence, budget: int) -> DraftTree:
        tree = self._unobserved.pop(sequence.id, None)
        if sequence.tail is None:
            self._behind.pop(sequence.id, None)
        elif tree is not None:
            self._behind[sequence.id] = tree
        return super()._begin(sequence, budget)

    def _draft(self, trees: list[DraftTree]) -> None:
        try:
            self._grow_sound(trees)
        except NotFiniteError as error:
            self._drop_entries(error.sequence_id)
            self._take_back(trees)
            raise
        except BaseException:
            self._take_back(trees)
            raise
        self._unobserved.update({tree.sequence.id: tree for tree in trees if tree.nodes or tree.pending})
        for tree in trees:
            if tree.sequence.tail is not None and tree.sequence.id not in self._unobserved:
                before = self._behind.pop(tree.sequence.id, None)  # nothing was drawn, nor fed
                if before is not None:
                    self._unobserved[tree.sequence.id] = before

    def _take_back(self, trees: list[DraftTree]) -> None:
        """A pass has failed or was not committed: states of recurrent layers go back to what is."""
        accounting = self.cache.accounting
        for tree in trees:
            if tree.sequence.id in accounting:
                accounting.truncate(tree.sequence.id, accounting.num_valid(tree.sequence.id))

    def _own_path(self, node: DraftNode) -> tuple[int, ...]:
        return tuple(self._own_id(token_id) for token_id in node.token_ids())

    def pending_feeds(self, trees: list[DraftTree]) -> list[Feed]:
        """Feeds of the committed tokens that the cache does not hold; logits are wanted behind the last token.

        The rows of one call are bounded as a target step's are, so that a long prompt does not delay other requests. A
        sequence whose tokens do not all fit proposes nothing in this step.
        """
        accounting = self.cache.accounting
        rows_left = self.context.engine_config.max_num_batched_tokens
        feeds: list[Feed] = []
        for tree in trees:
            sequence = tree.sequence
            text = self._token_ids(sequence)
            seen = accounting.num_valid(sequence.id)
            if seen < self.first_entry:
                accounting.commit(sequence.id, text[seen : self.first_entry])
                seen = accounting.num_valid(sequence.id)
            length = len(text)
            if sequence.tail is not None:
                feeds.append(self._feed_ahead(tree, sequence.tail))
                continue
            # The last token is fed again when `propose` is called twice for the same text.
            past = max(min(seen, length - 1), self.first_entry)
            end = min(past + rows_left, self._num_ready(sequence))
            if end <= past:
                continue
            token_ids = text[past:end]
            rows_left -= len(token_ids)
            wanted = [len(token_ids) - 1] if end == length and tree.max_nodes else []
            slots = accounting.slots(sequence.id)[self.first_entry :]
            rows = RowGroup(slots, past - self.first_entry, token_ids, wanted)
            rows.num_certain, rows.owner = end - self.first_entry, sequence.id
            feeds.append(Feed(tree, rows, past, num_new=end - seen))
        return feeds

    def num_fed_ahead(self, tail: PendingTail) -> int:
        """How many of a text's last tokens are fed before the host knows them, at least those without an entry."""
        return 2

    def _feed_ahead(self, tree: DraftTree, tail: PendingTail) -> Feed:
        """A feed of the last tokens of a text that ends with what a step in flight adds to it."""
        sequence, number = tree.sequence, self.num_fed_ahead(tail)
        first = len(self._token_ids(sequence)) - number
        slots = self.cache.accounting.slots(sequence.id)[self.first_entry :]
        last = PendingNumbers(tail.tokens.tensor[-number:])
        rows = RowGroup(slots, first - self.first_entry, [0] * number, [number - 1], drafted=last)
        rows.shift, rows.owner = tail.shift, sequence.id
        return Feed(tree, rows, first)

    def draws_ahead(self, sequence: Sequence) -> bool:
        """Whether a pending chain of this drafter's is in flight behind the whole text, whose entries are there."""
        tree, accounting = self._unobserved.get(sequence.id), self.cache.accounting
        if tree is None or tree.pending is None or isinstance(tree.pending, PendingTree):
            return False
        is_whole = accounting.num_valid(sequence.id) == tree.length == len(sequence.token_ids)
        return is_whole and isinstance(accounting.slots(sequence.id), range)

    def commit_feed(self, feed: Feed) -> None:
        """Enter a feed's new committed tokens into the accounting."""
        if feed.num_new:
            token_ids = list(feed.rows.token_ids[-feed.num_new :])
            self.cache.accounting.commit(feed.tree.sequence.id, token_ids)
