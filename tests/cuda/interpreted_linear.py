"""Run by `test_linear_kernels.py` in a process with TRITON_INTERPRET=1: the product of linear layers, interpreted."""

from __future__ import annotations

import interpreter
import pytest
import torch
from linear_cases import LINEAR_CASES, TOLERANCES, LinearCase

interpreter.mend()


@pytest.mark.parametrize("name", LINEAR_CASES)
def test_the_kernel_computes_products(name: str) -> None:
    case = LINEAR_CASES[name]
    assert case.error() < TOLERANCES[case.dtype]
