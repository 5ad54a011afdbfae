"""Medusa heads draft a chain or a tree (Cai et al., ICML 2024); see `slipstream.draft.heads.medusa_head`.

The paper's typical acceptance is not used, because it changes the target's output distribution.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from slipstream.draft.base import DraftContext
from slipstream.draft.heads.head_drafter import HeadDrafter, HeadOptions, target_of
from slipstream.draft.heads.medusa_head import WEIGHT_FILES, load_medusa
from slipstream.draft.model.draft_tree import DraftTree


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(HeadOptions):
    """Keys of `speculative_config` for `method: medusa`."""

    def __post_init__(self) -> None:
        self.check("medusa")


class MedusaDrafter(HeadDrafter):
    """One pass over the heads gives the logits of all levels; all nodes of a level share them."""

    Options = MedusaOptions
    weight_files = WEIGHT_FILES

    def __init__(self, options: MedusaOptions, context: DraftContext) -> None:
        target = target_of(context, "medusa")
        self.heads = load_medusa(options.model, target.project, options.revision)
        super().__init__(options, context, target, self.heads)

    def _grow(self, trees: Seq[DraftTree], features: Tensor) -> None:
        depth = max(tree.max_depth for tree in trees)
        logits = self.executor.forward(features, 0, depth)  # [depth, trees, vocab]
        for number, tree in enumerate(trees):
            for level in range(tree.max_depth):
                if tree.frontier:
                    tree.grow(logits[level, number].expand(len(tree.frontier), -1))
