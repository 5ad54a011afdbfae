"""Part `kernels`: all of them compiled for this device, and what they compute against float64 and against the host."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.path.part import Part
from benchmarks.gpu.path.products import product_rates
from benchmarks.gpu.path.shapes import SHAPES, TINY, products
from slipstream.models.cuda.attention_plan import SPLIT
from slipstream.models.cuda.choice import choose
from slipstream.models.cuda.tree_attention import Cut
from slipstream.sampling.noise import Noise, choose_rows
from tests.cuda.attention_cases import CASES, Case, Layer, random_groups
from tests.cuda.linear_cases import LINEAR_CASES, LinearCase

PROCESSES = 16
TINY_CASES = ("plain", "bfloat16")
TINY_LINEARS = ("int8", "4 bits of 128 in float16")
BFLOAT16 = torch.bfloat16
REAL = {
    "1G": Case(BFLOAT16, None, 28, 28, 64, 64, scaling=0.125),
    "8B": Case(BFLOAT16, None, 32, 8, 128, 128, scaling=0.09),
    "heads of 256, capped, in a window": Case(
        BFLOAT16, None, 8, 4, 256, 256, reach=1024, softcap=50.0, scaling=0.06
    ),
    "8B, int8": Case(BFLOAT16, torch.int8, 32, 8, 128, 128, scaling=0.09),
    "sinks": Case(BFLOAT16, None, 64, 8, 64, 64, reach=128, has_sinks=True, scaling=0.125),
}
"""Layers of real models, cut as the operator cuts them."""
LONGEST = 2100
"""Entries of the longest sequence, nearly: some splits."""


def measure(part: Part) -> None:
    """See the module."""
    part.cell("compiled", partial(compile_all, part), needs_s=10)
    for name in TINY_CASES if part.is_tiny else CASES:
        part.cell(f"attention, {name}", partial(_small, part, CASES[name]))
    for name, case in real_cases(part.is_tiny).items():
        part.cell(f"attention of {name}", partial(_large, part, case))
    for vocab_size in (1500,) if part.is_tiny else (4096, 128256):
        part.cell(f"choice of {vocab_size:,}", partial(choices, part, vocab_size))
    for name in TINY_LINEARS if part.is_tiny else LINEAR_CASES:
        part.cell(f"linear, {name}", partial(_linear, part, LINEAR_CASES[name]))
    for name, shape in {"tiny": TINY}.items() if part.is_tiny else SHAPES.items():
        for n, k in products(shape)[:1] if part.is_tiny else products(shape):
            part.cell(f"rates of {name} {n}x{k}", partial(product_rates, part, n, k), needs_s=4)


def real_cases(is_tiny: bool) -> dict[str, Case]:
    """The layers of `REAL`, or one like them that an interpreter can compute."""
    if is_tiny:
        return {"1G": replace(REAL["1G"], num_heads=2, kv_heads=1, split=32, cut=Cut(16, 16, 4))}
    return {
        name: replace(case, cut=Cut.of(case.key_dim, case.cache_dtype == torch.int8), split=SPLIT)
        for name, case in REAL.items()
    }


def layer_of(part: Part, case: Case, seed: int = 0) -> Layer:
    """Random sequences over a layer of a real model."""
    groups = random_groups(seed, 2, 40) if part.is_tiny else random_groups(seed, 4, LONGEST)
    return Layer.random(case, seed, groups, part.device)


def _small(part: Part, case: Case) -> dict[str, Any]:
    errors = [
        Layer.random(case, seed, device=part.device).error() for seed in range(1 if part.is_tiny else 4)
    ]
    return {"error": max(errors), "dtype": str(case.dtype)}


def _linear(part: Part, case: LinearCase) -> dict[str, Any]:
    errors = [case.error(5, seed, part.device) for seed in range(1 if part.is_tiny else 3)]
    return {"error": max(errors), "dtype": str(case.dtype)}


def _large(part: Part, case: Case) -> dict[str, Any]:
    return {"error": layer_of(part, case).error(), "dtype": str(case.dtype)}


def choices(part: Part, vocab_size: int) -> dict[str, int]:
    """How many rows have the host's token, greedy and noisy ones."""
    rows = 4 if part.is_tiny else 64
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    temperatures = torch.linspace(0.2, 1.5, rows)
    temperatures[::3] = 0.0
    noise = Noise(7, 100)
    keys = torch.tensor([noise.signed_key(row) for row in range(rows)])
    ours = choose(*(tensor.to(part.device) for tensor in (logits, keys, temperatures))).tolist()
    expected = [
        int(
            choose_rows(
                logits[row : row + 1] / (temperature or 1.0), [noise.key(row) if temperature else None]
            )
        )
        for row, temperature in enumerate(temperatures.tolist())
    ]
    return {"rows": rows, "equal": sum(a == b for a, b in zip(ours, expected, strict=True))}


def compile_all(part: Part) -> dict[str, Any]:
    """Spills and the most registers and shared memory of all kernels, compiled in processes side by side."""
    major, minor = (9, 0) if part.is_tiny else torch.cuda.get_device_capability()
    number = 1 if part.is_tiny else min(PROCESSES, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with _compiling(), ProcessPoolExecutor(number, mp_context=context) as pool:
        cases = [] if part.is_tiny else [*CASES.values(), *real_cases(False).values()]
        launched = [pool.submit(_launch, case) for case in cases]
        count = 2 if part.is_tiny else pool.submit(_num_kernels).result()
        done = list(pool.map(_compile, range(count), [10 * major + minor] * count))
        errors = [one.exception() for one in launched]
    return {
        "kernels": len(done),
        "failed_launches": [str(error)[:300] for error in errors if error is not None],
        "spilling": [
            f"{each['kernel']} {each['constants']}"
            for each in done
            if each["local"] or each["instructions"]["STL"]
        ],
        "most_registers": max(each["registers"] for each in done),
        "most_shared_bytes": max(each["shared"] for each in done),
        "products": sorted(
            {name for each in done for name, n in each["instructions"].items() if n} - {"STL", "LDL"}
        ),
    }


@contextmanager
def _compiling() -> Iterator[None]:
    """Processes that are started inside compile, also where this one interprets."""
    held = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if held is not None:
            os.environ["TRITON_INTERPRET"] = held


def _launch(case: Case) -> None:
    """Leaves the kernels of a case in Triton's cache, where the cells and tests/gpu find them."""
    Layer.random(case, 0, device=torch.device("cuda")).by_kernels()


def _num_kernels() -> int:
    from tests.cuda.compiled_kernels import kernels

    return len(list(kernels()))


def _compile(number: int, architecture: int) -> dict[str, Any]:
    from tests.cuda.compiled_kernels import compiled, kernels

    return compiled(architecture, *list(kernels())[number])
