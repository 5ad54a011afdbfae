"""Run by `test_tree_attention.py` in a process with TRITON_INTERPRET=1: the attention kernels, interpreted."""

from __future__ import annotations

import random
from dataclasses import replace

import interpreter
import pytest
import torch
from attention_cases import CPU, Case, Layer, random_groups

from slipstream.kv.pool import quantise
from slipstream.models.batch import RowGroup
from slipstream.models.cuda import attention_plan

interpreter.mend()

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CASES = {
    "plain": Case(),
    "one key head": Case(kv_heads=1),
    "no groups": Case(num_heads=2, kv_heads=2, key_dim=64, value_dim=64),
    "window": Case(window=11),
    "narrow window": Case(window=1),
    "softcap": Case(softcap=1.5),
    "sinks": Case(has_sinks=True),
    "sinks in a window": Case(has_sinks=True, window=9),
    "int8": Case(cache_dtype=torch.int8),
    "int8 in a window": Case(torch.float16, torch.int8, window=13),
    "bfloat16": Case(torch.bfloat16),
    "bfloat16 beside float32": Case(torch.float32, torch.bfloat16),
    "heads of 80 and 40": Case(key_dim=80, value_dim=40),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_attention(name: str, seed: int) -> None:
    layer = Layer.random(CASES[name], seed)
    ours, expected = layer.by_kernels(), layer.expected()
    assert float((ours.double() - expected).abs().max()) < TOLERANCES[CASES[name].dtype] * float(
        expected.abs().max()
    )


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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["plain", "window", "bfloat16", "int8", "sinks"])
@pytest.mark.usefixtures("cutting")
def test_a_drafted_row_has_the_bits_of_plain_decoding(name: str, seed: int) -> None:
    """Every node of a tree, and every row of a prompt, as the only row of a pass behind its committed path."""
    case = CASES[name]
    tree = Layer.random(case, seed)
    ours = tree.by_kernels()
    rows = random.Random(seed).sample(range(tree.batch.num_rows), 6)
    for row in rows:
        assert torch.equal(alone(tree, row), ours[row]), (row, tree.batch.num_rows)


def alone(tree: Layer, row: int) -> torch.Tensor:
    """The row's attention where the row is a pass of its own, its path being committed."""
    number = next(i for i, end in enumerate(tree.batch.first_rows[1:]) if row < end)
    group, on = tree.batch.groups[number], tree.batch.on(CPU)
    behind = slice(int(on.tail_begin[row]), int(on.tail_begin[row + 1]))
    run = int(on.run_length[row])
    seen = [*range(int(on.run_begin[row]), int(on.run_begin[row]) + run), *on.tail_slots[behind].tolist()]
    single = RowGroup(range(group.slots[0], group.slots[0] + len(seen)), len(seen) - 1, [0], [0])
    lone = Layer.random(
        tree.case, 99, [*random_groups(1, number), single, *random_groups(2, 1)][: number + 1]
    )
    for mine, theirs in zip(lone.pool.tensors, tree.pool.tensors, strict=True):
        place = group.slots[0]
        mine[place : place + len(seen)] = theirs[seen]
    own = lone.batch.first_rows[number]
    lone.query[own], lone.key[own], lone.value[own] = tree.query[row], tree.key[row], tree.value[row]
    lone.sinks = tree.sinks
    return lone.by_kernels()[own]


def test_how_the_work_is_cut_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for many in (0, 10**6):
        monkeypatch.setattr(attention_plan, "MANY_ITEMS", many)
        layer = Layer.random(replace(CASES["plain"], split=16), 8)
        outputs.append((len(layer.reads().items), layer.by_kernels()))
    (few, together), (many, apart) = outputs
    assert few < many
    assert torch.equal(together, apart)
