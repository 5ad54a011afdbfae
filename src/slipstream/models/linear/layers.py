"""Linear layers whose weights are held in a format of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.packed_weight import PackedWeight
from slipstream.models.linear.grouped import GroupedLinear


class PackedLinear(nn.Module, ABC):
    """Takes the place of an `nn.Linear`. Its weight is no parameter: it can be neither moved nor saved."""

    def __init__(self, linear: nn.Linear | GroupedLinear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weight as it is held, scales included; not of a bias that is a parameter."""

    @property
    def weight(self) -> Tensor:
        """Shape and type of the weight, for models that ask their layers in what type to hand over rows. It has no
        numbers: a model that multiplies with it fails."""
        return torch.empty(self.out_features, self.in_features, dtype=torch.float32, device="meta")

    @abstractmethod
    def forward(self, rows: Tensor) -> Tensor:
        """float32 [..., in_features] -> [..., out_features]"""

    @abstractmethod
    def unpack(self, outputs: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, in_features]: the weights of these outputs, as `forward` uses them."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class NativeLinear(PackedLinear):
    """A linear layer in the native CPU kernels. A row's bits do not depend on the other rows."""

    def __init__(self, linear: nn.Linear | GroupedLinear, kernel: Kernel) -> None:
        super().__init__(linear)
        weight = linear if isinstance(linear, GroupedLinear) else linear.weight
        self._weight = PackedWeight([weight], [linear.bias], kernel)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, its padding and bias included."""
        return self._weight.nbytes

    def forward(self, rows: Tensor) -> Tensor:
        output = self._weight.multiply(rows.reshape(-1, self.in_features))
        return output.view(*rows.shape[:-1], self.out_features)

    def unpack(self, outputs: Tensor) -> Tensor:
        return self._weight.unpack(outputs)
