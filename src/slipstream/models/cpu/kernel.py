"""How the CPU kernels hold and multiply the weights of one format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.errors import ModelError
from slipstream.models.linear.code_tables import CENTRED, RISING, CodeTable
from slipstream.models.linear.grouped import GroupedLinear


@dataclass(frozen=True, slots=True)
class Kernel:
    """How linear.h holds and multiplies the weights of one format."""

    kind: int
    """Its number in `WeightKind`."""
    pack: str
    """The function that packs a weight: (weight, in, out, panels, threads), and where there are scales (weight, in,
    out, panels, scales, threads)."""
    bytes_per_weight: float
    """Scales of groups included."""
    bytes_per_output: float = 0.0
    """Bytes of the factor of an output's scales; 0 where the format has none."""
    dtype: torch.dtype = torch.float32
    """Type of the weights that `pack` reads; others are converted."""
    group: int = 0
    """Inputs that share a scale, of the kinds that have groups."""
    has_zeros: bool = False
    """Whether groups have zeros of their own."""
    bits: int = 0
    """Bits of a code, for the kinds that have groups."""
    table: CodeTable | None = None
    """The numbers that 4-bit codes stand for, of the kinds that have a table."""

    @property
    def has_scales(self) -> bool:
        return self.bytes_per_output > 0


def grouped_kernel(bits: int, group: int, has_zeros: bool, table: CodeTable | None = None) -> Kernel:
    """How codes of 4 or 8 bits in groups of so many inputs are held, each with a scale and perhaps a zero.

    Codes of 4 bits in groups of 16, which only the kernel with a table has, are places in one of the codes themselves.
    """
    if bits == 4 and group % 32 and table is None:
        table = RISING if has_zeros else CENTRED
    return Kernel(
        kind=(8 if table is not None else 4 if bits == 4 else 6) + has_zeros,
        pack="slipstream_pack_groups",
        bytes_per_weight=bits / 8 + (4 if has_zeros else 2) / group,
        bytes_per_output=4,
        group=group,
        has_zeros=has_zeros,
        bits=bits,
        table=table,
    )


def blocked_kernel() -> Kernel:
    """How codes of 4 bits in groups of 32 inputs are held whose scales and minimums are integers, eight to a block."""
    return Kernel(
        kind=3,
        pack="slipstream_fit_blocks",
        bytes_per_weight=(4 + 8 + 8 + 128) / 256,
        bytes_per_output=4,
    )


def common_kernel(layers: Sequence[GroupedLinear]) -> Kernel:
    """The kernel that holds all numbers of these layers, which may differ in bits, groups and tables.

    Raises `ModelError` where they cannot be stacked: they read their inputs in different orders.
    """
    first = layers[0].order
    for order in (layer.order for layer in layers):
        if order is not first and (order is None or first is None or not torch.equal(order, first)):
            raise ModelError(
                "layers that are computed as one were saved with their inputs in different orders"
            )
    if all(layer.has_blocks for layer in layers):
        return blocked_kernel()
    tables = {layer.table for layer in layers}
    bits = max(layer.bits for layer in layers) if len(tables) == 1 else 8
    zeros = any(layer.has_zeros for layer in layers)
    group = math.gcd(*(layer.group for layer in layers))
    return grouped_kernel(bits, group, zeros, tables.pop() if bits == 4 else None)
