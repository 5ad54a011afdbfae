"""Run by `test_gpu_decoder.py` in a process with TRITON_INTERPRET=1: the operators between products, interpreted."""

from __future__ import annotations

import interpreter
import layer_cases
import pytest
import torch

interpreter.mend()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _poison() -> object:
    with layer_cases.poisoned():
        yield


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16])
@pytest.mark.parametrize(("width", "is_centred"), [(44, False), (300, True)])
def test_norms(dtype: torch.dtype, width: int, is_centred: bool) -> None:
    layer_cases.check_norm(dtype, width, is_centred)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("behind", "before"), [(0, 0), (1, 0), (0, 1), (1, 2), (2, 1)])
def test_sums(dtype: torch.dtype, behind: int, before: int) -> None:
    """0: no norm, 1: root mean square, 2: layer norm with a bias."""
    norms = [
        layer_cases.random_norm(44, kind == 2, kind == 2, kind) if kind else None for kind in (behind, before)
    ]
    layer_cases.check_sums(dtype, 44, *norms)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("dim", "half", "norms"), [(16, 8, False), (16, 8, True), (22, 6, True), (80, 0, True)]
)
def test_rotations(dtype: torch.dtype, dim: int, half: int, norms: bool) -> None:
    layer_cases.check_rotation(dtype, dim, half, norms)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", layer_cases.ACTIVATIONS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_activations(dtype: torch.dtype, kind: int, is_gated: bool) -> None:
    layer_cases.check_activation(dtype, kind, is_gated)


@pytest.mark.parametrize("dtype", TYPES)
def test_bits(dtype: torch.dtype) -> None:
    layer_cases.check_bits(dtype)
