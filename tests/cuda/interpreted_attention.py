"""Run by `test_tree_attention.py` in a process with TRITON_INTERPRET=1: the attention kernels, interpreted."""

from __future__ import annotations

import random
from dataclasses import replace

import interpreter
import pytest
import torch
from attention_cases import CASES, CPU, TOLERANCES, Case, Layer

from slipstream.kv.pool import quantise
from slipstream.models.cuda import attention_plan
from slipstream.models.rows import RowGroup

interpreter.mend()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_attention(name: str, seed: int) -> None:
    layer = Layer.random(CASES[name], seed)
    assert layer.error() < TOLERANCES[CASES[name].dtype]


def test_entries_are_kept_as_the_cache_keeps_them() -> None:
    layer = Layer.random(Case(cache_dtype=torch.int8), 5)
    layer.key[0, 0, 3], layer.key[1], layer.value[2] = float("nan"), 0.0, 1e-31
    layer.by_kernels()
    slots = layer.batch.on(CPU).slots
    for new, held, scales in ((layer.key, *layer.entries[::2]), (layer.value, *layer.entries[1::2])):
        codes, expected = quantise(new.transpose(0, 1))
        assert scales is not None
        assert torch.equal(held[:, slots], codes)
        assert torch.equal(scales[:, slots].nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.fixture(params=["splits apart", "splits together"])
def cutting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a tile's splits are items of their own."""
    monkeypatch.setattr(attention_plan, "MANY_ITEMS", 10**6 if request.param == "splits apart" else 0)


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("name", ["plain", "window", "chunk", "bfloat16", "int8", "sinks"])
@pytest.mark.usefixtures("cutting")
def test_a_drafted_row_has_the_bits_of_plain_decoding(name: str, seed: int) -> None:
    """Every node of a tree, and every row of a prompt, as the only row of a pass behind its committed path."""
    case = CASES[name]
    tree = Layer.random(case, seed)
    ours = tree.by_kernels()
    rows = random.Random(seed).sample(range(tree.batch.num_rows), 4)
    for row in rows:
        assert torch.equal(tree.alone(row), ours[row]), (row, tree.batch.num_rows)


@pytest.mark.parametrize("by", [1, 20])
@pytest.mark.usefixtures("cutting")
def test_a_plan_for_more_than_a_row_sees_changes_no_bit(by: int) -> None:
    """The host plans for the longest text, where the device knows that it is shorter."""
    slots, case = range(64), replace(CASES["plain"], split=16)
    exact = Layer.random(case, 4, [RowGroup(slots, 36 - by, [0] * 3, [0])])
    longest = Layer.random(case, 4, [RowGroup(slots, 36, [0] * 3, [0], shift=torch.tensor([-by]))])
    longest = replace(longest, query=exact.query, key=exact.key, value=exact.value)
    for mine, theirs in zip(longest.pool.tensors, exact.pool.tensors, strict=True):
        mine.copy_(theirs)
    assert len(longest.reads().items) >= len(exact.reads().items)
    assert torch.equal(longest.by_kernels(), exact.by_kernels())


def test_how_the_work_is_cut_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for many in (0, 10**6):
        monkeypatch.setattr(attention_plan, "MANY_ITEMS", many)
        layer = Layer.random(replace(CASES["plain"], split=16), 8)
        outputs.append((len(layer.reads().items), layer.by_kernels()))
    (few, together), (many, apart) = outputs
    assert few < many
    assert torch.equal(together, apart)
