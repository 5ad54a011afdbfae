"""What PARD-2 adds to a draft model's embeddings in training: `draft.model.target_projection`, which learns.

Some texts of each batch are read without the target's states, so that the model also drafts without them (An et al.,
2026, arXiv 2605.08632).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.draft.methods import is_pard2
from slipstream.draft.model.target_projection import ProjectionConfig, read_projection, save_projection
from slipstream.errors import ConfigError
from slipstream.train.batches import TrainingBatch, TrainingDocument
from slipstream.train.channels import channel_scale, scaled
from slipstream.train.mask_chains import ChainRows
from slipstream.train.options import PardTrainOptions, parse_layers
from slipstream.train.target import FrozenTarget

SCALE = 0.02
LOST_SHARE = 0.2
"""How many of the texts are read without states; both are the authors' numbers."""


class TargetStates(nn.Module):
    """The projection of a PARD-2 model, of states that are divided by their channels' size while it learns."""

    def __init__(self, config: ProjectionConfig, layer: nn.Linear, channels: Tensor) -> None:
        super().__init__()
        self.config = config
        self.layer = scaled(layer, channels, is_fresh=False)

    def forward(self, batch: TrainingBatch, rows: ChainRows, seed: Seq[int]) -> Tensor:
        """[n, hidden]: what is added to the rows' embeddings.

        A token's row reads the states of the token before it, the first token of a text nothing, and masks what the
        last token before them reads.
        """
        states = [batch.hidden_states[layer][rows.row] for layer in self.config.feature_layers]
        before = F.pad(torch.cat(states, dim=-1), (0, 0, 1, 0))  # nothing, and then the states of each token
        index = rows.places.where(batch.positions[rows.row][rows.places] > 0, 0)
        documents = batch.documents[rows.row]
        kept = np.random.default_rng(seed).random(int(documents.max()) + 1) >= LOST_SHARE
        is_kept = torch.from_numpy(kept).to(documents.device)[documents[rows.places]]
        added: Tensor = self.config.scale * self.layer(before)[index]
        return added * is_kept[:, None]

    def save(self, folder: Path) -> None:
        """Write the layer next to the draft model."""
        save_projection(self.layer.plain(), folder)


def target_states(
    model: Any, options: PardTrainOptions, target: FrozenTarget, documents: Seq[TrainingDocument]
) -> TargetStates | None:
    """The projection of a PARD-2 model, or a fresh one where the options ask for it; None for another model.

    A fresh one adds nothing yet, and the model's configuration has all that it is read with. Raises `ConfigError` for
    layers that the target does not have, and `ModelError` for a model of another target.
    """
    path = options.init or "the draft model"
    if is_pard2(model.config.to_dict()):
        if options.feature_layers is not None:
            raise ConfigError(
                f"{path!r} is a PARD-2 model and keeps the hidden states that it reads; omit --feature-layers"
            )
        config = ProjectionConfig.of(model.config, target, path)
        layer = read_projection(config, path)
    elif options.feature_layers is not None:
        _set_keys(model.config, parse_layers(options.feature_layers), target)
        config = ProjectionConfig.of(model.config, target, path)
        layer = nn.Linear(config.width, config.hidden_size, bias=config.bias)
        nn.init.zeros_(layer.weight)
    else:
        return None
    return TargetStates(config, layer, channel_scale(target, documents, config.feature_layers))


def _set_keys(config: Any, layers: Seq[int], target: FrozenTarget) -> None:
    """Put into a draft model's configuration what AMD's has for PARD-2."""
    most = target.num_layers
    if min(layers) < -most - 1 or max(layers) > most:
        raise ConfigError(
            f"--feature-layers takes hidden states from 0 to {most}, or from {-most - 1} to -1, of a target with "
            f"{most} layers; got {', '.join(map(str, layers))}"
        )
    config.pard2, config.pard2_target_layers = True, list(layers)
    config.pard2_target_dim = len(layers) * target.hidden_size
    config.pard2_scale, config.pard2_proj_bias = SCALE, False
