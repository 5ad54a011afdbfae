"""Hydra heads draft a chain or a tree (Ankner et al., COLM 2024); see `slipstream.draft.heads.hydra_head`."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.draft.base import DraftContext
from slipstream.draft.heads.head_drafter import HeadDrafter, HeadOptions, target_of
from slipstream.draft.heads.hydra_head import WEIGHT_FILES, load_hydra
from slipstream.draft.model.draft_tree import DraftTree


@dataclass(frozen=True, kw_only=True)
class HydraOptions(HeadOptions):
    """Keys of `speculative_config` for `method: hydra`."""

    def __post_init__(self) -> None:
        self.check("hydra")


class HydraDrafter(HeadDrafter):
    """One pass over one head a level, with a row for each node of the frontier."""

    Options = HydraOptions
    weight_files = WEIGHT_FILES

    def __init__(self, options: HydraOptions, context: DraftContext) -> None:
        target = target_of(context, "hydra")
        self.heads = load_hydra(options.model, target.project, options.revision)
        super().__init__(options, context, target, self.heads)

    def _grow(self, trees: Seq[DraftTree], features: Tensor) -> None:
        for tree, feature in zip(trees, features, strict=True):
            tree.state = feature
        level, growing = 0, list(trees)
        while growing:
            rows = torch.cat([self._above(growing), self.target.embed(self._tokens(growing))], dim=-1)
            logits = self.executor.forward(rows, level, 1)[0]
            end = 0
            for tree in growing:
                begin, end = end, end + len(tree.frontier)
                for node, row in zip(tree.frontier, rows[begin:end], strict=True):
                    if node is None:
                        tree.state = row
                    else:
                        node.state = row
                tree.grow(logits[begin:end])
            level, growing = level + 1, [tree for tree in growing if tree.frontier]

    def _above(self, trees: Seq[DraftTree]) -> Tensor:
        """Each frontier node's prefix of its input row: its parent's row, or the target's state for the committed
        text."""
        return torch.stack(
            [
                node.parent.state if node and node.parent else tree.state
                for tree in trees
                for node in tree.frontier
            ]
        )

    def _tokens(self, trees: Seq[DraftTree]) -> Tensor:
        """The token of each frontier node; the last committed token for the committed text."""
        return torch.tensor(
            [
                node.token_id if node else tree.sequence.token_ids[-1]
                for tree in trees
                for node in tree.frontier
            ],
            device=self.target.device,
        )
