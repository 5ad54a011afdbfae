"""Experts whose weights a file holds quantised, one by one, where a Transformers model has stacks of all of a layer.

No kernel holds them as they are. They are widened one at a time, by the passes that check a model and where each is
packed in the format that they are rounded to, so that the whole widened model is never held.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.cpu.pages import forget
from slipstream.models.families.experts import ExpertParts, FileStack
from slipstream.models.files.grouped import GroupedMatrix, bounds
from slipstream.models.matrices import known_experts

_NAME = re.compile(r"(?P<layer>.+)\.(?P<block>\w+)\.experts\.(?P<expert>\d{1,6})\.(?P<part>\w+)")
_BLOCKS = {"block_sparse_moe": "mlp"}
"""What Transformers has renamed since checkpoints were saved."""
_PARTS = {
    **{"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)},
    **{"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)},
}
"""A layer of an expert to the parameter that holds it, and its place there: gate, then up."""

WIDENS_EXPERTS = "--dtype bfloat16 or float16 widens the whole model"

_Held = GroupedMatrix | Tensor


class StoredStack(FileStack):
    """The weights of a layer's experts as a file holds them."""

    def __init__(self, experts: Sequence[Sequence[_Held]]) -> None:
        """Take each expert's matrices [out, in], whose outputs lie one behind the other."""
        self._experts = experts
        shapes = [_shape(matrix) for matrix in experts[0]]
        self.shape = (len(experts), sum(out for out, _ in shapes), shapes[0][1])

    def read(self, expert: int) -> Tensor:
        """See `FileStack.read`."""
        found, first = torch.empty(self.shape[1:]), 0
        for matrix in self._experts[expert]:
            _read_into(found[first : first + _shape(matrix)[0]], matrix)
            first += _shape(matrix)[0]
        return found


@dataclass(frozen=True, slots=True)
class TakenExperts:
    """The experts among a file's weights."""

    stacks: Mapping[str, StoredStack]
    """By the name of the parameter in whose place they are."""
    names: frozenset[str]
    """Names of the layers that they replace, and of the routers, as the file has them."""
    routers: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights of those routers that the file holds quantised, widened, by their names in the file."""


def take_experts(
    matrices: Mapping[str, GroupedMatrix],
    tensors: Mapping[str, Tensor],
    model: Any,
    kind: str,
    rounded_to: str | None,
) -> TakenExperts:
    """Find the experts among the weights of a file; `model` may be without numbers.

    `rounded_to` is the format that they may be rounded to. Raises `ModelError`, with the options that load them, where
    there are some and it is None, and where the kernels do not know the experts of such a model.
    """
    modules = dict(model.named_modules())
    found = [name for name in matrices if name not in modules and _NAME.fullmatch(name)]
    if not found:
        return TakenExperts({}, frozenset())
    family = model.config.model_type
    if rounded_to is None:
        raise ModelError(
            f"the experts of this {family} model are {kind} weights ({found[0]} and {len(found) - 1} more layers), "
            "which cannot be kept packed; --quantization int8 or int4 rounds them to 8 or 4 bits for our own kernels "
            f"on a CPU, {WIDENS_EXPERTS}"
        )
    place = {id(module): name for name, module in modules.items()}
    known = {place[id(module)]: parts for module, parts in known_experts(model)}
    plain = {
        name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if name.endswith(".weight")
    }
    held: dict[str, dict[tuple[str, int, int], tuple[str, _Held]]] = defaultdict(dict)
    every: dict[str, _Held] = {**plain, **{name: matrices[name] for name in found}}
    for name, weight in every.items():
        seen = _place(name)
        if seen is not None:
            held[seen[0]][seen[1:]] = (name, weight)
    stacks: dict[str, StoredStack] = {}
    names: set[str] = set()
    for holder in dict.fromkeys(_holder(name) for name in found):
        parts = known.get(holder)
        if parts is None or parts.is_transposed or parts.alternates:
            raise ModelError(
                f"the fused decoder does not know the experts of this {family} model ({holder}), whose {kind} weights "
                f"cannot be rounded while they are read; {WIDENS_EXPERTS}"
            )
        for parameter, stack in _stacks(holder, parts, held[holder]):
            stacks[f"{holder}.{parameter}"] = stack
        names |= {name for name, _ in held[holder].values()}
    weights = {id(parts.router) for parts in known.values()}
    routers = {
        f"{name}.weight": matrix.widened(0, matrix.out_features)
        for name, matrix in matrices.items()
        if id(getattr(modules.get(_renamed(name)), "weight", None)) in weights
    }
    return TakenExperts(
        stacks, frozenset(names | {name.removesuffix(".weight") for name in routers}), routers
    )


def _stacks(
    holder: str, parts: ExpertParts, held: Mapping[tuple[str, int, int], tuple[str, _Held]]
) -> Iterator[tuple[str, StoredStack]]:
    """The two stacks of a layer; raises `ModelError` where one lacks a matrix or has one of another shape."""
    hidden, inner = int(parts.router.shape[1]), parts.intermediate
    for parameter, count, shape in (("gate_up_proj", 2, (inner, hidden)), ("down_proj", 1, (hidden, inner))):
        experts: list[list[_Held]] = []
        for expert in range(parts.num_experts):
            experts.append([])
            for place in range(count):
                name, weight = held.get((parameter, expert, place), ("", None))
                if weight is None:
                    raise ModelError(f"{holder} lacks a part of {parameter} of expert {expert}")
                have = _shape(weight)
                if have != shape:
                    raise ModelError(
                        f"{name} is {have[0]} x {have[1]}, and the configuration says {shape[0]} x {shape[1]}"
                    )
                experts[-1].append(weight)
        yield parameter, StoredStack(experts)
    more = sorted(name for (_, expert, _), (name, _) in held.items() if expert >= parts.num_experts)
    if more:
        raise ModelError(f"{more[0]} is one expert more than the configuration's {parts.num_experts}")


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """For Transformers: with the experts that are in no block of a layer as the stacks that its models have.

    All other experts it joins by itself. Raises `ModelError` where one lacks a part.
    """
    held: dict[tuple[str, str], dict[tuple[int, int], Tensor]] = defaultdict(dict)
    for name in list(tensors):
        seen = _NAME.fullmatch(name.removesuffix(".weight"))
        place = None if seen is None or not seen["block"].isdecimal() else _place(seen[0])
        if place is not None:
            held[place[0], place[1]][place[2:]] = tensors.pop(name)
    for (holder, parameter), parts in held.items():
        places = 1 + max(place for _, place in parts)
        wanted = [(expert, place) for expert in range(len(parts) // places) for place in range(places)]
        if sorted(parts) != wanted:
            raise ModelError(f"{holder} lacks a part of {parameter} of an expert")
        each = [parts.pop(key) for key in wanted]
        stack = torch.stack(
            [torch.cat(each[first : first + places]) for first in range(0, len(each), places)]
        )
        tensors[f"{holder}.{parameter}"] = stack
    return tensors


def _holder(name: str) -> str:
    """The module that has the experts, of which this names a layer."""
    seen = _NAME.fullmatch(name)
    assert seen is not None
    return _renamed(f"{seen['layer']}.{seen['block']}.experts")


def _renamed(name: str) -> str:
    """What Transformers calls a module of a checkpoint."""
    return ".".join(_BLOCKS.get(part, part) for part in name.split("."))


def _place(name: str) -> tuple[str, str, int, int] | None:
    """The module, parameter, expert and place that a layer's weight belongs to; None for one of no expert."""
    seen = _NAME.fullmatch(name)
    part = None if seen is None else _PARTS.get(seen["part"])
    return None if seen is None or part is None else (_holder(name), part[0], int(seen["expert"]), part[1])


def _shape(matrix: _Held) -> tuple[int, ...]:
    return tuple(matrix.shape) if isinstance(matrix, Tensor) else (matrix.out_features, matrix.in_features)


def _read_into(room: Tensor, matrix: _Held) -> None:
    """Write the numbers of a matrix into float32 [out, in], a part of them at a time."""
    if isinstance(matrix, Tensor):
        room.copy_(matrix)
        forget(matrix)
        return
    for begin, end in bounds(matrix):
        room[begin:end] = matrix.widened(begin, end)
