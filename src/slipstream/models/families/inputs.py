"""Inputs of a model's layers besides the states, by the names that a family has for them: per-layer embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.families.parts import NormParts
from slipstream.models.linear.grouped import GroupedLinear


@dataclass(frozen=True, slots=True)
class InputNames:
    """Dotted names of the model's parts, then of a layer's."""

    table: str
    """An embedding whose row of a token has a part for every layer."""
    table_scale: str
    """What it multiplies its rows with."""
    projection: str
    """A linear layer of the token's embedding, whose outputs have a part for every layer."""
    projection_scale: str
    projection_norm: str
    """Norm of each part."""
    scale: str
    """What the sum of the two is multiplied with."""
    argument: str
    """How a layer calls what it is given; its second argument."""
    gate: str
    """A linear layer of the states."""
    last: str
    """A linear layer of the gated inputs."""
    norm: str
    """Norm of what they add to the states."""


@dataclass(frozen=True, slots=True)
class InputParts:
    """What makes the inputs of all layers."""

    table: Any
    """An embedding, or one whose table stays in a file."""
    table_scale: float
    projection: nn.Linear | GroupedLinear
    projection_scale: float
    norm: NormParts
    scale: float
    width: int
    """Of one layer's inputs."""

    @classmethod
    def of(cls, names: InputNames, part: Callable[[str], Any], offset: float, num_layers: int) -> InputParts:
        """`part` finds the model's parts by their names; raises `AttributeError` for one that it has not."""
        projection = part(names.projection)
        return cls(
            table=part(names.table),
            table_scale=float(part(names.table_scale)),
            projection=projection,
            projection_scale=float(part(names.projection_scale)),
            norm=NormParts.of(part(names.projection_norm), offset),
            scale=float(part(names.scale)),
            width=projection.out_features // num_layers,
        )

    @property
    def stored(self) -> Any:
        """The layer that holds the table, where it stays in a file; else None."""
        return getattr(self.table, "linear", None)

    def plain_projection(self) -> nn.Linear:
        """The projection in floating point; a new layer where a file holds it quantised."""
        return self.projection.widened() if isinstance(self.projection, GroupedLinear) else self.projection

    def misfits(self, hidden: int, num_layers: int) -> Iterator[str]:
        """Why the kernels cannot read them, for states of `hidden` numbers."""
        projection, norm = self.projection, self.norm
        if type(projection) is not nn.Linear and not isinstance(projection, GroupedLinear):
            yield "its linear layers are not plain ones"
            return
        width = self.table.weight.shape[1] if self.stored is None else self.stored.in_features
        if width != self.width * num_layers or projection.out_features != width:
            yield "the inputs of its layers have other widths than there are layers"
        if projection.in_features != hidden or norm.weight.numel() != self.width:
            yield "what projects the inputs of its layers has other widths than its states"
        if norm.is_centred or norm.bias is not None or projection.bias is not None:
            yield "the inputs of its layers have biases"


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """What one layer was given besides the states, for kernels that read it in the place of `InputParts`."""

    rows: Tensor
    """float32 [tokens, layers * width]: the same for each of some layers."""
    width: int

    @classmethod
    def of(cls, given: Tensor, num_layers: int) -> GivenInputs:
        """[..., width]"""
        rows = given.detach().reshape(-1, given.shape[-1]).float()
        return cls(torch.cat([rows] * num_layers, dim=1).contiguous(), rows.shape[1])

    @property
    def of_layer(self) -> Tensor:
        """float32 [tokens, width]"""
        return self.rows[:, : self.width]
