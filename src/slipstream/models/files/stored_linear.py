"""Linear layers whose weights are quantised matrices of a file."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.grouped import GroupedMatrix
from slipstream.models.files.lora import WIDENS
from slipstream.models.linear.grouped import LARGEST_GROUP, BlockedWeight, GroupedLinear, GroupedWeight


class StoredLinear(GroupedLinear):
    """A linear layer whose weight is a quantised matrix of a file."""

    def __init__(self, matrix: GroupedMatrix, bias: Tensor | None) -> None:
        """Raises `ModelError` for groups that the kernels cannot hold."""
        bits, group = kernel_groups(matrix)
        has_zeros = not matrix.is_symmetric and matrix.table is None
        super().__init__(matrix.in_features, matrix.out_features, bits, group, has_zeros, matrix.table)
        self._matrix, self.has_blocks = matrix, matrix.has_blocks
        self.bias = bias
        self.order = None if matrix.order is None else matrix.order.to(torch.int32)

    def part(self, begin: int, end: int) -> GroupedWeight:
        """See `GroupedLinear.part`."""
        found = self._matrix.part(begin, end)
        count = -(-self.in_features // self.group)
        repeats = -(-found.group_size // self.group)
        scales = found.scales.repeat_interleave(repeats, 1)[:, :count]
        if self.has_zeros:
            assert found.minimums is not None
            minimums = found.minimums.repeat_interleave(repeats, 1)[:, :count]
            return GroupedWeight.from_minimums(found.codes, scales, minimums, self.group, self.bits)
        if self.table is not None:
            return GroupedWeight(found.codes, scales, None, self.group, self.bits, self.table)
        codes = found.codes + (2 ** (self.bits - 1) - 2 ** (found.bits - 1))
        return GroupedWeight(codes, scales, None, self.group, self.bits)

    def blocks(self, begin: int, end: int) -> BlockedWeight | None:
        """See `GroupedLinear.blocks`."""
        return self._matrix.blocks(begin, end)

    def numbers(self, begin: int, end: int) -> Tensor:
        """See `GroupedLinear.numbers`: the file's own, where `part` has scales and zeros as the kernels hold them."""
        return self._matrix.widened(begin, end)

    def rows(self, indices: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, in]: the file's numbers of these outputs."""
        return self._matrix.rows(indices)


def kernel_groups(matrix: GroupedMatrix) -> tuple[int, int]:
    """(bits, inputs of a group) in which the kernels hold a matrix."""
    bits = 4 if matrix.bits <= 4 else 8
    whole = matrix.group_size == matrix.in_features
    group = LARGEST_GROUP if whole else math.gcd(matrix.group_size, LARGEST_GROUP)
    if group < 16:
        raise ModelError(
            f"{matrix.name}: groups of {matrix.group_size} inputs cannot be kept as they are; {WIDENS}"
        )
    return bits, group
