"""Products of linear layers on a GPU: against float64, a row's bits among others, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.linear_cases import LINEAR_CASES, TOLERANCES

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ROWS = (1, 5, 16, 17, 33, 64, 100)


@pytest.mark.parametrize("name", LINEAR_CASES)
def test_products_against_float64(name: str) -> None:
    case = LINEAR_CASES[name]
    for seed in range(3):
        assert case.error(40, seed, CUDA) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", LINEAR_CASES)
def test_a_row_on_a_gpu_has_the_same_bits_among_any_others(name: str) -> None:
    case = LINEAR_CASES[name]
    weight, rows = case.weight(1, CUDA), case.rows(300, device=CUDA)
    whole = weight.product_of(rows, True)  # before it is rounded to the rows' type
    for number in ROWS:
        assert torch.equal(weight.product_of(rows[-number:], True), whole[-number:]), number
    beside = torch.full_like(rows[:20], torch.nan)
    beside[3], beside[17] = rows[40], rows[41]
    assert torch.equal(weight.product_of(beside, True)[[3, 17]], whole[40:42])
    assert torch.equal(weight.product_of(rows, True), whole), "a second time"


def test_a_product_can_be_captured() -> None:
    case = LINEAR_CASES["4 bits of 32"]
    weight, rows, outputs = (
        case.weight(1, CUDA),
        case.rows(8, device=CUDA),
        torch.tensor([3, 60], device=CUDA),
    )
    weight(rows), weight.unpack(outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product, unpacked = weight(rows), weight.unpack(outputs)
    rows.copy_(case.rows(8, 5, CUDA))
    outputs.copy_(torch.tensor([1, 68]))
    for _ in range(2):
        graph.replay()
        assert torch.equal(product, weight(rows))
        assert torch.equal(unpacked, weight.unpack(outputs))
