"""Block drafters (DFlash, DSpark and the others on their backbone) as students of the trainer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.dflash_files import save_dflash
from slipstream.draft.methods import DFLASH
from slipstream.train.batches import TrainingBatch, TrainingDocument, TrainingRows
from slipstream.train.block_loss import block_loss, draft_blocks
from slipstream.train.block_options import BlockTrainOptions
from slipstream.train.block_shapes import make_head
from slipstream.train.blocks import choose_blocks
from slipstream.train.channels import channel_scale, scaled, without_scales
from slipstream.train.target import FrozenTarget


class BlockStudent:
    """A block drafter that learns from the target's features, and from its texts or distributions."""

    def __init__(
        self,
        options: BlockTrainOptions,
        target: FrozenTarget,
        tokenizer: Any,
        documents: Seq[TrainingDocument],
        method: str,
        seed: int,
    ) -> None:
        """`method` is a name in `block_options.PRESETS`. Raises what `make_head` raises."""
        self.name, self.target, self._seed = method, target, seed
        torch.manual_seed(seed)
        start = make_head(options, target, tokenizer, documents, method)
        self.head, self.options, self._notes = start.head, start.options, start.notes
        self.module: nn.Module = self.head
        self.feature_layers: Seq[int] = self.head.config.feature_layers
        scale = channel_scale(target, documents, self.feature_layers)
        self.head.fc = scaled(self.head.fc, scale, is_fresh=options.init is None)

    def own_text(self, rows: TrainingRows, step: int) -> TrainingRows:
        """`rows` unchanged."""
        return rows

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """See `block_loss`; the anchors are drawn anew for each batch of the run."""
        config = self.head.config
        blocks = choose_blocks(batch, self.options.num_anchors, config.num_drafts, [self._seed, batch.step])
        if blocks is None:
            return torch.zeros((), device=batch.token_ids.device), {}
        project = self.target.model.get_output_embeddings()
        made = draft_blocks(self.head, batch, blocks, self._embed, project)
        return block_loss(self.head, batch, blocks, made, self.options)

    def about_loss(self) -> str:
        """See `Student`; also says what the head begins with."""
        config = self.head.config
        layers = ", ".join(map(str, self.feature_layers))
        shape = (
            f"{config.num_drafts} draft tokens a block, {config.num_layers} layers, feature layers {layers}"
        )
        meaning = (
            f"in the log: loss is the weighted mean of {self.options.loss} over the draft tokens of random blocks. tau "
            "is what a greedy draft of the texts would yield, in tokens a pass: 1 is no gain. agrees_1 is how often "
            "the first choice for the first draft token is the text's"
        )
        return "\n".join([*self._notes, shape, meaning])

    def save(self, folder: Path) -> None:
        """Write the head in the chosen layout of files."""
        save_dflash(
            without_scales(self.head), folder, target=self.target.path, layout=self.options.file_layout
        )

    def target_path(self, folder: Path) -> None:
        """None: the target does not change."""

    def speculative_config(self, folder: Path) -> SpeculativeConfig:
        """A chain, so that evaluations report acceptance by position."""
        options: dict[str, Any] = {
            "model": str(folder),
            "num_speculative_tokens": self.head.config.num_drafts,
            "tree_top_k": 1,
            "num_draft_nodes": None,
        }
        return SpeculativeConfig(DFLASH.name, options=options)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.head.embedding is None:
            return self.target.embed(token_ids)
        return self.head.embedding.to(token_ids.device)[token_ids]
