"""Norms of a layer's states as operators, with the addition to the states before them.

`slipstream::norm` and `slipstream::add_norm` run in Triton on a CUDA device; on a CPU in PyTorch, or in Triton's
interpreter where TRITON_INTERPRET is 1: for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.models.cuda.triton_use import runs_triton
from slipstream.models.families.parts import NormParts

WIDEST = 8192
"""The widest rows that a kernel keeps in registers."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm's weights as the kernels read them."""

    weight: Tensor
    """float32, what is added to the model's included"""
    bias: Tensor | None
    """float32"""
    is_centred: bool
    """Whether it is a layer norm, and no root mean square norm."""
    epsilon: float

    @classmethod
    def of(cls, parts: NormParts | None, epsilon: float) -> Norm | None:
        """The norm of a model, in a copy; None for none."""
        if parts is None:
            return None
        weight = parts.weight.detach().float() + parts.offset
        bias = None if parts.bias is None else parts.bias.detach().float().clone()
        return cls(weight, bias, parts.is_centred, epsilon)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return int(self.weight.nbytes) + (0 if self.bias is None else int(self.bias.nbytes))

    def __call__(self, rows: Tensor) -> Tensor:
        """[n, width] -> the same"""
        found: Tensor = norm(rows, self.weight, self.bias, self.is_centred, self.epsilon)
        return found


def joined(
    states: Tensor, change: Tensor | None, behind: Norm | None, before: Norm | None, scale: float
) -> tuple[Tensor, Tensor]:
    """[n, width]: the states with what a part of a layer adds to them, and what the next part reads.

    `behind` is the norm of the change, `before` that of the states; None: as they are.
    """
    if change is None:
        return states, states if before is None else before(states)
    epsilon = next((each.epsilon for each in (behind, before) if each is not None), 0.0)
    total, read = add_norm(
        states, change, scale, epsilon,
        None if behind is None else behind.weight, None if behind is None else behind.bias,
        behind is not None and behind.is_centred,
        None if before is None else before.weight, None if before is None else before.bias,
        before is not None and before.is_centred,
    )  # fmt: skip
    return total, total if before is None else read


@torch.library.custom_op("slipstream::norm", mutates_args=())
def norm(rows: Tensor, weight: Tensor, bias: Tensor | None, is_centred: bool, epsilon: float) -> Tensor:
    """rows [n, width], dense in their last dimension -> [n, width]; weight and bias float32 [width]."""
    if runs_triton(rows):
        output = rows.new_empty(rows.shape)
        _launch(rows, None, (None, None, False), (weight, bias, is_centred), None, output, 0.0, epsilon)
        return output
    return _normed(rows.float(), weight, bias, is_centred, epsilon).to(rows.dtype)


@norm.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None, is_centred: bool, epsilon: float) -> Tensor:
    return rows.new_empty(rows.shape)


@torch.library.custom_op("slipstream::add_norm", mutates_args=())
def add_norm(
    states: Tensor, change: Tensor, scale: float, epsilon: float,
    change_weight: Tensor | None, change_bias: Tensor | None, centres_change: bool,
    weight: Tensor | None, bias: Tensor | None, is_centred: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """states and change [n, width] -> states + scale · (the norm of) change, and the norm of that.

    Without weights there is no norm; without the last norm the second result is empty. The sum is rounded before its
    norm is taken.
    """
    of_change, of_total = (change_weight, change_bias, centres_change), (weight, bias, is_centred)
    if runs_triton(states):
        total = states.new_empty(states.shape)
        output = states.new_empty(0 if weight is None else states.shape)
        _launch(states, change, of_change, of_total, total, output, scale, epsilon)
        return total, output
    added = change.float()
    if change_weight is not None:
        added = _normed(added, change_weight, change_bias, centres_change, epsilon)
    total = (states.float() + added * scale).to(states.dtype)
    if weight is None:
        return total, total.new_empty(0)
    return total, _normed(total.float(), weight, bias, is_centred, epsilon).to(states.dtype)


@add_norm.register_fake
def _(
    states: Tensor, change: Tensor, scale: float, epsilon: float,
    change_weight: Tensor | None, change_bias: Tensor | None, centres_change: bool,
    weight: Tensor | None, bias: Tensor | None, is_centred: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return states.new_empty(states.shape), states.new_empty(0 if weight is None else states.shape)


def warps_of(block: int) -> int:
    """Warps of a program that keeps so many numbers of a few arrays."""
    return min(max(block // 512, 1), 16)


def _launch(
    states: Tensor, change: Tensor | None,
    of_change: tuple[Tensor | None, Tensor | None, bool], of_total: tuple[Tensor | None, Tensor | None, bool],
    total: Tensor | None, output: Tensor, scale: float, epsilon: float,
) -> None:  # fmt: skip
    from triton import next_power_of_2

    from slipstream.models.cuda.layer_kernels import add_then_norm

    num_rows, size = states.shape
    block = next_power_of_2(size)
    (change_weight, change_bias, centres_change), (weight, bias, is_centred) = of_change, of_total
    add_then_norm[(num_rows,)](
        states, change, change_weight, change_bias, weight, bias, total, output,
        states.stride(0), 0 if change is None else change.stride(0), size, epsilon, scale,
        block, change is not None, change_weight is not None, centres_change, change_bias is not None,
        weight is not None, is_centred, bias is not None, num_warps=warps_of(block), enable_fp_fusion=False,
    )  # fmt: skip


def _normed(rows: Tensor, weight: Tensor, bias: Tensor | None, is_centred: bool, epsilon: float) -> Tensor:
    if is_centred:
        rows = rows - rows.mean(-1, keepdim=True)
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon) * weight
    return rows if bias is None else rows + bias
