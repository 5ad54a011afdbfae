"""Models that compute in float32 while their matrices stay in 16 bits, as a checkpoint stores them.

Matrices are the weights of plain linear layers and embeddings, and of experts that the native kernels know: nearly all
of a model's bytes. Everything else (norms, biases, routers, buffers) is float32. The native kernels widen packed
matrices in registers; until a model is packed, `widened` lets Transformers compute the same with one matrix widened at
a time, so that loading never holds the whole model in 32 bits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedModelError
from slipstream.models.cpu.pages import forget
from slipstream.models.families.experts import ExpertParts
from slipstream.models.families.registry import find_family
from slipstream.models.huggingface import PreTrainedModel
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.linear.sixteen_bits import widened_product

log = logging.getLogger(__name__)

_LARGE_BYTES = 2**20

STORED = "stored"
"""For `reading`: matrices are read in the type in which the checkpoint stores them."""

_reading: ContextVar[torch.dtype | str | None] = ContextVar("_reading", default=None)


class WidenedEmbedding(nn.Embedding):
    """An embedding whose rows are widened to float32 as they are read."""

    def forward(self, token_ids: Tensor) -> Tensor:
        return nn.functional.embedding(token_ids, self.weight).float()


class WidenedScaledEmbedding(WidenedEmbedding):
    """The same for one that multiplies its rows with a number."""

    scalar_embed_scale: float

    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids) * self.scalar_embed_scale


def has_only_plain_matrices(model: nn.Module) -> bool:
    """Whether all of a model's matrices are those of plain linear layers and embeddings, linear layers among them.

    Not so for linear layers of a class of their own, or experts, but for those of a family of the fused decoder.
    """
    modules = list(model.modules())
    others = (part for part in modules if type(part) is not nn.Linear and not isinstance(part, nn.Embedding))
    known = {id(parameter) for _, parts in known_experts(model) for parameter in parts.parameters}
    left = (parameter for part in others for parameter in part.parameters(recurse=False))
    if any(parameter.ndim > 1 and id(parameter) not in known for parameter in left):
        return False
    return any(type(part) is nn.Linear or isinstance(part, GroupedLinear) for part in modules)


@contextlib.contextmanager
def reading(dtype: torch.dtype | str | None) -> Iterator[None]:
    """Let Transformers read the matrices of float32 models in another type within the body; None changes nothing.

    `STORED` reads each in the checkpoint's own type. Models with other matrices than plain ones are read in float32,
    and so are all with a version of Transformers that is not known: the same numbers in twice the memory, with a
    warning.
    """
    if dtype is not None and inherited_plan is None:
        _warn_of_wide_reading()
    token = _reading.set(dtype)
    try:
        yield
    finally:
        _reading.reset(token)


@functools.cache
def _warn_of_wide_reading() -> None:
    log.warning(
        "Transformers %s reads 16-bit checkpoints as float32 here, so that loading takes twice the memory; Slipstream "
        "knows how to keep them with the versions that pyproject.toml names",
        version("transformers"),
    )


def plain_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights that plain linear layers, embeddings and experts alone read: those that may be in 16 bits."""
    return [parameter for parameter, plain in _readers(model).items() if all(plain)]


def matrix_dtype(model: nn.Module) -> torch.dtype | None:
    """The type that holds the numbers of all matrices that plain linear layers read; None where none does.

    One that an embedding of a class of its own reads too is float32, and may hold 16-bit numbers.
    """
    readers = _readers(model)
    found = {matrix.dtype for matrix, plain in readers.items() if all(plain)}
    if len(found) != 1:
        return None
    (dtype,) = found
    shared = [matrix for matrix, plain in readers.items() if any(plain)]
    return dtype if all(_holds(dtype, matrix) for matrix in shared) else None


def row_dtype(model: Any) -> torch.dtype:
    """The type that a model computes in: float32 where all but its matrices is float32."""
    others = {parameter.dtype for parameter, plain in _readers(model).items() if not any(plain)}
    if others == {torch.float32} and has_only_plain_matrices(model):
        return torch.float32
    dtype: torch.dtype = model.dtype
    return dtype


def resolve_matrices(model: nn.Module, dtype: torch.dtype | None, keeps_narrow: bool = False) -> None:
    """Convert the matrices of a model to `dtype`, or leave them as they are, and make every other weight float32.

    With `keeps_narrow` those of 16 bits stay so where `dtype` is float32: who packs them widens them then, part by
    part, and the model is never held in 32 bits next to its packed weights. A matrix that something else reads too (an
    embedding of a class of its own) gets the numbers and stays float32.
    """
    for parameter, plain in _readers(model).items():
        stays = keeps_narrow and dtype == torch.float32 and parameter.dtype in (torch.bfloat16, torch.float16)
        if dtype is not None and any(plain) and not stays:
            parameter.data = parameter.data.to(dtype)
        if not all(plain):
            parameter.data = parameter.data.float()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and _is_plain(module) and module.weight.dtype != torch.float32:
            # It stays the same object, which others may hold.
            module.__class__ = WidenedScaledEmbedding if _is_scaled(module) else WidenedEmbedding


def widen_experts(model: nn.Module) -> None:
    """Make the weights of experts float32, for passes in the Transformers model.

    Raises `UnsupportedModelError` for those that stay in a file until our own kernels round them.
    """
    for _, parts in known_experts(model):
        if parts.are_in_a_file:
            raise UnsupportedModelError(
                "its quantised experts are held for the fused decoder alone, which does not run this model; --dtype "
                "bfloat16 or float16 widens the whole model"
            )
        for stack in parts.stacks:
            stack.data = stack.data.float()


@contextlib.contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Let the linear layers and experts of a model multiply float32 rows with 16-bit matrices within the body."""
    forwards: dict[nn.Module, Any] = {
        part: partial(_multiply, part)
        for part in model.modules()
        if type(part) is nn.Linear and part.weight.dtype != torch.float32
    }
    forwards |= {experts: partial(_visit, experts) for experts, _ in known_experts(model)}
    for part, forward in forwards.items():
        part.forward = forward
    try:
        yield
    finally:
        for part in forwards:
            del part.forward


@contextlib.contextmanager
def unread(model: nn.Module) -> Iterator[UsedLayers]:
    """Within the body linear layers, and experts that the kernels know, give zeros of the right shape.

    So a pass that only records what a model does, and not what comes of it, reads no weights. Yields which layers were
    used so far.
    """
    used = UsedLayers(set(), set())
    experts = {id(module) for module, _ in known_experts(model)}
    stubs: dict[nn.Module, Any] = {}
    plain: list[nn.Module] = []
    for name, part in model.named_modules():
        if type(part) is nn.Linear or isinstance(part, GroupedLinear):
            stubs[part] = partial(_zeros, used.called, name, part.out_features)
        elif id(part) in experts:
            stubs[part] = lambda rows, *_, **__: torch.zeros_like(rows)
        if type(part) is nn.Linear:
            part.__dict__["weight_was_read"] = partial(used.read.add, name)
            part.__class__ = _WatchedLinear
            plain.append(part)
    for part, forward in stubs.items():
        part.forward = forward
    try:
        yield used
    finally:
        for part in stubs:
            del part.forward
        for part in plain:
            part.__class__ = nn.Linear
            del part.__dict__["weight_was_read"]


@dataclass(frozen=True, slots=True)
class UsedLayers:
    """The names of the linear layers that a pass has used."""

    called: set[str]
    read: set[str]
    """Those whose weight other code has read: for a product of its own, or to see its type."""

    @property
    def only_called(self) -> frozenset[str]:
        """Those that anything may stand for which can be called as they are."""
        return frozenset(self.called - self.read)


class _WatchedLinear(nn.Linear):
    """What a plain linear layer is within `unread`."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            self.__dict__["weight_was_read"]()
        return super().__getattr__(name)


def _zeros(called: set[str], name: str, out_features: int, rows: Tensor) -> Tensor:
    called.add(name)
    return rows.new_zeros(*rows.shape[:-1], out_features)


@contextlib.contextmanager
def read_and_forgotten(model: nn.Module) -> Iterator[None]:
    """Within the body, drop each weight that is mapped from a file once a pass has read it.

    So passes before the weights are packed hold one layer of them, and not the whole file.
    """
    hooks = [
        part.register_forward_hook(_forget)
        for part in model.modules()
        if any(parameter.nbytes >= _LARGE_BYTES for parameter in part.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _forget(module: nn.Module, _inputs: object, _output: object) -> None:
    for parameter in module.parameters(recurse=False):
        forget(parameter)


def _multiply(linear: nn.Linear, rows: Tensor) -> Tensor:
    return widened_product(rows, linear.weight, linear.bias)


class _Widened:
    """What experts read of themselves, weights in 16 bits widened expert by expert."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._experts, name)
        is_stack = isinstance(found, nn.Parameter) and found.ndim == 3 and found.dtype != torch.float32
        return _WidenedStack(found) if is_stack else found


class _WidenedStack:
    """Weights of experts, float32 when they are read."""

    def __init__(self, stack: Tensor) -> None:
        self._stack = stack

    def __getitem__(self, expert: Any) -> Tensor:
        return self._stack[expert].float()


def _visit(experts: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    """The experts' own forward, one expert after the other: Transformers may have another in its place."""
    forward = type(experts).forward
    return getattr(forward, "__wrapped__", forward)(_Widened(experts), *arguments, **keywords)


def known_experts(model: nn.Module) -> list[tuple[nn.Module, ExpertParts]]:
    """The modules that hold the experts of layers which the fused decoder knows, and their weights."""
    family = find_family(model) if hasattr(model, "config") else None
    if family is None or family.experts is None:
        return []
    try:
        layers = family.part(model, family.layers)
        parts = [family.layer_parts(layer).experts for layer in layers]
        modules = [family.part(layer, family.experts) for layer in layers]
    except AttributeError:  # it is no `misfit` only where all layers have them
        return []
    return [(module, known) for module, known in zip(modules, parts, strict=True) if known is not None]


def _readers(model: nn.Module) -> dict[nn.Parameter, list[bool]]:
    """Floating-point parameters to whether each module that reads them is one that widens them.

    A bias counts as read by the model itself.
    """
    stacks = {id(stack) for _, parts in known_experts(model) for stack in parts.stacks}
    readers: dict[nn.Parameter, list[bool]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point():
                is_weight = name == "weight" and _is_plain(module)
                readers[parameter].append(is_weight or id(parameter) in stacks)
    return readers


def _holds(dtype: torch.dtype, matrix: Tensor) -> bool:
    """Whether all numbers of a matrix are numbers of this type."""
    parts = (matrix.detach()[begin : begin + 4096] for begin in range(0, len(matrix), 4096))
    return matrix.dtype == dtype or all(torch.equal(part.to(dtype).to(part.dtype), part) for part in parts)


def _is_plain(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.Embedding, WidenedEmbedding) or _is_scaled(module)


def _is_scaled(module: nn.Module) -> bool:
    """Whether it is an embedding of Gemma's kind, which multiplies its rows with a number and does nothing else."""
    return isinstance(module, nn.Embedding) and hasattr(module, "scalar_embed_scale")


inherited_plan = getattr(PreTrainedModel, "_get_dtype_plan", None)
"""A private method of Transformers: other versions may lack it. `reading` says so."""


def _dtype_plan(model: Any, *arguments: Any) -> dict[str, Any]:
    """Patterns of weights' names to the types they are read in; None for the checkpoint's own."""
    assert inherited_plan is not None
    plan: dict[str, Any] = inherited_plan(model, *arguments)
    dtype = _reading.get()
    if dtype is None or not has_only_plain_matrices(model):
        return plan
    names = [f"{name}.weight" for name, module in model.named_modules() if _is_plain(module)]
    stacks = {id(stack) for _, parts in known_experts(model) for stack in parts.stacks}
    names += [name for name, parameter in model.named_parameters() if id(parameter) in stacks]
    patterns = {re.sub(r"\.\d+\.", ".[0-9]+.", f"^{name}$") for name in names}  # of all layers at once
    return dict.fromkeys(patterns, None if dtype == STORED else dtype) | plan


if inherited_plan is not None:
    PreTrainedModel._get_dtype_plan = _dtype_plan  # type: ignore[method-assign, assignment]
