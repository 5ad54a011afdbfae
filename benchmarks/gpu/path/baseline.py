"""Part `baseline`: Transformers' own greedy `generate` over a static cache, its decoding compiled into one graph."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.path.part import Part
from benchmarks.gpu.path.shapes import SHAPES, TINY, llama

PROMPT = 128
SHORT, LONG = 16, 80
"""Tokens of two answers, whose times are subtracted: neither the prompt nor the start of `generate` counts."""
REPEATS = 3


def measure(part: Part) -> None:
    """See the module."""
    for name, shape in {"tiny": TINY}.items() if part.is_tiny else SHAPES.items():
        part.cell(f"{name}, compiled", partial(generate_ms, part, shape, True), needs_s=25)
    for name, shape in {"tiny": TINY}.items() if part.is_tiny else SHAPES.items():
        part.cell(f"{name}, eager", partial(generate_ms, part, shape, False), needs_s=15)


@torch.no_grad()
def generate_ms(part: Part, shape: dict[str, int], compiles: bool) -> dict[str, Any]:
    """Milliseconds a token."""
    from transformers import CompileConfig

    torch._dynamo.reset()
    model = llama(shape, part.device, "sdpa")
    prompt, short, long = (8, 3, 6) if part.is_tiny else (PROMPT, SHORT, LONG)
    ids = (torch.arange(prompt, device=part.device) % shape["vocab_size"])[None]
    options: dict[str, Any] = {"cache_implementation": "static", "do_sample": False, "pad_token_id": 0}
    if compiles:
        options["compile_config"] = CompileConfig(mode="reduce-overhead", fullgraph=True)
    else:
        options["disable_compile"] = True

    def seconds(tokens: int) -> float:
        started_s = time.perf_counter()
        length = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
            max_length=None, **options,
        ).shape[1]  # fmt: skip
        assert length == prompt + tokens
        if part.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started_s

    first_s = seconds(long)
    seconds(short)
    times_ms = [1e3 * (seconds(long) - seconds(short)) / (long - short) for _ in range(REPEATS)]
    return {
        "ms": sorted(times_ms)[REPEATS // 2],
        "all_ms": times_ms,
        "first_s": first_s,
        "compiled_frames": sum(torch._dynamo.utils.counters["frames"].values()),
        "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
    }
