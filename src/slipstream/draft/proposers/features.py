"""Level by level from the target's features, over entries of its own: what EAGLE's heads and layers for multi-token
prediction do.

A cache entry belongs to a token and the features of the token before it. Committed text is fed with the target's true
features, draft tokens with the head's own estimates. After a verdict the estimates are dropped, and accepted tokens are
fed again with the target's features.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.core.pending import PendingTail
from slipstream.core.sequence import Sequence
from slipstream.draft.heads.head_executor import FeatureExecutor
from slipstream.draft.proposers.autoregressive import AutoregressiveDrafter
from slipstream.draft.proposers.device_tree import DeviceTrees
from slipstream.draft.proposers.growing import Feed
from slipstream.draft.proposers.own_cache import CachedDrafter
from slipstream.kv.cache import KVCache
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.recorded_drafts import FirstStates


class FeatureDrafter(CachedDrafter, AutoregressiveDrafter):
    """Feeds a head with features; a subclass makes its executor, and says in its traits which layers' they are."""

    first_entry = 1  # the first token has no feature before it
    keeps_accepted = False
    executor: FeatureExecutor
    target_cache: KVCache | None = None

    def attach(self, cache: KVCache) -> None:
        self.target_cache = cache

    def weight_bytes(self) -> int:
        return self.executor.footprint()

    def _num_ready(self, sequence: Sequence) -> int:
        return min(len(sequence.token_ids), sequence.num_computed + 1)

    def grows_on_device(self) -> bool:
        return self.executor.records

    def runs_ahead(self, sequence: Sequence) -> bool:
        # All that the step adds is fed with the target's features, and as many tokens before it as it may fall short.
        if not self.executor.records or self.target_cache is None:
            return False
        if type(self).grow is not AutoregressiveDrafter.grow:
            return False  # what a subclass feeds behind the text is not shifted with it
        is_long = len(sequence.token_ids) > self.first_entry + self.shape.depth
        in_place = isinstance(self.target_cache.accounting.slots(sequence.id), range)
        return is_long and in_place and self.draws_ahead(sequence)

    def num_fed_ahead(self, tail: PendingTail) -> int:
        return tail.most

    def let_pend(self, device: torch.device) -> None:
        super().let_pend(device)
        if self.may_pend and self.grows_on_device() and self.executor.target.executor.warms_up:
            pool = self.cache.pool
            self.record_drafts(
                lambda rows, drafts: self.executor.draft(rows, pool, drafts, self._first_states([]))
            )

    def _first_states(self, feeds: Seq[Feed]) -> FirstStates:
        """Where the target's features of the token before each of the feeds' committed ones lie."""
        assert self.target_cache is not None, "attach() comes before the first proposal"
        places: list[int] = []
        for feed in feeds:
            slots = self.target_cache.accounting.slots(feed.tree.sequence.id)
            places += slots[feed.first - 1 : feed.first - 1 + len(feed.rows.token_ids)]
        return FirstStates(self.target_cache.features_at, places)

    def _grow_pending(self, feeds: Seq[Feed], trees: DeviceTrees) -> bool:
        rows = ForwardBatch([feed.rows for feed in feeds])
        drawn = self.executor.draft(rows, self.cache.pool, trees, self._first_states(feeds))
        if drawn is None:
            return False
        trees.finish(drawn)
        return True

    def _chains(self, feeds: Seq[Feed], chains: Chains) -> Seq[Seq[int]]:
        if chains.pends:
            rows = ForwardBatch([feed.rows for feed in feeds])
            chains.begin(rows)
            drawn = self.executor.draft(rows, self.cache.pool, chains, self._first_states(feeds))
            if drawn is not None:
                return chains.pending(drawn)
        if any(feed.rows.shift is not None for feed in feeds):
            return [[] for _ in feeds]  # where these rows are the host does not know, and nothing was fed
        features = torch.cat([self._features(feed) for feed in feeds])
        rows = ForwardBatch([feed.rows for feed in feeds])
        return self.executor.draft_chain(rows, self.cache.pool, features, chains)

    def _forward(self, feeds: Seq[Feed]) -> Tensor:
        level = feeds[0].nodes[0].depth if feeds[0].nodes else 0  # it is that of all feeds
        given = torch.cat([self._estimates(feed) if level else self._features(feed) for feed in feeds])
        rows = ForwardBatch([feed.rows for feed in feeds])
        states, logits = self.executor.forward(rows, self.cache.pool, given, level)
        self._remember(feeds, states)
        return logits

    def _features(self, feed: Feed) -> Tensor:
        """[rows, width]: the target's features of the token before each of a feed's committed ones."""
        assert self.target_cache is not None, "attach() comes before the first proposal"
        end = feed.first - 1 + len(feed.rows.token_ids)
        return self.target_cache.features(feed.tree.sequence.id, feed.first - 1, end)

    def _estimates(self, feed: Feed) -> Tensor:
        """[rows, width]: the head's own states of the token before each of a feed's draft tokens."""
        return torch.stack(feed.tree.states_above())

    def _remember(self, feeds: Seq[Feed], states: Tensor) -> None:
        """Store the estimates that the next level starts from."""
        end = 0
        for feed in feeds:
            begin, end = end, end + len(feed.rows.token_ids)
            if feed.nodes is None:
                feed.tree.state = states[end - 1]
            else:
                feed.tree.keep_states(states[begin:end])
