"""An output layer of 16 or 32 bits, held in 8 bits besides: where the best token alone is wanted, few of its own
weights are read (`kernels/best_token.h`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.models.cpu.exact_rows import multiplying_exactly
from slipstream.models.cpu.kernel import Kernel, grouped_kernel
from slipstream.models.cpu.packed_copy import current_copy
from slipstream.models.cpu.packed_weight import PackedWeight, fitted, packed_bytes
from slipstream.models.cpu.structs import TABLE_KINDS, RoundedHeadStruct
from slipstream.models.linear.grouped import GroupedLinear, GroupedWeight

LEAST_WEIGHTS = 2**22
"""A smaller output layer takes too little of a pass."""
_KERNEL = grouped_kernel(8, 32, False)
_MARGIN = 1 + 1e-5
"""For what the sums of squares lose, which make the norms."""


class RoundedHead:
    """`struct` is passed to the kernels."""

    def __init__(self, head: PackedWeight) -> None:
        """The `head` has neither biases nor an adapter's change, and its kind is one of `TABLE_KINDS`."""
        with multiplying_exactly(False):  # rounded rows are what the bounds are for
            self._weight = PackedWeight([_Rounded(head)], [None], _KERNEL)
        padded = self._weight.scales.numel()
        self.errors, self.norms = torch.empty(padded), torch.empty(padded)
        copy = current_copy()
        if copy is None or not copy.fill([self.errors, self.norms]):
            self._measure(head)
        self.struct = RoundedHeadStruct(self._weight.struct, self.errors.data_ptr(), self.norms.data_ptr())

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self._weight.nbytes + self.errors.nbytes + self.norms.nbytes

    @property
    def is_bounded(self) -> bool:
        """Whether the weights are numbers whose products do not overflow, without which nothing is known of these."""
        return bool((self.norms < 1e15).all())

    def _measure(self, head: PackedWeight) -> None:
        self.errors.fill_(math.inf)  # of padding, which a damaged copy may have filled
        self.norms.zero_()
        for outputs in _slices(0, head.out_features, head.in_features):
            exact, rounded = head.unpack(outputs).double(), self._weight.unpack(outputs).double()
            self.errors[outputs] = ((exact - rounded).norm(dim=1) * _MARGIN).float()
            self.norms[outputs] = (torch.maximum(exact.norm(dim=1), rounded.norm(dim=1)) * _MARGIN).float()


def rounded_head_bytes(kernel: Kernel, in_features: int, out_features: int) -> int:
    """What a `RoundedHead` of such an output layer takes, 0 where none is made."""
    if kernel.kind not in TABLE_KINDS.values() or in_features * out_features < LEAST_WEIGHTS:
        return 0
    panels, factors, norms = packed_bytes(_KERNEL, in_features, out_features)
    return panels + factors + 2 * norms


def _slices(begin: int, end: int, in_features: int) -> list[Tensor]:
    """Numbers of the outputs from `begin` to `end`, as many at a time as have a million weights."""
    length = max(2**20 // in_features, 1)
    return [torch.arange(first, min(first + length, end)) for first in range(begin, end, length)]


class _Rounded(GroupedLinear):
    """Weights in the nearest numbers of 8 bits, one scale a group."""

    def __init__(self, head: PackedWeight) -> None:
        super().__init__(head.in_features, head.out_features, 8, _KERNEL.group, False)
        self._head = head

    def part(self, begin: int, end: int) -> GroupedWeight:
        weights = self._head.unpack(torch.arange(begin, end))
        return fitted(weights, _KERNEL, self._head.num_threads)
