"""What a device holds of linear layers whose outputs are computed as one: numbers, or codes and what scales them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ModelError
from slipstream.models.linear.fp8 import Fp8Linear
from slipstream.models.linear.grouped import GroupedLinear, GroupedWeight, plain_bits
from slipstream.models.linear.rounded import RoundedFormat

TILE_OUTPUTS = 64
"""Outputs of a tile, as the kernel cuts them."""
_PART_WEIGHTS = 2**24
"""So many weights are rounded or unpacked at a time."""
_TINY = torch.finfo(torch.float32).tiny


class HeldAs(IntEnum):
    """How a weight is held; the numbers are the kernel's."""

    NUMBERS = 0
    """Floating-point numbers."""
    FP8 = 1
    """e4m3, as bytes, with a scale for each output or for each group of inputs of each output."""
    CODES8 = 2
    """uint8 with a scale for each group of inputs of each output, and perhaps a zero."""
    CODES4 = 3
    """The same, two a byte: a group's first half in the low halves of its bytes."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in] on its device."""

    kind: HeldAs
    codes: Tensor
    """[out, in]; of groups [tiles, groups, TILE_OUTPUTS, bytes of a group], tiles and groups filled up with zeros."""
    shape: tuple[int, int]
    """Outputs and inputs."""
    scales: Tensor | None = None
    """float32 [out]: what each output's sum is multiplied by."""
    group: int = 0
    """Inputs of a group, a power of two; 0 without groups."""
    group_scales: Tensor | None = None
    """float16 or float32 [groups, out]"""
    zeros: Tensor | None = None
    """float16 or float32 [groups, out]; None where each is the middle of the codes."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that is held."""
        found = (self.codes, self.scales, self.group_scales, self.zeros)
        return [tensor for tensor in found if tensor is not None]

    def numbers(self, outputs: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, in]: the weights of these outputs, their columns as they are held. Reads nothing on
        the host."""
        if not self.group:
            found = self.codes[outputs]
            numbers = widened_fp8(found) if self.kind == HeldAs.FP8 else found.float()
        else:
            numbers = self._grouped_numbers(outputs)
        return numbers if self.scales is None else numbers * self.scales[outputs, None]

    def _grouped_numbers(self, outputs: Tensor) -> Tensor:
        assert self.group_scales is not None
        held = self.codes[outputs // TILE_OUTPUTS, :, outputs % TILE_OUTPUTS]  # [n, groups, bytes]
        if self.kind == HeldAs.FP8:
            numbers = widened_fp8(held)
        else:
            if self.kind == HeldAs.CODES4:
                held = torch.cat([held & 15, held >> 4], dim=-1)
            middle = 8.0 if self.kind == HeldAs.CODES4 else 128.0
            zeros = middle if self.zeros is None else self.zeros.T[outputs].float()[..., None]
            numbers = held.float() - zeros
        numbers = numbers * self.group_scales.T[outputs].float()[..., None]
        return numbers.flatten(1)[:, : self.shape[1]]


def widened_fp8(codes: Tensor) -> Tensor:
    """uint8, the bytes of e4m3 numbers -> float32."""
    return codes.view(torch.float8_e4m3fn).float()


def plain(layers: Sequence[nn.Linear], dtype: torch.dtype) -> Codes:
    """Their numbers as `dtype`; those of a single layer of this type stay where they are."""
    weights = [layer.weight.detach() for layer in layers]
    shape = (sum(map(len, weights)), weights[0].shape[1])
    if len(weights) == 1 and weights[0].dtype == dtype and weights[0].is_contiguous():
        return Codes(HeldAs.NUMBERS, weights[0], shape)
    codes = torch.empty(shape, dtype=dtype, device=weights[0].device)
    torch.cat(weights, out=codes)
    return Codes(HeldAs.NUMBERS, codes, shape)


def rounded_in_groups(layers: Sequence[nn.Linear], fmt: RoundedFormat, dtype: torch.dtype) -> Codes:
    """As the format rounds them: scales and zeros are half floats, and each output has a factor, a power of two."""
    weights = [layer.weight.detach() for layer in layers]
    shape = (sum(map(len, weights)), weights[0].shape[1])
    held = largest_group(fmt.group, dtype)
    made = _Groups(shape, fmt.bits, held, fmt.has_zeros, weights[0].device)
    factors = torch.empty(shape[0], device=made.device)
    for first, part in _parts(weights):
        found = fmt.rounded(part)
        own = torch.exp2(found.scales.abs().amax(1, keepdim=True).clamp_min(_TINY).log2().floor() - 14)
        halves = replace(found, scales=(found.scales / own).half())
        made.put(first, halves.converted(fmt.bits, held, fmt.has_zeros))
        factors[first : first + len(part)] = own[:, 0]
    if made.zeros is not None:
        made.zeros = made.zeros.half()
    return replace(made.finished(), scales=factors)


def kept_in_groups(layers: Sequence[GroupedLinear], dtype: torch.dtype, device: torch.device) -> Codes:
    """The numbers of layers that a file holds in groups: what one of them needs, all of them get.

    Codes that are places in a table become its numbers, of 8 bits.
    """
    has_zeros = any(layer.has_zeros for layer in layers)
    group = largest_group(math.gcd(*(layer.group for layer in layers)), dtype)
    shape = (sum(layer.out_features for layer in layers), layers[0].in_features)
    made = _Groups(shape, plain_bits(layers), group, has_zeros, device)
    length = max(_PART_WEIGHTS // shape[1], 1)
    first = 0
    for layer in layers:
        for begin in range(0, layer.out_features, length):
            part = layer.part(begin, min(begin + length, layer.out_features))
            made.put(first + begin, part.converted(made.bits, group, has_zeros))
        first += layer.out_features
    return made.finished()


def kept_in_fp8(layers: Sequence[Fp8Linear], dtype: torch.dtype) -> Codes:
    """The codes of a file, with a scale for each output, or for each group of its inputs."""
    shape = (sum(layer.out_features for layer in layers), layers[0].in_features)
    device = layers[0].codes.device
    if any(bool((layer.codes & 127 == 127).any()) for layer in layers):
        raise ModelError("FP8 weights among which are some that are no numbers")
    if all(layer.has_one_scale for layer in layers):
        scales = torch.cat([layer.of_outputs()[:, 0] for layer in layers])
        codes = layers[0].codes if len(layers) == 1 else torch.cat([layer.codes for layer in layers])
        return Codes(HeldAs.FP8, codes, shape, scales)
    group = largest_group(math.gcd(*(layer.group for layer in layers)), dtype)
    made = _Groups(shape, 8, group, False, device)
    first = 0
    for layer in layers:
        each = made.num_groups if layer.has_one_scale else layer.block[1] // group
        scales = layer.of_outputs().repeat_interleave(each, 1)[:, : made.num_groups]
        made.put(first, GroupedWeight(layer.codes, scales, None, group, 8))
        first += layer.out_features
    return replace(made.finished(), kind=HeldAs.FP8)


def largest_group(group: int, dtype: torch.dtype) -> int:
    """The largest groups that the kernel has, for rows of `dtype`, of which groups of this size are made: products of
    float32 rows take more registers."""
    return math.gcd(group, 32 if dtype == torch.float32 else 128)


def _parts(weights: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """(its first output among all, some outputs) of weights one behind the other."""
    parts, first = [], 0
    for weight in weights:
        length = max(_PART_WEIGHTS // weight.shape[1], 1)
        parts += [(first + begin, weight[begin : begin + length]) for begin in range(0, len(weight), length)]
        first += len(weight)
    return parts


class _Groups:
    """Groups that are being packed, some outputs at a time."""

    def __init__(
        self, shape: tuple[int, int], bits: int, group: int, has_zeros: bool, device: torch.device
    ) -> None:
        self.shape, self.bits, self.group, self.device = shape, bits, group, device
        self.num_groups = -(-shape[1] // group)
        tiles = -(-shape[0] // TILE_OUTPUTS)
        sizes = (tiles, self.num_groups, TILE_OUTPUTS, group * bits // 8)
        self.codes = torch.zeros(sizes, dtype=torch.uint8, device=device)
        self.scales = torch.empty(self.num_groups, shape[0], device=device)
        self.zeros = torch.empty_like(self.scales) if has_zeros else None

    def put(self, first: int, part: GroupedWeight) -> None:
        """The outputs from `first` on."""
        codes = part.codes.to(self.device)
        codes = F.pad(codes, (0, self.num_groups * self.group - codes.shape[1])).view(
            len(codes), -1, self.group
        )
        if self.bits == 4:
            codes = codes[..., : self.group // 2] | codes[..., self.group // 2 :] << 4
        outputs = torch.arange(first, first + len(codes), device=self.device)
        self.codes[outputs // TILE_OUTPUTS, :, outputs % TILE_OUTPUTS] = codes
        self.scales[:, first : first + len(codes)] = part.scales.T
        if self.zeros is not None:
            assert part.zeros is not None
            self.zeros[:, first : first + len(codes)] = part.zeros.T

    def finished(self) -> Codes:
        """What is held, scales and zeros as half floats where those are the same numbers."""
        kind = HeldAs.CODES4 if self.bits == 4 else HeldAs.CODES8
        zeros = None if self.zeros is None else _narrowed(self.zeros)
        return Codes(kind, self.codes, self.shape, None, self.group, _narrowed(self.scales), zeros)


def _narrowed(numbers: Tensor) -> Tensor:
    half = numbers.half()
    return half if torch.equal(half.to(numbers.dtype), numbers) else numbers
