"""Products of linear layers: ours, by how their weights are held, beside cuBLAS."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.path.part import Part
from benchmarks.gpu.path.timing import graph_us
from slipstream.models.cuda.linear import DeviceWeight
from slipstream.models.linear.formats import weight_format
from slipstream.models.linear.grouped import GroupedWeight
from tests.cuda.linear_cases import FileLinear

KINDS = ("bfloat16", "int8", "4 bits")
"""How weights are held; the last with a scale and a zero for each 128 inputs."""
ROWS = (1, 16, 64)
CACHED_BYTES = 2**28
"""So many bytes of weights are read in turns, or some GPU would keep them in its cache."""
BFLOAT16 = torch.bfloat16


def weight_of(device: torch.device, n: int, k: int, kind: str, dtype: torch.dtype = BFLOAT16) -> DeviceWeight:
    """A random weight [n, k] for rows of `dtype`."""
    if kind == "4 bits":
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
        scales, zeros = torch.rand(2, n, -(-k // 128), device=device).unbind()
        return DeviceWeight.of(
            [FileLinear(GroupedWeight(codes, scales, 8 * zeros, 128))], dtype, device=device
        )
    layer = nn.Linear(k, n, bias=False, device="meta")
    layer.weight = nn.Parameter(torch.randn(n, k, device=device).to(dtype), requires_grad=False)
    return DeviceWeight.of([layer], dtype, weight_format("int8") if kind == "int8" else None)


def product_rates(part: Part, n: int, k: int) -> dict[str, Any]:
    """Microseconds of a product [rows, k] -> [rows, n], and GB of weights a second, by kind and rows."""
    found: dict[str, Any] = {}
    counts = (1, 5) if part.is_tiny else ROWS
    for kind in ("cuBLAS", *KINDS):
        bits = {"int8": 8.5, "4 bits": 4}.get(kind, 16)
        copies = 1 if part.is_tiny else math.ceil(CACHED_BYTES * 8 / (n * k * bits))
        made: Any = cublas if kind == "cuBLAS" else partial(weight_of, kind=kind)
        products = [made(part.device, n, k) for _ in range(copies)]
        us = {}
        for count in counts:
            rows = torch.randn(count, k, device=part.device).to(BFLOAT16)
            us[count] = graph_us(partial(_all, products, rows), part.device) / copies
        num_bytes = n * k * bits / 8
        found[kind] = {"us": us, "gb_per_s": {count: num_bytes / each / 1e3 for count, each in us.items()}}
    return found


def cublas(device: torch.device, n: int, k: int, dtype: torch.dtype = BFLOAT16) -> Callable[[Tensor], Tensor]:
    """PyTorch's product with a random weight [n, k]."""
    return partial(F.linear, weight=torch.randn(n, k, device=device).to(dtype))


def _all(products: Sequence[Callable[[Tensor], Tensor]], rows: Tensor) -> None:
    for multiply in products:
        multiply(rows)
