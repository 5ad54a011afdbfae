"""What the operators between products compute, in float64, over random rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.models.cuda.activation import activate
from slipstream.models.cuda.norm import Norm, joined
from slipstream.models.cuda.rotation import Turns, rotate

EPSILON = 1e-5
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest error of a number, relative to the largest of its row: rounding in float32, or to the type once."""


DEVICE = torch.device("cpu")
"""Where all is computed."""


def random_rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def random_norm(width: int, is_centred: bool, has_bias: bool, seed: int) -> Norm:
    bias = random_rows(width, seed=seed + 1) if has_bias else None
    return Norm(random_rows(width, seed=seed), bias, is_centred, EPSILON)


def poisoned() -> AbstractContextManager[Any]:
    """Every tensor that an operator makes for its results is NaN at first."""
    new = torch.Tensor.new_empty

    def new_poisoned(self: Tensor, *given: Any, **named: Any) -> Tensor:
        return new(self, *given, **named).fill_(float("nan"))

    return mock.patch.object(torch.Tensor, "new_empty", new_poisoned)


def check(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Both [rows, ...]; `ours` may be off by one rounding to its type."""
    assert ours.dtype == dtype
    assert ours.shape == expected.shape
    largest = expected.abs().flatten(1).max(1).values.view(-1, *[1] * (expected.ndim - 1))
    error = float(((ours.double() - expected).abs() / largest).max())
    assert error <= BOUND[dtype], error


def normed(rows: Tensor, norm: Norm | None) -> Tensor:
    """In float64."""
    if norm is None:
        return rows
    if norm.is_centred:
        rows = rows - rows.mean(-1, keepdim=True)
    rows = rows / (rows.square().mean(-1, keepdim=True) + norm.epsilon).sqrt() * norm.weight.double()
    return rows if norm.bias is None else rows + norm.bias.double()


def check_norm(dtype: torch.dtype, width: int, is_centred: bool) -> None:
    """Over rows that lie within wider ones."""
    rows = random_rows(5, width + 7, dtype=dtype)[:, 3 : width + 3]
    norm = random_norm(width, is_centred, is_centred, 1)
    check(norm(rows), normed(rows.double(), norm), dtype)


def check_sums(dtype: torch.dtype, width: int, behind: Norm | None, before: Norm | None) -> None:
    """Of states and change, with norms before and behind or without."""
    states, change = (random_rows(4, width, dtype=dtype, seed=seed) for seed in (2, 3))
    total, rows = joined(states, change, behind, before, 0.7)
    check(total, states.double() + 0.7 * normed(change.double(), behind), dtype)
    check(rows, normed(total.double(), before), dtype)


def check_rotation(dtype: torch.dtype, dim: int, half: int, norms: bool) -> None:
    """Over heads as they lie behind each other in what one product gives."""
    both = random_rows(6, 5 * dim, dtype=dtype, seed=4)
    query, key = both[:, : 3 * dim].view(6, 3, dim), both[:, 3 * dim :].view(6, 2, dim)
    turns = Turns.of(
        torch.tensor([0, 1, 2, 77, 78, 4000], device=DEVICE), random_rows(half, seed=5).abs(), 1.3
    )
    weights = [random_rows(dim, seed=seed) if norms else None for seed in (6, 7)]
    rotated = rotate(query, key, turns.cosines, turns.sines, *weights, EPSILON)
    for ours, heads, weight in zip(rotated, (query, key), weights, strict=True):
        wide = heads.double()
        if weight is not None:
            wide = normed(wide, Norm(weight, None, False, EPSILON))
        pairs = torch.complex(wide[..., :half], wide[..., half : 2 * half])
        turned = pairs * torch.complex(turns.cosines, turns.sines)[:, None].to(pairs.dtype)
        expected = torch.cat([turned.real, turned.imag, wide[..., 2 * half :]], -1)
        check(ours.flatten(0, 1), expected.flatten(0, 1), dtype)


ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: functional.silu,
    1: functional.gelu,
    2: lambda rows: functional.gelu(rows, approximate="tanh"),
    4: lambda rows: functional.relu(rows).square(),
}
"""By the number of their kind."""


def check_activation(dtype: torch.dtype, kind: int, is_gated: bool) -> None:
    """Over more numbers than a program computes, some of them large."""
    rows = random_rows(3, 2600, dtype=dtype, seed=8) * 3
    rows[0, :4] = torch.tensor([90.0, -90.0, 300.0, -300.0])
    wide = rows.double()
    expected = ACTIVATIONS[kind](wide[:, :1300]) * wide[:, 1300:] if is_gated else ACTIVATIONS[kind](wide)
    check(activate(rows, kind, is_gated), expected, dtype)


def check_bits(dtype: torch.dtype) -> None:
    """Whatever rows lie beside it, a row's bits are the same."""
    states, change, qkv = (random_rows(9, 96, dtype=dtype, seed=seed) for seed in (9, 10, 11))
    behind, before = random_norm(96, False, False, 12), random_norm(96, True, True, 13)
    turns = Turns.of(torch.arange(9, device=DEVICE), random_rows(8, seed=14).abs(), 1.0)
    weight = random_rows(16, seed=15)

    def compute(rows: slice) -> list[Tensor]:
        heads = qkv[rows].view(-1, 6, 16)
        cosines, sines = turns.cosines[rows], turns.sines[rows]
        return [
            *joined(states[rows], change[rows], behind, before, 0.5),
            *rotate(heads[:, :4], heads[:, 4:], cosines, sines, weight, weight, EPSILON),
            activate(states[rows], 0, True),
        ]

    every = compute(slice(None))
    for begin, end in ((0, 1), (3, 8), (8, 9)):
        for ours, expected in zip(compute(slice(begin, end)), every, strict=True):
            assert torch.equal(ours, expected[begin:end])
