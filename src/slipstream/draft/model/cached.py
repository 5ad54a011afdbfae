"""Drafters with a model and a KV cache of their own.

Committed tokens that the cache does not hold yet (the last draft token after full acceptance, a stretch decoded without
speculation, a whole prompt) are all handled alike: they are fed before the first draft token is computed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core import EMPTY_PROPOSAL, Proposal, Sequence
from slipstream.draft.base import DraftContext, Observation
from slipstream.draft.model.growth import (
    DraftNode,
    Growth,
    GrowthOptions,
    NotFiniteError,
    Peaks,
    whole_chains,
)
from slipstream.draft.model.shaped import ShapedDrafter
from slipstream.kv.cache import KVCache
from slipstream.kv.pool import LayerShape, bytes_per_token
from slipstream.models.cpu.chains import Chains
from slipstream.models.rows import RowGroup


@dataclass(slots=True)
class Feed:
    """One sequence's rows in a pass of the drafter: committed tokens, or the frontier of its tree."""

    growth: Growth
    rows: RowGroup
    first: int
    """Position in the text of the first row's token."""
    nodes: list[DraftNode] | None = None
    """One a row when the rows are draft tokens; None when they are committed tokens."""
    num_new: int = 0
    """How many of the last rows are committed tokens without a cache entry."""


class CachedDrafter(ShapedDrafter):
    """Grows a chain or a tree for all sequences at once, one pass a level.

    A subclass implements `_forward`. By default every committed token has a cache entry, and accepted draft tokens keep
    theirs.
    """

    context_length: int
    first_entry = 0
    """Index of the first committed token that gets an entry."""
    keeps_accepted = True
    """False where a draft token's entry is an estimate, so that accepted tokens are computed again."""

    def __init__(
        self,
        options: GrowthOptions,
        context: DraftContext,
        *,
        vocab_size: int,
        context_length: int,
        shapes: Seq[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`cache_dtype` is how keys and values are held; None: in `dtype`."""
        super().__init__(options, context, vocab_size=vocab_size)
        self.context_length = context_length
        self._shapes, self._dtype, self._device = tuple(shapes), dtype, device
        self._cache_dtype = dtype if cache_dtype is None else cache_dtype
        self._cache: KVCache | None = None
        self._open: dict[int, Growth] = {}
        """The last proposal of each sequence, until its verdict has been observed."""

    @abstractmethod
    def _forward(self, feeds: Seq[Feed]) -> Tensor:
        """One pass over the rows of all feeds: logits [wanted rows, target's vocab], feed after feed."""

    def _token_ids(self, sequence: Sequence) -> list[int]:
        """The committed text in the drafter's own tokens; its cache holds a prefix of it."""
        return sequence.token_ids

    def _own_id(self, token_id: int) -> int:
        """The drafter's own id of a draft token."""
        return token_id

    def _num_ready(self, sequence: Sequence) -> int:
        """How many of the committed tokens can be fed now."""
        return len(self._token_ids(sequence))

    def _can_read(self, token_ids: Seq[int]) -> bool:
        """False where the drafter has no embedding for some token."""
        return True

    # --- the contract -----------------------------------------------------------------------------------------

    def kv_bytes_per_token(self) -> int:
        return bytes_per_token(self._shapes, self._cache_dtype)

    def allocate(self, num_tokens: int) -> None:
        prefix_caching = self.context.engine_config.enable_prefix_caching
        self._cache = self._new_cache(num_tokens, prefix_caching)

    def _new_cache(self, num_tokens: int, prefix_caching: bool) -> KVCache:
        """In the layout that `_forward` reads."""
        return KVCache(self._shapes, num_tokens, self._dtype, self._device, prefix_caching)

    def memory_bytes(self) -> int:
        return self.weight_bytes() + (self.cache.memory_bytes() if self._cache else 0)

    def weight_bytes(self) -> int:
        """Bytes of the weights that are the drafter's own."""
        return 0

    @property
    def cache(self) -> KVCache:
        """The drafter's own keys and values."""
        assert self._cache is not None, "allocate() comes before the first proposal"
        return self._cache

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        # Reserve room for all sequences first: reserving for one may move another's entries.
        roomy = [self._has_room(sequence) for sequence in sequences]
        growths = {
            sequence.id: self._begin(sequence, budget)
            for sequence, budget, fits in zip(sequences, budgets, roomy, strict=True)
            if fits
        }
        feeds = self._committed(list(growths.values()))
        try:
            feeds = self._draft_chains(feeds)
            while feeds:
                self._compute(feeds)
                growing = [feed.growth for feed in feeds if feed.rows.logit_rows and feed.growth.frontier]
                feeds = [self._frontier(growth) for growth in growing]
        except NotFiniteError as error:
            self._drop_entries(error.sequence_id)
            raise
        self._open.update({i: growth for i, growth in growths.items() if growth.nodes})
        return [
            growths[sequence.id].proposal() if sequence.id in growths else EMPTY_PROPOSAL
            for sequence in sequences
        ]

    def observe(self, observations: Seq[Observation]) -> None:
        """Keep the entries of the accepted path; a path's deepest token was never fed, so it has none."""
        for seen in observations:
            sequence = seen.sequence
            growth = self._open.pop(sequence.id, None)
            if growth is None or not self.keeps_accepted or sequence.id not in self.cache.accounting:
                continue
            first = growth.length
            token_ids = self._token_ids(sequence)[first : first + seen.num_accepted]
            slots, end = self.cache.accounting.slots(sequence.id), first + len(growth.stored)
            moved = slots[first:end] != growth.slots[first:end]
            if moved or self.cache.accounting.num_valid(sequence.id) != first:
                continue  # the entries were moved, without the draft's; or the text was retokenised
            by_path = {self._own_path(node): node.stored for node in growth.stored}
            kept: list[int] = []
            while len(kept) < len(token_ids):
                stored = by_path.get(tuple(token_ids[: len(kept) + 1]))
                if stored is None:
                    break
                kept.append(stored)
            self.cache.commit(sequence.id, token_ids[: len(kept)], kept)

    def rewind(self, sequence: Sequence) -> None:
        """Cut the entries to the sequence's text."""
        self._open.pop(sequence.id, None)
        if sequence.id in self.cache.accounting:
            self.cache.accounting.truncate(sequence.id, len(self._token_ids(sequence)))

    def release(self, sequence: Sequence) -> None:
        self._open.pop(sequence.id, None)
        self._growths.release(sequence)
        if sequence.id in self.cache.accounting:
            self.cache.accounting.close(sequence.id)

    def reset(self) -> None:
        self.cache.accounting.clear()

    def num_held(self) -> int:
        return max(self.cache.accounting.num_owners, len(self._growths), len(self._open))

    def integrity(self) -> list[str]:
        return [f"draft: {fault}" for fault in self.cache.accounting.integrity()]

    # --- drafting ---------------------------------------------------------------------------------------------

    def _drop_entries(self, sequence_id: int) -> None:
        """Drop a sequence's entries after non-finite logits, and all retained ones: they may be damaged too."""
        self.cache.accounting.close(sequence_id, retain=False)
        self.cache.accounting.clear()

    def _has_room(self, sequence: Sequence) -> bool:
        """True when the committed text and the draft fit the drafter's context and its cache."""
        token_ids = self._token_ids(sequence)
        length = len(token_ids)
        if not length or length + self.shape.depth > self.context_length:
            return False
        accounting = self.cache.accounting
        opened = sequence.id in accounting
        seen = accounting.num_valid(sequence.id) if opened else 0
        if not self._can_read(token_ids[seen:]):
            return False
        if not opened and accounting.open(sequence.id, token_ids, sequence.tenant) is None:
            return False
        return accounting.reserve(sequence.id, length + self._max_stored())

    def _max_stored(self) -> int:
        """The most entries behind the committed ones at any time."""
        return self.shape.max_stored

    def _begin(self, sequence: Sequence, budget: int) -> Growth:
        self._open.pop(sequence.id, None)
        growth = self._growths.begin(sequence, budget, self.cache.accounting.slots(sequence.id))
        growth.length = len(self._token_ids(sequence))
        return growth

    def _own_path(self, node: DraftNode) -> tuple[int, ...]:
        return tuple(self._own_id(token_id) for token_id in node.token_ids())

    def _committed(self, growths: list[Growth]) -> list[Feed]:
        """Feeds of the committed tokens that the cache does not hold; logits are wanted behind the last token.

        The rows of one call are bounded as a target step's are, so that a long prompt does not delay other requests. A
        sequence whose tokens do not all fit proposes nothing in this step.
        """
        accounting = self.cache.accounting
        rows_left = self.context.engine_config.max_num_batched_tokens
        feeds: list[Feed] = []
        for growth in growths:
            sequence = growth.sequence
            text = self._token_ids(sequence)
            seen = accounting.num_valid(sequence.id)
            if seen < self.first_entry:
                accounting.commit(sequence.id, text[seen : self.first_entry])
                seen = accounting.num_valid(sequence.id)
            length = len(text)
            # The last token is fed again when `propose` is called twice for the same text.
            past = max(min(seen, length - 1), self.first_entry)
            end = min(past + rows_left, self._num_ready(sequence))
            if end <= past:
                continue
            token_ids = text[past:end]
            rows_left -= len(token_ids)
            wanted = [len(token_ids) - 1] if end == length and growth.max_nodes else []
            slots = accounting.slots(sequence.id)[self.first_entry :]
            rows = RowGroup(slots, past - self.first_entry, token_ids, wanted)
            feeds.append(Feed(growth, rows, past, num_new=end - seen))
        return feeds

    def _draft_chains(self, feeds: list[Feed]) -> list[Feed]:
        """Draft the chains that one call can draw from end to end; returns the other feeds."""
        if not self.draws_chains():
            return feeds
        draws = whole_chains(feed.growth for feed in feeds if feed.rows.logit_rows)
        drawn = [feed for feed in feeds if feed.growth.sequence.id in draws]
        if not drawn:
            return feeds
        chains = self._chains(drawn, Chains(list(draws.values()), self._growths.vocab_size))
        for feed, token_ids in zip(drawn, chains, strict=True):
            self._commit(feed)
            feed.growth.take_chain(token_ids)
        return [feed for feed in feeds if feed.growth.sequence.id not in draws]

    def draws_chains(self) -> bool:
        """Whether `_chains` can be called."""
        return False

    def _chains(self, feeds: Seq[Feed], chains: Chains) -> list[list[int]]:
        """Feed the rows and draft a whole chain behind each feed; see `Decoder.draft`."""
        raise NotImplementedError

    def _compute(self, feeds: list[Feed]) -> None:
        """One pass: commits the entries of committed tokens and grows every tree for which there are logits."""
        logits = self._forward(feeds)
        peaks = Peaks.of(logits, [feed.growth for feed in feeds])
        end = 0
        for feed in feeds:
            begin, end = end, end + len(feed.rows.logit_rows)
            self._commit(feed)
            if end > begin:
                feed.growth.grow(logits[begin:end], peaks.rows(begin, end))

    def _commit(self, feed: Feed) -> None:
        """Enter a feed's new committed tokens into the accounting."""
        if feed.num_new:
            token_ids = list(feed.rows.token_ids[-feed.num_new :])
            self.cache.accounting.commit(feed.growth.sequence.id, token_ids)

    def _frontier(self, growth: Growth) -> Feed:
        accounting = self.cache.accounting
        length = accounting.num_valid(growth.sequence.id)
        nodes = [node for node in growth.frontier if node is not None]
        first = self.first_entry
        slots = accounting.slots(growth.sequence.id)[first:]
        rows = growth.store_frontier(slots, length - first, self._own_id)
        return Feed(growth, rows, length + nodes[0].depth - 1, nodes)
