"""Weights of 4 or 8 bits in groups of neighbouring inputs, each group of an output with a scale and a zero.

They come from files that were saved so, or are fitted to a checkpoint's numbers when it is loaded. The kernels hold
scales and zeros as half floats, times a power of two for each output (`kernels/groups.h`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.models.linear.code_tables import CodeTable
from slipstream.models.linear.low_rank import LowRankChange

LARGEST_GROUP = 128
_PART_WEIGHTS = 2**22
"""So many weights of a layer are dequantised at a time."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [out, in], or some of its outputs: `scales * (codes - zeros)`, or with a table of numbers
    `scales * (table[codes] - zeros)`."""

    codes: Tensor
    """uint8 [out, in], below 2 to the power of `bits`."""
    scales: Tensor
    """float32 [out, groups], with as many groups as cover the inputs; the last one may be short."""
    zeros: Tensor | None
    """float32 [out, groups]; None where each is the middle, 2 to the power of `bits` - 1, or with a table nothing."""
    group: int
    """Inputs of a group."""
    bits: int = 4
    table: CodeTable | None = None
    """16 numbers from -128 to 127, in which 4-bit codes are places; None where codes are numbers themselves."""

    def __post_init__(self) -> None:
        """Raises `ModelError` for parts that do not belong together, and groups that the kernels do not have."""
        check_groups(self.bits, self.group)
        num_out, num_in = self.codes.shape
        wanted = (num_out, -(-num_in // self.group))
        for name, found in (("scales", self.scales), ("zeros", self.zeros)):
            if found is not None and tuple(found.shape) != wanted:
                raise ModelError(
                    f"{name} of shape {list(found.shape)} are not those of {num_out} outputs and {num_in} inputs in "
                    f"groups of {self.group}, which would be {list(wanted)}"
                )

    @classmethod
    def from_minimums(
        cls, codes: Tensor, scales: Tensor, minimums: Tensor, group: int, bits: int = 4
    ) -> GroupedWeight:
        """As `scales * codes + minimums`, all groups [out, groups].

        A group whose scale vanishes against its minimum has no code that matters: it is its minimum throughout.
        """
        flat = scales.abs() * 2.0**14 < minimums.abs()  # zeros must be half floats
        if not bool(flat.any()):
            return cls(codes, scales, -minimums / torch.where(scales == 0, 1, scales), group, bits)
        zeros = torch.where(flat, -minimums.sign(), -minimums / torch.where(flat | (scales == 0), 1, scales))
        each = flat.repeat_interleave(group, 1)[:, : codes.shape[1]]
        return cls(codes.masked_fill(each, 0), torch.where(flat, minimums.abs(), scales), zeros, group, bits)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, outputs: slice) -> GroupedWeight:
        zeros = None if self.zeros is None else self.zeros[outputs]
        return replace(self, codes=self.codes[outputs], scales=self.scales[outputs], zeros=zeros)

    def converted(
        self, bits: int, group: int, has_zeros: bool, table: CodeTable | None = None
    ) -> GroupedWeight:
        """The same numbers in codes of so many bits or more, smaller groups, and with zeros where they were implied.

        What another `table` than the wanted one has becomes codes of 8 bits.
        """
        codes, scales, zeros, middle = self.codes, self.scales, self.zeros, self._middle
        if self.table is not None and table != self.table:
            places = torch.tensor([number + 128 for number in self.table], dtype=torch.uint8)
            codes, middle, table = places.to(codes.device)[codes.int()], middle + 128, None
            zeros = None if zeros is None else zeros + 128
        elif zeros is None and bits != self.bits:
            codes, middle = codes + (2 ** (bits - 1) - int(middle)), 2.0 ** (bits - 1)
        if has_zeros and zeros is None:
            zeros = torch.full_like(scales, middle)
        if group != self.group:
            repeats, count = self.group // group, -(-self.codes.shape[1] // group)
            scales = scales.repeat_interleave(repeats, 1)[:, :count]
            zeros = None if zeros is None else zeros.repeat_interleave(repeats, 1)[:, :count]
        return GroupedWeight(codes, scales, zeros, group, bits, table)

    @property
    def _middle(self) -> float:
        """What is taken off where there are no zeros."""
        return 2.0 ** (self.bits - 1) if self.table is None else 0.0

    def dequantised(self) -> Tensor:
        """float32 [out, in]"""
        zeros = self._middle if self.zeros is None else _spread(self.zeros, self)
        numbers = self.codes.float() if self.table is None else torch.tensor(self.table)[self.codes.int()]
        return (numbers - zeros) * _spread(self.scales, self)


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """A weight [out, in] of 4-bit codes in groups of 32 inputs, eight to a block, as GGUF's Q4_K has them:
    `scales * group_scales * codes - minimums * group_minimums`."""

    codes: Tensor
    """uint8 [out, in], below 16."""
    group_scales: Tensor
    """uint8 [out, groups]; of the last block only the groups that there are."""
    group_minimums: Tensor
    """int8 [out, groups]"""
    scales: Tensor
    """float32 [out, blocks]: half floats, or half floats times a power of two for each output."""
    minimums: Tensor
    """float32 [out, blocks], as `scales`."""

    def __len__(self) -> int:
        return len(self.codes)

    def as_groups(self) -> GroupedWeight:
        """The same numbers with a float scale and zero for each group."""
        groups = self.group_scales.shape[1]
        scales, minimums = (part.repeat_interleave(8, 1)[:, :groups] for part in (self.scales, self.minimums))
        return GroupedWeight.from_minimums(
            self.codes, scales * self.group_scales, -minimums * self.group_minimums, 32
        )


HeldWeight = TypeVar("HeldWeight", GroupedWeight, BlockedWeight)


def combined(
    parts: Sequence[HeldWeight], combine: Callable[[list[Tensor]], Tensor] = torch.cat
) -> HeldWeight:
    """Several weights of one kind as one: `combine` puts the outputs of each kind of tensor together."""
    if len(parts) == 1 and combine is torch.cat:
        return parts[0]
    tensors = {field.name: [getattr(part, field.name) for part in parts] for field in fields(parts[0])}
    changed: dict[str, Any] = {
        name: combine(found) for name, found in tensors.items() if isinstance(found[0], Tensor)
    }
    return replace(parts[0], **changed)


def _spread(of_groups: Tensor, weight: GroupedWeight) -> Tensor:
    """[out, groups] -> [out, in]"""
    return of_groups.float().repeat_interleave(weight.group, 1)[:, : weight.codes.shape[1]]


def check_groups(bits: int, group: int) -> None:
    """Raise `ModelError` unless the kernels have codes of so many bits in groups of so many inputs."""
    if bits not in (4, 8) or group % 16 or not 0 < group <= LARGEST_GROUP:
        raise ModelError(
            f"groups of {group} inputs with {bits} bits are none that the kernels have: 16 to 128 in steps of 16, with "
            "4 or 8 bits"
        )


def plain_bits(layers: Sequence[GroupedLinear]) -> int:
    """Bits of codes without a table, in groups of 32 inputs or more where they are 4, that hold the numbers of these
    layers."""
    fits = (layer.bits == 4 and layer.table is None and layer.group % 32 == 0 for layer in layers)
    return 4 if all(fits) else 8


class GroupedLinear(nn.Module, ABC):
    """Takes the place of an `nn.Linear` in a Transformers model until it is packed: a layer that was saved in groups.

    A subclass reads a format of files. Its weight is never held whole in any other form than the file's.
    """

    has_blocks: bool = False
    """Whether the file has its groups in blocks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int,
        group: int,
        has_zeros: bool,
        table: CodeTable | None = None,
    ) -> None:
        """Raises `ModelError` for groups that the kernels do not have."""
        super().__init__()
        check_groups(bits, group)
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.group, self.has_zeros, self.table = bits, group, has_zeros, table
        self.bias: Tensor | None = None
        self.order: Tensor | None = None
        """int32 [in]: column j of the codes multiplies input `order[j]`; None where that is j."""
        self.change: LowRankChange | None = None
        """What an adapter adds, kept apart from the weight."""

    @abstractmethod
    def part(self, begin: int, end: int) -> GroupedWeight:
        """The outputs from `begin` to `end`, out of the file's bytes."""

    def blocks(self, begin: int, end: int) -> BlockedWeight | None:
        """The same outputs in blocks, where it `has_blocks`; else None."""
        return None

    def numbers(self, begin: int, end: int) -> Tensor:
        """float32 [end - begin, in]: the weights of these outputs, their columns in the inputs' order."""
        weights = self.part(begin, end).dequantised()
        if self.order is None:
            return weights
        return torch.empty_like(weights).index_copy_(1, self.order.long(), weights)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out] with the numbers themselves, in float32, a part of the outputs at a time."""
        wide = rows.float()
        products = [
            nn.functional.linear(wide, self.numbers(*each).to(rows.device)) for each in self._bounds()
        ]
        return self.completed(torch.cat(products, dim=-1), rows).to(rows.dtype)

    def widened(self) -> nn.Linear:
        """The same layer with float32 numbers, an adapter's change among them."""
        made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = torch.cat([self.numbers(*each) for each in self._bounds()])
        if self.change is not None:
            weight += self.change.up.float() @ self.change.down.float()
        made.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            made.bias = nn.Parameter(self.bias.detach(), requires_grad=False)
        return made

    def _bounds(self) -> list[tuple[int, int]]:
        """Outputs that are widened at a time."""
        length = max(_PART_WEIGHTS // self.in_features, 1)
        return list(pairwise([*range(0, self.out_features, length), self.out_features]))

    def completed(self, product: Tensor, rows: Tensor) -> Tensor:
        """The outputs [..., out] of `rows` [..., in]: the weight's product, and what is added to it."""
        if self.change is not None:
            product = product + self.change.of(rows)
        return product if self.bias is None else product + self.bias.float()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"{self.bits} bits in groups of {self.group}"
        )


class GroupedRows(GroupedLinear):
    """Some neighbouring outputs of another layer."""

    def __init__(self, whole: GroupedLinear, begin: int, end: int) -> None:
        super().__init__(
            whole.in_features, end - begin, whole.bits, whole.group, whole.has_zeros, whole.table
        )
        self._whole, self._begin, self.has_blocks = whole, begin, whole.has_blocks
        self.order = whole.order
        self.bias = None if whole.bias is None else whole.bias.detach()[begin:end]
        self.change = None if whole.change is None else whole.change.outputs(begin, end)

    def part(self, begin: int, end: int) -> GroupedWeight:
        return self._whole.part(self._begin + begin, self._begin + end)

    def blocks(self, begin: int, end: int) -> BlockedWeight | None:
        return self._whole.blocks(self._begin + begin, self._begin + end)
