"""Part `bits`: whether a row's bits depend on what else is in its pass, or on how its text came about."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.path.kernels import layer_of, real_cases
from benchmarks.gpu.path.part import Part
from benchmarks.gpu.path.products import KINDS, cublas, weight_of
from benchmarks.gpu.path.shapes import SHAPES, TINY, WAYS, causal_lm, products
from slipstream.core.proposal import Proposal
from slipstream.models.rows import RowGroup, tree_rows
from slipstream.sampling.noise import Noise, gumbel_of_bits, token_counters, uniform_bits
from tests.cuda.attention_cases import Case

BUCKETS = (16, 32, 64)
"""Rows of the passes in which drafted and plain tokens are computed."""
TREES = {
    "chain of 8": tuple(range(-1, 7)),
    "tree of 12": (-1, -1, 0, 0, 1, 2, 2, 5, 7, 3, 9, 10),
    "tree of 20": (-1, -1, -1, *range(17)),
}
SMALL_TREE = {"tree of 4": (-1, -1, 0, 2)}
CONTEXTS = (100, 250, 1000)
"""Behind the second one a draft lies on both sides of a split's end."""


def measure(part: Part) -> None:
    """See the module."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, shape in {"tiny": TINY}.items() if part.is_tiny else SHAPES.items():
        for n, k in products(shape):
            part.cell(f"product {name} {n}x{k}", partial(product_bits, part, n, k, torch.bfloat16))
            for kind in KINDS[-1:] if part.is_tiny else KINDS:
                own = partial(product_bits, part, n, k, torch.bfloat16, kind)
                part.cell(f"own product {name} {n}x{k}, {kind}", own)
    size = (8, 16) if part.is_tiny else (1024, 1024)
    part.cell("product float32", partial(product_bits, part, *size, torch.float32))
    part.cell("own product float32", partial(product_bits, part, *size, torch.float32, "float32"))
    for name, case in real_cases(part.is_tiny).items():
        part.cell(f"attention of {name}", partial(attention_bits, part, case))
    part.cell("noise", partial(noise_bits, part))
    for name, shape in {"tiny": TINY}.items() if part.is_tiny else SHAPES.items():
        part.cell(f"passes of {name}", partial(pass_bits, part, shape), needs_s=8)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; NaN is NaN."""
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def product_bits(part: Part, n: int, k: int, dtype: torch.dtype, kind: str | None = None) -> dict[str, Any]:
    """A linear layer: is a row the same in every place, beside any neighbours, alone, and in every bucket? cuBLAS's,
    or ours with weights of this kind."""
    most = 4 if part.is_tiny else BUCKETS[-1]
    multiply = weight_of(part.device, n, k, kind, dtype) if kind else cublas(part.device, n, k, dtype)
    rows = torch.randn(most, k, device=part.device).to(dtype)
    buckets = [size for size in BUCKETS if size <= most] or [most]
    first: dict[int, Tensor] = {}
    places, neighbours = {}, {}
    for size in buckets:
        base = multiply(rows[:size])
        first[size] = base[0]
        shifts = (1, size // 2, size - 1)
        places[size] = all(
            same(multiply(rows[:size].roll(shift, 0)), base.roll(shift, 0)) for shift in shifts
        )
        padded = torch.zeros_like(rows[:size])
        padded[0] = rows[0]
        neighbours[size] = same(multiply(padded)[0], base[0])
    seen: list[Tensor] = []
    classes = []
    for count in range(1, most + 1):
        row = multiply(rows[:count])[0]
        classes.append(next((i for i, other in enumerate(seen) if same(row, other)), len(seen)))
        if classes[-1] == len(seen):
            seen.append(row)
    return {
        "places": places,
        "neighbours": neighbours,
        "buckets_agree": all(same(first[size], first[buckets[0]]) for size in buckets),
        "alone_agrees": same(multiply(rows[:1])[0], first[buckets[0]]),
        "classes_by_rows": _runs(classes),
    }


def _runs(values: list[int]) -> list[list[int]]:
    """[first row count, last row count, value] of equal neighbours."""
    found: list[list[int]] = []
    for count, value in enumerate(values, 1):
        if found and found[-1][2] == value:
            found[-1][1] = count
        else:
            found.append([count, count, value])
    return found


def attention_bits(part: Part, case: Case) -> dict[str, int]:
    """Rows of prompts, chains and trees, beside each as the only one of its sequence, its path being committed."""
    layer = layer_of(part, case)
    together = layer.by_kernels()
    rows = range(0, layer.batch.num_rows, 4 if part.is_tiny else 2)
    return {"rows": len(rows), "equal": sum(same(layer.alone(row), together[row]) for row in rows)}


def noise_bits(part: Part) -> dict[str, Any]:
    """The numbers of the noise and their logarithms on the device against the host's."""
    keys = torch.tensor([Noise(7, 100).signed_key(row) for row in range(8)])[:, None]
    vocab_size = 300 if part.is_tiny else 128256

    def words(device: torch.device) -> Tensor:
        return uniform_bits(keys.to(device) + token_counters(vocab_size, device))

    here, there = (words(device) for device in (torch.device("cpu"), part.device))
    apart = (gumbel_of_bits(there).cpu() - gumbel_of_bits(here)).abs()
    return {
        "integers_equal": torch.equal(there.cpu(), here),
        "numbers": apart.numel(),
        "that_differ": int((apart > 0).sum()),
        "by_at_most": float(apart.max()),
    }


def pass_bits(part: Part, shape: dict[str, int]) -> dict[str, dict[str, int]]:
    """Logits of drafted rows in one captured pass, beside the same tokens decoded one at a time in captured passes."""
    layers = min(shape["num_hidden_layers"], 4)
    lm = causal_lm(shape | {"num_hidden_layers": layers}, part.device, WAYS["captured"])
    found = {}
    contexts = (20,) if part.is_tiny else CONTEXTS
    num_slots = contexts[-1] + 64
    pool = lm.new_cache(num_slots, prefix_caching=False).pool
    for tensor in pool.tensors:
        tensor.normal_()
    for context in contexts:
        for name, parents in (SMALL_TREE if part.is_tiny else TREES).items():
            tree = Proposal(tuple(7 * node + 5 for node in range(len(parents))), parents)
            groups = [tree_rows(pool.slots, context, [3], tree, 0)]
            together = lm.forward(groups, pool).logits
            found[f"{name} behind {context}"] = _alone(part, lm, pool, context, tree, together)
    return found


def _alone(part: Part, lm: Any, pool: Any, context: int, tree: Proposal, together: Tensor) -> dict[str, int]:
    """How many of a tree's rows have the bits of plain decoding along their paths."""
    leaves = set(range(len(tree))) - set(tree.parents)
    unequal: set[int] = set()
    for leaf in leaves:
        path = [leaf]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        for depth, row in enumerate([-1, *path]):
            token = 3 if row < 0 else tree.token_ids[row]
            logits = lm.forward([RowGroup(pool.slots, context + depth, [token], [0])], pool).logits
            if not same(logits[0], together[row + 1]):
                unequal.add(row)
    rows = len(tree) + 1
    return {"rows": rows, "equal": rows - len(unequal)}
