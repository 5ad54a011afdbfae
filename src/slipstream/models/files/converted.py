"""Matrices of a file whose numbers are converted to 16 or 32 bits while they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from slipstream.models.linear.grouped import GroupedLinear


class ConvertedMatrix(ABC):
    """A matrix that our kernels do not hold as the file does."""

    kind: str
    """As messages say it: 'FP8'."""
    can_be_kept = False
    """Whether `layer` can be had."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    @abstractmethod
    def widened(self, dtype: torch.dtype) -> Tensor:
        """[out, in] of this type, each number rounded once; the file's pages are given back as they are read."""

    def layer(self, bias: Tensor | None = None) -> GroupedLinear:
        """The layer with the file's own numbers, for a GPU that keeps them, if it `can_be_kept`."""
        raise NotImplementedError
