"""All levels in one pass: mask tokens follow the text, and the row of each is the draft of a later position.

After An, Bai, Liu, Li and Barsoum, "PARD: accelerating LLM inference with low-cost parallel draft model adaptation"
(2025, arXiv 2504.18583), for draft models, and Hui et al., "P-EAGLE: parallel-drafting EAGLE with scalable training"
(2026, arXiv 2602.01469), for EAGLE-3 heads.

No mask sees a draft token, so the probabilities of a level are the same below all nodes of the level above: they are
marginals, given the committed text alone. What is drawn from them is drawn with the noise of its own position.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.draft.proposers.autoregressive import AutoregressiveDrafter
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.draft.proposers.growing import Feed
from slipstream.draft.proposers.marginals import grow_from_marginals
from slipstream.draft.proposers.own_cache import CachedDrafter


class MaskedDrafter(CachedDrafter, AutoregressiveDrafter):
    """Feeds the committed tokens that the cache does not hold, and behind them a mask for each further level.

    The masks' entries are not kept: the next pass overwrites them.
    """

    keeps_accepted = False  # where a draft token would have an entry there is a mask's
    mask_token_id: int

    def grow(self, trees: list[DraftTree]) -> None:
        feeds = self.pending_feeds(trees)
        if not feeds:
            return
        logits = self._forward([self._with_masks(feed) for feed in feeds])
        for feed in feeds:
            self.commit_feed(feed)
        grow_from_marginals([feed.tree for feed in feeds if feed.rows.logit_rows], logits)

    def _with_masks(self, feed: Feed) -> Feed:
        """The feed with masks behind its last row; unchanged where the text goes on after that."""
        rows = feed.rows
        if not rows.logit_rows:
            return feed
        last, num_masks = len(rows.token_ids) - 1, feed.tree.max_depth - 1
        token_ids = [*rows.token_ids, *[self.mask_token_id] * num_masks]
        rows = replace(rows, token_ids=token_ids, logit_rows=range(last, last + 1 + num_masks))
        return replace(feed, rows=rows, num_masks=num_masks)

    def _max_stored(self) -> int:
        return self.shape.depth - 1
