"""Experts whose weights a file holds quantised, one by one, where a Transformers model has stacks of all of a layer.

Our kernels for CPUs hold them as they are. They are widened one at a time, by the passes that check a model and where
each is packed in a format that they are to be rounded to, so that the whole widened model is never held.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.cpu.kernel import common_kernel
from slipstream.models.cpu.pages import forget
from slipstream.models.families.experts import ExpertParts, FileStack
from slipstream.models.files.grouped import GroupedMatrix, bounds
from slipstream.models.files.stored_linear import StoredLinear
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.matrices import known_experts

_NAME = re.compile(r"(?P<layer>.+)\.(?P<block>\w+)\.experts\.(?P<expert>\d{1,6})\.(?P<part>\w+)")
_BLOCKS = {"block_sparse_moe": "mlp"}
"""What Transformers has renamed since checkpoints were saved."""
_PARTS = {
    **{"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)},
    **{"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)},
}
"""A layer of an expert to the parameter that holds it, and its place there: gate, then up."""

_JOINED = {"granitemoehybrid": ("block_sparse_moe", False), "llama4_text": ("feed_forward", True)}
"""Families whose single experts Transformers does not join: the block that has them, and whether its stacks have inputs
before outputs."""

KEPT = "kept"
"""For `take_experts`: no format, but as they are."""
WIDENS_EXPERTS = "--dtype bfloat16 or float16 widens the whole model"

_Held = GroupedMatrix | Tensor


class StoredStack(FileStack):
    """The weights of a layer's experts as a file holds them."""

    def __init__(self, experts: Sequence[Sequence[_Held]], parts: ExpertParts) -> None:
        """Take each expert's matrices [out, in]: gate and up, or one. `parts` say how a parameter has them."""
        self._experts = experts
        self._is_transposed, self._alternate = parts.is_transposed, parts.alternates
        outputs, inputs = _shape(experts[0][0])
        outputs *= len(experts[0])
        self.shape = (len(experts), *((inputs, outputs) if self._is_transposed else (outputs, inputs)))

    def read(self, expert: int) -> Tensor:
        """See `FileStack.read`."""
        matrices = self._experts[expert]
        outputs, inputs = _shape(matrices[0])
        found = torch.empty(len(matrices) * outputs, inputs)
        for number, matrix in enumerate(matrices):
            own = slice(number, None, len(matrices)) if self._alternate else slice(number * outputs, None)
            _read_into(found[own][:outputs], matrix)
        return found.T if self._is_transposed else found

    def layers(self, expert: int) -> list[GroupedLinear]:
        """See `FileStack.layers`."""
        return [
            StoredLinear(matrix, None)
            for matrix in self._experts[expert]
            if isinstance(matrix, GroupedMatrix)
        ]

    def widened(self, dtype: torch.dtype) -> Tensor:
        """All experts as one tensor of this type."""
        found = torch.empty(self.shape, dtype=dtype)
        for expert in range(len(found)):
            found[expert] = self.read(expert)
        return found

    def keep(self) -> None:
        """Let the kernels hold them as they are; raises `ModelError` where they cannot."""
        layers = [layer for expert in range(self.shape[0]) for layer in self.layers(expert)]
        if len(layers) < sum(map(len, self._experts)):
            raise ModelError("some of them are not quantised")
        self.kernel = common_kernel(layers)


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
    held_in: str | None,
) -> TakenExperts:
    """Find the experts among the weights of a file; `model` may be without numbers.

    `held_in` is the format that they are rounded to, or `KEPT`. Raises `ModelError`, with the options that load them,
    where there are some and it is None, and where the kernels do not know the experts of such a model.
    """
    modules = dict(model.named_modules())
    found = [name for name in matrices if name not in modules and _NAME.fullmatch(name)]
    if not found:
        return TakenExperts({}, frozenset())
    family = model.config.model_type
    these = (
        f"the experts of this {family} model are {kind} weights ({found[0]} and {len(found) - 1} more layers)"
    )
    if held_in is None:
        raise ModelError(
            f"{these}, which only our own kernels on a CPU hold as they are, or rounded (--quantization int8 or int4); "
            f"{WIDENS_EXPERTS}"
        )
    known = _known(model)
    held = _by_holder({**_plain(tensors), **{name: matrices[name] for name in found}})
    stacks: dict[str, StoredStack] = {}
    names: set[str] = set()
    own_names = {_holder(name): f"{name.rpartition('.experts.')[0]}.experts" for name in found}
    for holder, own in own_names.items():
        parts = known.get(holder)
        if parts is None:
            raise ModelError(
                f"the fused decoder does not know the experts of this {family} model ({own}), whose {kind} weights "
                f"cannot be held while they are read; {WIDENS_EXPERTS}"
            )
        for parameter, stack in _stacks(holder, parts, held[holder]):
            try:
                if held_in == KEPT:
                    stack.keep()
            except ModelError as error:
                raise ModelError(
                    f"{these}, which cannot be kept packed ({holder}.{parameter}: {error}); --quantization int8 or "
                    f"int4 rounds them to 8 or 4 bits for our own kernels on a CPU, {WIDENS_EXPERTS}"
                ) from None
            stacks[f"{holder}.{parameter}"] = stack
        names |= {name for name, _ in held[holder].values()}
    routers = _routers(matrices, modules, known.values())
    return TakenExperts(
        stacks, frozenset(names | {name.removesuffix(".weight") for name in routers}), routers
    )


def _routers(
    matrices: Mapping[str, GroupedMatrix], modules: Mapping[str, Any], known: Iterable[ExpertParts]
) -> dict[str, Tensor]:
    """Weights of routers that the file holds quantised, widened, by their names in the file."""
    weights = {id(parts.router) for parts in known}
    return {
        f"{name}.weight": matrix.widened(0, matrix.out_features)
        for name, matrix in matrices.items()
        if id(getattr(modules.get(_renamed(name)), "weight", None)) in weights
    }


def take_stacks(
    matrices: Mapping[str, GroupedMatrix], tensors: Mapping[str, Tensor], model: Any
) -> TakenExperts:
    """Find the experts that `model` has in a form which Transformers does not make of single ones; it may be without
    numbers."""
    held = _by_holder({**_plain(tensors), **matrices})
    stacks: dict[str, StoredStack] = {}
    names: set[str] = set()
    for holder, parts in _known(model).items():
        if holder in held and (parts.is_transposed or parts.alternates):
            own = _stacks(holder, parts, held[holder])
            stacks |= {f"{holder}.{name}": stack for name, stack in own}
            names |= {name for name, _ in held[holder].values()}
    return TakenExperts(stacks, frozenset(names))


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, _Held]:
    """Weights of plain numbers, by the names of their layers."""
    return {
        name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if name.endswith(".weight")
    }


def _by_holder(weights: Mapping[str, _Held]) -> dict[str, dict[tuple[str, int, int], tuple[str, _Held]]]:
    """The experts among weights: by the module that has them, and their parameter, expert and place there."""
    held: dict[str, dict[tuple[str, int, int], tuple[str, _Held]]] = defaultdict(dict)
    for name, weight in weights.items():
        seen = _place(name)
        if seen is not None:
            held[seen[0]][seen[1:]] = (name, weight)
    return held


def _known(model: Any) -> dict[str, ExpertParts]:
    """The experts that the kernels know, by the names of the modules that hold them."""
    place = {id(module): name for name, module in model.named_modules()}
    return {place[id(module)]: parts for module, parts in known_experts(model)}


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
        yield parameter, StoredStack(experts, parts)
    more = sorted(name for (_, expert, _), (name, _) in held.items() if expert >= parts.num_experts)
    if more:
        raise ModelError(f"{more[0]} is one expert more than the configuration's {parts.num_experts}")


def joined(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """For Transformers: with the experts that it does not join by itself as the stacks that its models have.

    Those are the experts in no block of a layer, and the ones of some families. Raises `ModelError` where one lacks a
    part.
    """
    block, is_transposed = _JOINED.get(family, ("", False))
    held: dict[tuple[str, str], dict[tuple[int, int], Tensor]] = defaultdict(dict)
    for name in list(tensors):
        seen = _NAME.fullmatch(name.removesuffix(".weight"))
        place = None if seen is None else _PARTS.get(seen["part"])
        if seen is None or place is None or not (seen["block"].isdecimal() or seen["block"] == block):
            continue
        holder = f"{seen['layer']}.{seen['block']}.experts"
        held[holder, place[0]][int(seen["expert"]), place[1]] = tensors.pop(name)
    for (holder, parameter), parts in held.items():
        places = 1 + max(place for _, place in parts)
        wanted = [(expert, place) for expert in range(len(parts) // places) for place in range(places)]
        if sorted(parts) != wanted:
            raise ModelError(f"{holder} lacks a part of {parameter} of an expert")
        each = [parts.pop(key) for key in wanted]
        stack = torch.stack(
            [torch.cat(each[first : first + places]) for first in range(0, len(each), places)]
        )
        tensors[f"{holder}.{parameter}"] = stack.transpose(1, 2).contiguous() if is_transposed else stack
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
