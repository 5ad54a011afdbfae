"""Recurrences over our states: a row has the same bits however a text is cut into passes, and Transformers' numbers."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.errors import UnsupportedModelError
from slipstream.kv.state import SPARE_ROWS, StatePool, StateRoom, state_bytes
from slipstream.models import load_model
from slipstream.models.mixers.base import CellPass
from slipstream.models.mixers.native import NativeWalk
from slipstream.models.mixers.registry import recurrences
from slipstream.models.rows import RowGroup
from tests.kit.marks import needs_kernels
from tests.parity.tiny_models import RECURRENT, save_tiny

NUM_ROWS, HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 23, 24, 12, 7, 10
"""Widths that fill no vector."""


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + sum(size)))


def delta(log_decay: Tensor) -> dict[str, Any]:
    return {
        "query": numbers(1, NUM_ROWS, KEY_HEADS, KEY_DIM),
        "key": numbers(1, NUM_ROWS, KEY_HEADS, KEY_DIM, seed=1),
        "value": numbers(1, NUM_ROWS, HEADS, VALUE_DIM),
        "g": log_decay,
        "beta": numbers(1, NUM_ROWS, HEADS).sigmoid(),
        "use_qk_l2norm_in_kernel": True,
        "initial_state": None,
        "output_final_state": False,
    }


def kimi() -> dict[str, Any]:
    given = delta(-numbers(1, NUM_ROWS, HEADS, KEY_DIM).abs())
    return {**given, **{name: given[name].repeat_interleave(2, dim=2) for name in ("query", "key")}}


def mamba2() -> dict[str, Any]:
    return {
        "hidden_states": numbers(1, NUM_ROWS, HEADS, VALUE_DIM),
        "dt": numbers(1, NUM_ROWS, HEADS),
        "A": -numbers(HEADS).exp(),
        "B": numbers(1, NUM_ROWS, 3, KEY_DIM),
        "C": numbers(1, NUM_ROWS, 3, KEY_DIM, seed=1),
        "chunk_size": 8,
        "D": numbers(HEADS, seed=1),
        "dt_bias": numbers(HEADS, seed=2),
        "dt_softplus": True,
    }


def mamba() -> dict[str, Any]:
    channels = HEADS + 3
    return {
        "hidden_states": numbers(1, channels, NUM_ROWS),
        "dt": numbers(1, channels, NUM_ROWS, seed=1),
        "A": -numbers(channels, KEY_DIM).exp(),
        "B": numbers(1, KEY_DIM, NUM_ROWS),
        "C": numbers(1, KEY_DIM, NUM_ROWS, seed=1),
        "D": numbers(channels),
        "z": numbers(1, channels, NUM_ROWS, seed=2),
        "delta_bias": numbers(channels, seed=3),
        "delta_softplus": True,
    }


def convolution() -> dict[str, Any]:
    return {
        "hidden_states": numbers(1, HEADS + 3, NUM_ROWS),
        "weight": numbers(HEADS + 3, 4),
        "bias": numbers(HEADS + 3),
        "activation": "silu",
    }


CASES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "torch_chunk_gated_delta_rule": ("qwen3_5", lambda: delta(-numbers(1, NUM_ROWS, HEADS).abs())),
    "chunk_kimi_delta_attention": ("kimi_linear", kimi),
    "mamba2_chunk_scan": ("bamba", mamba2),
    "mamba_selective_scan": ("mamba", mamba),
    "causal_conv1d_fn": ("lfm2", convolution),
}
"""Function to the Transformers model that has it, and arguments for one text."""


def row_dim(name: str, tensor: Tensor) -> int | None:
    """The dimension of an argument or result that counts rows."""
    sizes = [dim for dim, size in enumerate(tensor.shape) if size == NUM_ROWS]
    return sizes[0] if tensor.ndim > 2 and sizes else None


def cut(given: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    return {
        name: value.narrow(dim, begin, end - begin)
        if isinstance(value, Tensor) and (dim := row_dim(name, value)) is not None
        else value
        for name, value in given.items()
    }


def computed(name: str, given: dict[str, Any], cuts: Sequence[int], is_native: bool) -> tuple[Tensor, Tensor]:
    """The rows' results by passes over these parts, whose drafts are dropped, and the state behind them."""
    recurrence = recurrences()[name]
    pool = StatePool([recurrence.shape(**given)], StateRoom(1, 0, 8), torch.device("cpu"))
    pool.fill(float("nan"))
    results: list[Tensor] = []
    for begin, end in zip((0, *cuts), (*cuts, NUM_ROWS), strict=True):
        beyond = min(end + 3, NUM_ROWS)
        group = RowGroup(range(99), begin, [0] * (beyond - begin), [], num_certain=end, owner=0)
        states = pool.begin([group])
        cell = CellPass(states, 0, NativeWalk(states, 1) if is_native else None)
        found = recurrence.compute(cell, **cut(given, begin, beyond))
        states.finish()
        found = found[0] if isinstance(found, tuple) else found
        dim = 2 if name in ("mamba_selective_scan", "causal_conv1d_fn") else 1
        results.append(found.narrow(dim, 0, end - begin).movedim(dim, 0))
    return torch.cat(results), torch.cat([each[0].flatten() for each in pool.states(0)])


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_same_bits_in_any_passes(name: str, is_native: bool) -> None:
    given = CASES[name][1]()
    wanted, state = computed(name, given, [NUM_ROWS - 1], is_native)
    generator = random.Random(4)
    for cuts in (
        [],
        list(range(1, NUM_ROWS)),
        *(sorted(generator.sample(range(1, 23), 5)) for _ in range(4)),
    ):
        found, then = computed(name, given, cuts, is_native)
        assert torch.equal(found, wanted), cuts
        if cuts and cuts[-1] == NUM_ROWS - 1:
            assert torch.equal(then, state), cuts


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_what_transformers_computes(name: str, is_native: bool) -> None:
    family, make = CASES[name]
    stock = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    expected = stock(**make())
    expected = expected[0] if isinstance(expected, tuple) else expected
    dim = 2 if name in ("mamba_selective_scan", "causal_conv1d_fn") else 1
    found, _ = computed(name, make(), [5, 6, 17], is_native)
    assert float((found - expected.movedim(dim, 0)).abs().max()) < 1e-4


def test_a_tree_of_twelve_nodes_takes_a_fifth_of_a_state_for_each_node() -> None:
    """At the widths of Qwen 3.5's layers, where an engine that saves the state behind each token has thirteen."""

    def sized(*size: int) -> Tensor:
        return torch.empty(size, device="meta")

    keys, values = sized(1, 2, 16, 128), sized(1, 2, 32, 128)
    shapes = [
        recurrences()["causal_conv1d_fn"].shape(hidden_states=sized(1, 8192, 2), weight=sized(8192, 4)),
        recurrences()["torch_chunk_gated_delta_rule"].shape(
            query=keys, key=keys, value=values, g=sized(1, 2, 32), beta=sized(1, 2, 32)
        ),
    ]
    assert state_bytes(shapes) == 4 * (32 * 128 * 128 + 3 * 8192)
    held = StateRoom(1, 0, 12 + SPARE_ROWS).num_bytes(shapes)
    assert held <= 13 * state_bytes(shapes) / 5


def test_a_layer_that_calls_a_recurrence_less_or_more_often_than_it_was_tried_out_is_refused(
    tmp_path: Path,
) -> None:
    lm = load_model(str(save_tiny(RECURRENT["zamba"](), tmp_path)))
    mixers = lm.executor.mixers
    assert {len(numbers) for numbers in mixers.numbers.values()} == {1, 2}  # a scan for each head
    cell, numbers = next(each for each in mixers.numbers.items() if len(each[1]) == 2)
    for calls, known in ((1, numbers[:1]), (3, [*numbers, numbers[1]])):
        mixers.numbers[cell] = known
        cache = lm.new_cache(64)
        cache.accounting.open(3, [0] * 8)
        group = RowGroup(cache.accounting.slots(3), 0, [*range(3, 8)], [4], num_certain=5, owner=3)
        with pytest.raises(UnsupportedModelError, match=rf"called mamba_selective_scan {calls} times when"):
            lm.forward([group], cache.pool)
