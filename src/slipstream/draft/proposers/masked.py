"""All levels in one pass: mask tokens follow the text, and the row of each is the draft of a later position.

After An, Bai, Liu, Li and Barsoum, "PARD: accelerating LLM inference with low-cost parallel draft model adaptation"
(2025, arXiv 2504.18583), for draft models, and Hui et al., "P-EAGLE: parallel-drafting EAGLE with scalable training"
(2026, arXiv 2602.01469), for EAGLE-3 heads.

No mask sees a draft token, so the probabilities of a level are the same below all nodes of the level above: they are
marginals, given the committed text alone. What is drawn from them is drawn with the noise of its own position.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from slipstream.draft.proposers.autoregressive import AutoregressiveDrafter
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.draft.proposers.growing import Feed
from slipstream.draft.proposers.marginals import grow_from_marginals
from slipstream.draft.proposers.own_cache import CachedDrafter
from slipstream.draft.proposers.whole_drafts import WholeDrafts
from slipstream.kv.upload import upload
from slipstream.models.executor.levels import PendingDrafts, draw_marginals


class MaskedDrafter(CachedDrafter, AutoregressiveDrafter):
    """Feeds the committed tokens that the cache does not hold, and behind them a mask for each further level.

    The masks' entries are not kept: the next pass overwrites them.
    """

    keeps_accepted = False  # where a draft token would have an entry there is a mask's
    mask_token_id: int

    def grows_on_device(self) -> bool:
        return False  # there is nothing to grow a pass a level

    def grow(self, trees: list[DraftTree]) -> None:
        feeds = self.pending_feeds(trees)
        if self.may_pend:
            feeds = self._grow_whole(feeds)
        if not feeds:
            return
        logits = self._forward([self._with_masks(feed, feed.tree.max_depth) for feed in feeds])
        for feed in feeds:
            self.commit_feed(feed)
        grow_from_marginals([feed.tree for feed in feeds if feed.rows.logit_rows], logits)

    def _grow_whole(self, feeds: list[Feed]) -> list[Feed]:
        """Draft on the device all that nothing but logits decides about; returns the other feeds."""
        vocab_size = self._trees.vocab_size
        whole = WholeDrafts.of(
            [feed.tree for feed in feeds if feed.rows.logit_rows], vocab_size, self.pends_on
        )
        if whole is None:
            return feeds
        # All have as many rows: no mask sees those behind it.
        drafted = {tree.sequence.id for tree in whole.trees}
        own = [self._with_masks(feed, whole.depth) for feed in feeds if feed.tree.sequence.id in drafted]
        drawn = self.draw_at_once(own, whole.drafts)
        if drawn is None:
            logits = self._forward(own)
            drawn = draw_marginals(whole.drafts.shape, upload(whole.drafts.numbers(), logits.device), logits)
        for feed in own:
            self.commit_feed(feed)
        whole.take(drawn)
        return [feed for feed in feeds if feed.tree.pending is None]

    def draw_at_once(self, feeds: Seq[Feed], drafts: PendingDrafts) -> Tensor | None:
        """What is drawn from one pass over the feeds, in one call; None where that cannot be done."""
        return None

    def _with_masks(self, feed: Feed, depth: int) -> Feed:
        """The feed with masks behind its last row, for so many levels; unchanged where the text goes on after that."""
        rows = feed.rows
        if not rows.logit_rows:
            return feed
        last, num_masks = len(rows.token_ids) - 1, depth - 1
        token_ids = [*rows.token_ids, *[self.mask_token_id] * num_masks]
        rows = replace(rows, token_ids=token_ids, logit_rows=range(last, last + 1 + num_masks))
        return replace(feed, rows=rows, num_masks=num_masks)

    def _max_stored(self) -> int:
        return self.shape.depth - 1
