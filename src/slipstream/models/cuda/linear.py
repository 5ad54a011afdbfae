"""Weights of linear layers as a GPU's kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.grouped import GroupedLinear

TILE = 16
"""Rows that are multiplied at a time on a CPU: a row's bits depend on how many there are."""


class DeviceWeight:
    """Linear layers as one, their outputs behind each other."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight, self._bias, self._dtype = weight, bias, dtype
        self.out_features, self.in_features = weight.shape

    @classmethod
    def holds(cls, fmt: WeightFormat | None, layers: Sequence[nn.Module]) -> str | None:
        """Why layers cannot be held as one, in one line; None where they can."""
        return None if all(type(layer) is nn.Linear for layer in layers) else "they are quantised"

    @classmethod
    def of(
        cls, layers: Sequence[nn.Linear | GroupedLinear], dtype: torch.dtype, fmt: WeightFormat | None = None,
        device: torch.device | None = None,
    ) -> DeviceWeight:  # fmt: skip
        """The layers for rows of `dtype`; one that is not quantised is read in place."""
        plain = [layer for layer in layers if isinstance(layer, nn.Linear)]
        weights = [layer.weight.detach() for layer in plain]
        biases = [
            torch.zeros(layer.out_features).to(layer.weight) if layer.bias is None else layer.bias.detach()
            for layer in plain
        ]
        has_bias = any(layer.bias is not None for layer in plain)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return cls(weight, torch.cat(biases) if has_bias else None, dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        """[n, in] -> [n, out]"""
        if rows.is_cuda:
            return self._multiply(rows)
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % TILE))
        return torch.cat([self._multiply(tile) for tile in torch.split(padded, TILE)])[: len(rows)]

    def _multiply(self, rows: Tensor) -> Tensor:
        bias = None if self._bias is None else self._bias.to(rows.dtype)
        return functional.linear(rows, self._weight.to(rows.dtype), bias)

    def unpack(self, outputs: Tensor) -> Tensor:
        """[len(outputs), in]: the weights of some outputs."""
        return self._weight[outputs].to(self._dtype)

    @property
    def num_weights(self) -> int:
        """Weights, biases not counted."""
        return self._weight.numel()

    @property
    def nbytes(self) -> int:
        """Bytes that are held, with biases."""
        return int(self._weight.nbytes) + (0 if self._bias is None else int(self._bias.nbytes))
