"""Which models the CPU kernels' decoder (`kernels/decoder.h`) computes whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from slipstream.errors import ModelError
from slipstream.models.attention.base import Variant
from slipstream.models.cpu.kernel import Kernel, common_kernel
from slipstream.models.families.family import Family
from slipstream.models.families.registry import FAMILIES, find_family
from slipstream.models.linear.grouped import GroupedLinear


def misfit(model: Any, variants: Sequence[Variant], kernel: Kernel | None) -> str | None:
    """Why the kernels' decoder does not compute a model in float32 on a CPU; None where it does.

    `variants` says how each layer attends, `kernel` how the kernels hold the weight format, if they can.
    """
    family = find_family(model)
    if family is None:
        return f"the fused decoder knows {', '.join(FAMILIES.names())}"
    if kernel is None:
        return "its weight format has no kernel"
    return next(_misfits(model, family, variants), None)


def _misfits(model: Any, family: Family, variants: Sequence[Variant]) -> Iterator[str]:
    """Why the kernels' decoder does not compute the layers of this model, in float32 on a CPU."""
    yield from family.misfits(model, variants)
    for layer in family.part(model, family.layers):
        parts = family.layer_parts(layer)
        if not all(_can_be_stacked(stack) for stack in (parts.qkv, parts.gate_up)):
            yield "layers that the fused decoder computes as one were not quantised alike"


def _can_be_stacked(linears: Sequence[nn.Linear | GroupedLinear]) -> bool:
    """Whether one kernel can hold these layers as one; plain ones always are."""
    grouped = [linear for linear in linears if isinstance(linear, GroupedLinear)]
    if not grouped:
        return True
    try:
        common_kernel(grouped)
    except ModelError:  # their inputs are in different orders
        return False
    return len(grouped) == len(linears)
