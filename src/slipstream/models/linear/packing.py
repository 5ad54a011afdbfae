"""Replacing the linear layers of a module by packed ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.models.cpu.kernel import common_kernel
from slipstream.models.cpu.pages import release, trim_heap
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.linear.layers import NativeLinear, PackedLinear

_PLACE = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""The number of a layer, or of an expert, in a name."""
_TRIMMED_FROM = 1 << 20
"""Bytes of a weight: returning the memory that a smaller one leaves free takes longer than packing it."""


def shared_weights(layer: nn.Linear, head: nn.Module | None) -> tuple[int, int, bool]:
    """What layers of a model have in common that are packed once: their weights, and whether they are its head."""
    return id(layer.weight), id(layer.bias), layer is head


def pack_linears(
    module: nn.Module,
    fmt: WeightFormat,
    native: bool = True,
    give_back: bool = False,
    widens: bool = False,
    called: Collection[str] | None = None,
) -> int:
    """Replace the float32 linear layers of `module` that are on a device with this format, in place; returns how many.

    Only plain `nn.Linear`s are replaced: a subclass may compute something else. With `widens` 16-bit ones are too: they
    multiply float32 rows. The unpacked weights are freed, except where an embedding shares them. With `give_back` they
    are given back to the system at once, and they may not be read any more: else weights that are mapped from a file
    stay in memory as long as any of the file's does.
    `called` names the layers that a pass over `module` has called; None: all. Of the others only those stay plain that
    have no sibling among the called: a router may read the weight of a layer that it never calls, whereas an expert may
    only have had no row.
    Without `native` PyTorch's own operators are used; where they do not have the format, `ConfigError` is raised, or,
    if the format keeps the checkpoint's numbers, the layers stay as they are.
    """
    plain = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and (child.weight.dtype == torch.float32 or (widens and child.weight.is_floating_point()))
        and child.weight.device.type in fmt.devices
    ]
    if called is not None:
        of_calls = {_PLACE.sub("#", name) for name in called}
        idle = {id(part) for name, part in module.named_modules() if _PLACE.sub("#", name) not in of_calls}
        plain = [each for each in plain if id(each[2]) not in idle]
    num_grouped = _pack_grouped(module) if native else 0
    if not native or fmt.kernel is None:
        reason = fmt.torch_unavailable()
        if reason is not None and fmt.weight_error is None:
            return 0
        if reason is not None:
            cure = "cannot be used" if fmt.kernel is None else "needs a C++ compiler"
            raise ConfigError(f"{reason}; quantization {fmt.name!r} {cure}")
    users, head = _users(module), _output_layer(module)
    made: dict[tuple[int, int, bool], nn.Module] = {}  # layers that share their weights stay one
    for parent, name, child in plain:
        own = fmt.of_head() if child is head else fmt
        key = shared_weights(child, head)
        if key not in made:
            made[key] = own.pack(_readable(child, own, native), native)
        setattr(parent, name, made[key])
        if give_back and users[child.weight.data_ptr()] == 1:
            release(child.weight)
            if child.weight.nbytes >= _TRIMMED_FROM:
                trim_heap()
    return len(plain) + num_grouped


def _pack_grouped(module: nn.Module) -> int:
    """Pack the layers that were saved in groups, as they are, whatever the format of the others; returns how many."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, GroupedLinear)
    ]
    for parent, name, child in found:
        setattr(parent, name, NativeLinear(child, common_kernel([child])))
    return len(found)


def _readable(linear: nn.Linear, fmt: WeightFormat, native: bool) -> nn.Linear:
    """The layer in a type that the format packs: our own read any, others float32."""
    if linear.weight.dtype == torch.float32 or (native and fmt.kernel is not None):
        return linear
    wide = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    wide.weight = nn.Parameter(linear.weight.detach().float(), requires_grad=False)
    wide.bias = linear.bias
    return wide


def _output_layer(module: nn.Module) -> nn.Module | None:
    """The output layer of a whole model; None for what has none of its own."""
    find = getattr(module, "get_output_embeddings", None)
    found: nn.Module | None = None if find is None else find()
    return found


def _users(module: nn.Module) -> Counter[int]:
    """Address of each weight to how many places hold it: an embedding, or a layer that two modules share."""
    return Counter(
        weight.data_ptr()
        for parent in module.modules()
        for child in parent.children()
        for weight in child.parameters(recurse=False)
    )


def packed_bytes(module: nn.Module) -> int:
    """Bytes of the weights in the packed linear layers of `module`."""
    return sum(part.nbytes for part in module.modules() if isinstance(part, PackedLinear))
