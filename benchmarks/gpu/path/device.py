"""Part `device`: what the device is, the rates of copying and reading, and what launches and a graph's nodes cost."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu import device as whole
from benchmarks.gpu.path.part import Part
from benchmarks.gpu.path.timing import graph_us

LENGTHS = (50, 150, 300, 1000)
PROGRAMS = (1, 132)
"""Of each of a graph's kernels."""


def measure(part: Part) -> None:
    """See the module."""
    if not part.is_tiny:
        part.cell("description", whole.description)
    part.cell("rates", partial(rates, part), needs_s=3)
    if not part.is_tiny:
        part.cell("launches", whole.rates, needs_s=3)
    for pdl in (False,) if part.is_tiny else (False, True):  # there is no such thing in the interpreter
        for programs in PROGRAMS:
            name = f"nodes of {programs} programs{', dependent launch' if pdl else ''}"
            part.cell(name, partial(nodes, part, programs, pdl))


def rates(part: Part) -> dict[str, float]:
    """GB/s of a large copy, bytes read and written, and of reading alone."""
    from benchmarks.gpu.path.small_kernels import read_only

    num_bytes, programs, block = (2**14, 4, 256) if part.is_tiny else (2**31, 132 * 8, 4096)
    source, target = (torch.ones(num_bytes // 4, dtype=torch.int32, device=part.device) for _ in range(2))
    sums = torch.empty(programs, dtype=torch.int32, device=part.device)
    each = num_bytes // 4 // block // programs
    copy_us = graph_us(lambda: target.copy_(source), part.device)
    read_us = graph_us(lambda: read_only[(programs,)](source, sums, each, block), part.device)
    read_bytes = each * programs * block * 4
    return {"copy_gb_per_s": 2 * num_bytes / copy_us / 1e3, "read_gb_per_s": read_bytes / read_us / 1e3}


def nodes(part: Part, programs: int, pdl: bool) -> dict[str, Any]:
    """Microseconds of graphs by their number of kernels, each of which depends on the one before, and of one more."""
    from benchmarks.gpu.path.small_kernels import tick

    lengths = (2, 3) if part.is_tiny else LENGTHS
    numbers = torch.zeros(programs, dtype=torch.int32, device=part.device)
    options = {"launch_pdl": True} if pdl else {}

    def launch(length: int) -> None:
        for _ in range(length):
            tick[(programs,)](numbers, pdl, num_warps=1, **options)

    by_length = {length: graph_us(partial(launch, length), part.device) for length in lengths}
    numbers.zero_()
    launch(7)
    one_more = (by_length[lengths[-1]] - by_length[lengths[0]]) / max(lengths[-1] - lengths[0], 1)
    return {"us": by_length, "us_a_node": one_more, "right": bool((numbers == 7).all())}
