"""The drafts of some sequences that a device draws from end to end."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from slipstream.draft.proposers.device_tree import DeviceTrees, grows_on_device
from slipstream.draft.proposers.draft_tree import DraftTree, whole_chains
from slipstream.models.executor.chains import Chains


class WholeDrafts:
    """Trees of which nothing but logits, temperatures and filters decides: all chains, or all dynamic trees."""

    def __init__(self, trees: list[DraftTree], drafts: Chains | DeviceTrees) -> None:
        self.trees, self.drafts = trees, drafts
        self.depth = 1 + len(drafts.shape.fed)

    @classmethod
    def of(cls, trees: Seq[DraftTree], vocab_size: int, onto: torch.device | None) -> WholeDrafts | None:
        """Those among `trees`, if any, to lie on the device `onto`. Their levels have no rows of their own."""
        draws = whole_chains(trees)
        if draws:
            chains = Chains(list(draws.values()), vocab_size, True, onto)
            return (
                cls([tree for tree in trees if tree.sequence.id in draws], chains) if chains.pends else None
            )
        grown = [tree for tree in trees if grows_on_device(tree)]
        return cls(grown, DeviceTrees(grown, vocab_size, onto=onto)) if grown else None

    def take(self, drawn: Tensor) -> None:
        """Have the trees take what was drawn, which stays pending."""
        if isinstance(self.drafts, DeviceTrees):
            self.drafts.finish(drawn)
            return
        for tree, token_ids in zip(self.trees, self.drafts.pending(drawn), strict=True):
            tree.take_chain(token_ids)
