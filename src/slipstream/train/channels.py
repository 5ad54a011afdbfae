"""The scale of the target's features, by which a head's first layer divides them while it learns.

A few channels of a real model are hundreds of times as large as the others (massive activations: Sun et al., COLM
2024), and a layer that reads them as they are learns of little else. So each channel is divided by its root mean square
in training; the saved weight has the division within, and drafts the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import deepcopy
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.train.attention import block_diagonal_mask
from slipstream.train.batches import TrainingDocument
from slipstream.train.target import FrozenTarget

_MOST_TOKENS = 2048

Head = TypeVar("Head", bound=nn.Module)


class ScaledLinear(nn.Linear):
    """A layer whose weight is of inputs divided by `scale` [in]."""

    scale: Tensor

    def __init__(self, plain: nn.Linear, scale: Tensor) -> None:
        """Computes what `plain` does."""
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None)
        self.register_buffer("scale", scale)
        self.load_state_dict({**plain.state_dict(), "weight": plain.weight * scale, "scale": scale})

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input / self.scale)

    def plain(self) -> nn.Linear:
        """The layer as files and engines know it."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        state = self.state_dict()
        del state["scale"]
        layer.load_state_dict({**state, "weight": self.weight / self.scale})
        return layer


def scaled(layer: nn.Linear, scale: Tensor, *, is_fresh: bool) -> ScaledLinear:
    """A layer in place of `layer` that learns of inputs divided by `scale` [in].

    It computes the same, except where `layer` is fresh: then its random weights are of the divided input.
    """
    scale = scale.to(layer.weight.device)
    if is_fresh:
        layer.weight.data.div_(scale)
    return ScaledLinear(layer, scale)


def without_scales(head: Head) -> Head:
    """A copy of `head` whose layers have plain weights."""
    copy = deepcopy(head)
    for module in list(copy.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, ScaledLinear):
                setattr(module, name, layer.plain())
    return copy


def channel_scale(target: FrozenTarget, documents: Seq[TrainingDocument], layers: Seq[int]) -> Tensor:
    """[layers * hidden]: the root mean square of each channel of the target's features on the first documents.

    It is rounded to a power of two, so that dividing a weight by it and multiplying it again give the same weight.
    """
    squares, count = torch.zeros(len(layers) * target.hidden_size, device=target.device), 0
    for document in documents:
        token_ids = torch.from_numpy(np.asarray(document.tokens))[None].to(target.device)
        positions = torch.arange(token_ids.shape[1], device=target.device)[None]
        mask = block_diagonal_mask(torch.zeros_like(token_ids), target.dtype)
        states = target.hidden_states(token_ids, positions, mask, layers)
        squares += torch.cat([states[layer] for layer in layers], dim=-1).square().sum(dim=(0, 1))
        count += token_ids.shape[1]
        if count >= _MOST_TOKENS:
            break
    scale = (squares / count).sqrt()
    return scale.clamp(min=1e-3 * float(scale.median()) + 1e-12).log2().round().exp2()
