"""Models that compute in float32 while their matrices stay in 16 bits, as a checkpoint stores them.

Matrices are the weights of plain linear layers and embeddings: nearly all of a model's bytes. Everything else (norms,
biases, buffers) is float32. The native kernels widen packed matrices in registers; until a model is packed, `widened`
lets Transformers compute the same with one matrix widened at a time, so that loading never holds the whole model in
32 bits.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.models.linear.sixteen_bits import widened_product

STORED = "stored"
"""For `reading`: matrices are read in the type in which the checkpoint stores them."""

_reading: ContextVar[torch.dtype | str | None] = ContextVar("_reading", default=None)


class WidenedEmbedding(nn.Embedding):
    """An embedding whose rows are widened to float32 as they are read."""

    def forward(self, token_ids: Tensor) -> Tensor:
        return nn.functional.embedding(token_ids, self.weight).float()


def has_only_plain_matrices(model: nn.Module) -> bool:
    """Whether all of a model's matrices are those of plain linear layers and embeddings, linear layers among them.

    Not so for experts, whose weights have three dimensions, or linear layers of a class of their own.
    """
    modules = list(model.modules())
    others = (part for part in modules if type(part) is not nn.Linear and not isinstance(part, nn.Embedding))
    if any(parameter.ndim > 1 for part in others for parameter in part.parameters(recurse=False)):
        return False
    return any(type(part) is nn.Linear for part in modules)


@contextlib.contextmanager
def reading(dtype: torch.dtype | str | None) -> Iterator[None]:
    """Let Transformers read the matrices of float32 models in another type within the body; None changes nothing.

    `STORED` reads each in the checkpoint's own type. Models with other matrices than plain ones are read in float32.
    """
    token = _reading.set(dtype)
    try:
        yield
    finally:
        _reading.reset(token)


def plain_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights that plain linear layers and embeddings alone read: those that may be in 16 bits."""
    return [
        parameter
        for parameter, modules in _readers(model).items()
        if all(_is_plain(module) for module in modules)
    ]


def matrix_dtype(model: nn.Module) -> torch.dtype | None:
    """The type that holds the numbers of all matrices that plain linear layers read; None where none does.

    One that an embedding of a class of its own reads too is float32, and may hold 16-bit numbers.
    """
    readers = _readers(model)
    found = {matrix.dtype for matrix, modules in readers.items() if all(_is_plain(part) for part in modules)}
    if len(found) != 1:
        return None
    (dtype,) = found
    shared = [matrix for matrix, modules in readers.items() if any(_is_plain(part) for part in modules)]
    return dtype if all(_holds(dtype, matrix) for matrix in shared) else None


def row_dtype(model: Any) -> torch.dtype:
    """The type that a model computes in: float32 where all but its matrices is float32."""
    others = {
        parameter.dtype
        for parameter, modules in _readers(model).items()
        if not any(_is_plain(part) for part in modules)
    }
    if others == {torch.float32} and has_only_plain_matrices(model):
        return torch.float32
    dtype: torch.dtype = model.dtype
    return dtype


def settle_matrices(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Convert the matrices of a model to `dtype`, or leave them as they are, and make every other weight float32.

    A matrix that something else reads too (an embedding of a class of its own) gets the numbers and stays float32.
    """
    for parameter, modules in _readers(model).items():
        plain = [_is_plain(module) for module in modules]
        if dtype is not None and any(plain):
            parameter.data = parameter.data.to(dtype)
        if not all(plain):
            parameter.data = parameter.data.float()
    for module in model.modules():
        if type(module) is nn.Embedding and module.weight.dtype != torch.float32:
            module.__class__ = WidenedEmbedding  # it stays the same object, which others may hold


@contextlib.contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Let the linear layers of a model multiply float32 rows with 16-bit matrices within the body."""
    narrow = [
        part for part in model.modules() if type(part) is nn.Linear and part.weight.dtype != torch.float32
    ]
    for linear in narrow:
        linear.forward = partial(_multiply, linear)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in narrow:
            del linear.forward


def _multiply(linear: nn.Linear, rows: Tensor) -> Tensor:
    return widened_product(rows, linear.weight, linear.bias)


def _readers(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """Floating-point parameters to the modules that read them; a bias counts as read by the model itself."""
    readers: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point():
                readers[parameter].append(module if name == "weight" else model)
    return readers


def _holds(dtype: torch.dtype, matrix: Tensor) -> bool:
    """Whether all numbers of a matrix are numbers of this type."""
    parts = (matrix.detach()[begin : begin + 4096] for begin in range(0, len(matrix), 4096))
    return matrix.dtype == dtype or all(torch.equal(part.to(dtype).to(part.dtype), part) for part in parts)


def _is_plain(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.Embedding, WidenedEmbedding)


_inherited_plan = PreTrainedModel._get_dtype_plan


def _dtype_plan(model: Any, own: torch.dtype) -> dict[str, Any]:
    """Patterns of weights' names to the types they are read in; None for the checkpoint's own."""
    plan: dict[str, Any] = _inherited_plan(model, own)
    dtype = _reading.get()
    if dtype is None or not has_only_plain_matrices(model):
        return plan
    names = (f"{name}.weight" for name, module in model.named_modules() if _is_plain(module))
    patterns = {re.sub(r"\.\d+\.", ".[0-9]+.", f"^{name}$") for name in names}  # of all layers at once
    return dict.fromkeys(patterns, None if dtype == STORED else dtype) | plan


PreTrainedModel._get_dtype_plan = _dtype_plan  # type: ignore[method-assign, assignment]
