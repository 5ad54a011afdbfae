"""What PARD-2 adds to a draft model's embeddings: the target's hidden states, projected.

After "PARD-2" (An et al., 2026, arXiv 2605.08632). The row of a token gets the states of the token before it, the first
token's row none, and masks repeat those of the last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.draft.heads.checkpoints import TargetSizes, read_checkpoint
from slipstream.errors import ModelError
from slipstream.models.causal_lm import CausalLM

FILE = "warp_model.bin"


@dataclass(frozen=True)
class ProjectionConfig:
    """What a draft model's configuration says of its projection."""

    feature_layers: tuple[int, ...]
    """The target's hidden states that it reads, in order; see `EagleConfig`."""
    width: int
    """Their width, all together."""
    hidden_size: int
    """The draft model's."""
    scale: float
    bias: bool

    @classmethod
    def of(cls, config: Any, target: TargetSizes, path: str) -> ProjectionConfig:
        """Raises `ModelError` where it was made for another target."""
        listed = getattr(config, "pard2_target_layers", None)
        if not listed:
            raise ModelError(
                f"{path!r} is a PARD-2 model, and its configuration has no pard2_target_layers, the target's hidden "
                "states that it reads; add those that it was trained with, such as [-1, -8, -16, -24]"
            )
        layers = tuple(number + target.num_layers + 1 if number < 0 else number for number in listed)
        if min(layers) < 0 or max(layers) > target.num_layers:
            raise ModelError(
                f"{path!r} reads hidden states {list(listed)}, but the target has {target.num_layers} layers"
            )
        width = len(layers) * target.hidden_size
        wanted = getattr(config, "pard2_target_dim", width)
        if wanted != width:
            raise ModelError(
                f"{path!r} reads {wanted} numbers of the target, and {len(layers)} hidden states of this one have "
                f"{width}; use a draft model that was trained for it"
            )
        scale, bias = getattr(config, "pard2_scale", 0.02), getattr(config, "pard2_proj_bias", False)
        return cls(layers, width, config.hidden_size, float(scale), bool(bias))

    def num_bytes(self, item_bytes: int) -> int:
        """Bytes of its weights in numbers of `item_bytes`."""
        return item_bytes * self.hidden_size * (self.width + self.bias)


def read_projection(config: ProjectionConfig, path: str, revision: str | None = None) -> nn.Linear:
    """The layer of the draft model at `path`; raises `ModelError` for a missing or wrong file."""
    _, tensors = read_checkpoint(path, revision=revision, weight_files=(FILE,))
    layer = nn.Linear(config.width, config.hidden_size, bias=config.bias)
    for name, parameter in layer.named_parameters():
        stored = tensors.get(f"target_proj.{name}")
        if stored is None or stored.shape != parameter.shape:
            found = "is missing" if stored is None else f"is {list(stored.shape)}"
            raise ModelError(
                f"{path!r}: the tensor target_proj.{name} of {FILE} {found}; it must be {list(parameter.shape)}"
            )
        parameter.data.copy_(stored)
    return layer


def save_projection(layer: nn.Linear, folder: Path) -> None:
    """Write the file of which `read_projection` makes the `layer`."""
    tensors = {f"target_proj.{name}": tensor.cpu() for name, tensor in layer.state_dict().items()}
    torch.save(tensors, folder / FILE)


class TargetProjection:
    """The projection of a loaded draft model."""

    def __init__(self, config: ProjectionConfig, like: CausalLM, path: str, revision: str | None) -> None:
        """In the type of the draft model `like`, and where it is; raises `ModelError` for a missing or wrong file."""
        self.config = config
        self._layer = (
            read_projection(config, path, revision).requires_grad_(False).to(like.device, like.dtype)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return sum(int(parameter.nbytes) for parameter in self._layer.parameters())

    def __call__(self, features: Tensor) -> Tensor:
        """[rows, width] of the target -> [rows, hidden], to be added to the draft's embeddings."""
        weight = self._layer.weight
        projected: Tensor = self._layer(features.to(weight.device, weight.dtype))
        return projected * self.config.scale
