"""Run by `test_linear_kernels.py` in a process with TRITON_INTERPRET=1: the product of linear layers, interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import interpreter
import pytest
import torch
from linear_cases import LINEAR_CASES, TOLERANCES, LinearCase

from slipstream.models.cuda import linear

interpreter.mend()

BITWISE = (
    "bfloat16",
    "float32",
    "int8",
    "fp8, blocks",
    "4 bits of 32",
    "8 bits of 48",
    "4 bits of 96 in their middle",
)
ROWS = (1, 5, 16, 17, 64)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Memory that nothing was written to is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", LINEAR_CASES)
def test_the_kernel_computes_products(name: str) -> None:
    case = LINEAR_CASES[name]
    assert case.error() < TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", BITWISE)
def test_a_row_has_the_same_bits_among_any_others(name: str) -> None:
    """In passes of other numbers of rows, at another place, and beside rows that are NaN."""
    case = replace(LINEAR_CASES[name], outputs=(30, 9))
    weight, rows = case.weight(1), case.rows(100)
    whole = weight.product_of(rows, True)  # before it is rounded to the rows' type
    for number in ROWS:
        assert torch.equal(weight.product_of(rows[-number:], True), whole[-number:]), number
    beside = torch.full_like(rows[:20], torch.nan)
    beside[3], beside[17] = rows[40], rows[41]
    assert torch.equal(weight.product_of(beside, True)[[3, 17]], whole[40:42])


def test_many_rows_are_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LINEAR_CASES["one layer"]
    weight, rows = case.weight(2), case.rows(50)
    whole = weight(rows)
    monkeypatch.setattr(linear, "MOST_ROWS", 32)
    assert torch.equal(weight(rows), whole)


@pytest.mark.parametrize("num_in", [24, 520, 1536])
def test_tickets_are_zeros_again(num_in: int) -> None:
    weight = LinearCase((130,), num_in).weight(3)
    rows = LinearCase((130,), num_in).rows(40)
    first = weight(rows)
    assert bool(weight.tickets.eq(0).all())
    assert (len(weight.tickets) > 0) == (num_in >= 384)
    assert torch.equal(weight(rows), first)
