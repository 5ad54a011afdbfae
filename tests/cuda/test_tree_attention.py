"""The attention of a pass: its plan, its operator on a CPU, and the kernels, interpreted and compiled."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import Case, Layer, random_groups
from triton_process import HERE, interpreted, run

from slipstream.models.batch import ForwardBatch
from slipstream.models.cuda import attention_plan
from slipstream.models.cuda.attention_plan import plan_attention
from slipstream.models.cuda.tree_attention import Scratch, tree_attention

MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA")


@pytest.mark.parametrize("many", [0, 10**6])
@pytest.mark.parametrize("seed", range(20))
def test_a_plan_covers_what_each_row_sees_once(seed: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's partials hold its splits in order, each of them once, and no partial is left out."""
    monkeypatch.setattr(attention_plan, "MANY_ITEMS", many)
    batch, split, tile_rows = ForwardBatch(random_groups(seed, 4)), 16, 3
    plan = plan_attention(batch, tile_rows, split)
    on = batch.on(torch.device("cpu"))
    covered: dict[int, list[tuple[int, int, int, bool]]] = {}
    for first, count, begin, splits, place in plan.items.tolist():
        rows = range(first, first + abs(count))
        assert len(rows) <= tile_rows
        assert len({int(on.run_begin[row]) for row in rows}) == 1, "rows of two sequences"
        for row in rows:
            covered.setdefault(row, []).append((place, begin, begin + splits, count < 0))
    for row in range(batch.num_rows):
        run, tail = int(on.run_length[row]), int(on.tail_begin[row + 1] - on.tail_begin[row])
        parts = sorted(covered[row])
        assert [place for place, *_ in parts] == list(range(plan.partials[row + 1] - plan.partials[row]))
        assert parts[0][1] == 0
        assert all(one[2] == other[1] for one, other in pairwise(parts))
        assert parts[-1][2] * split >= run + tail
        if tail:
            assert all(is_tail == (end * split > run) for _, _, end, is_tail in parts)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(reach=9),
        Case(reach=-9),
        Case(softcap=2.0, has_sinks=True),
        Case(cache_dtype=torch.int8),
        Case(torch.bfloat16),
    ],
    ids=str,
)
def test_the_operator_in_pytorch(case: Case) -> None:
    layer = Layer.random(case, 3)
    reads = layer.reads()
    scratch = Scratch.of(int(reads.partials[-1]), case.num_heads, case.value_dim, layer.query.device)
    ours = tree_attention(
        layer.query, layer.key, layer.value, *layer.entries, list(reads), *scratch,
        case.scaling, case.reach, case.softcap, layer.sinks,
    )  # fmt: skip
    error = float((ours.double() - layer.expected()).abs().max())
    assert error < (1e-2 if case.dtype == torch.bfloat16 else 1e-5)


def test_the_kernels_interpreted() -> None:
    done = interpreted(
        "interpreted_attention.py", "-k", "(compute and -0]) or (bits and apart-plain) or kept or cut or more"
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_the_kernels_interpreted_over_all_cases() -> None:
    done = interpreted("interpreted_attention.py")
    assert done.returncode == 0, done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", MAX_SHARED_BYTES)
def test_every_kernel_compiled_spills_nothing(architecture: int, tmp_path: Path) -> None:
    done = run(str(HERE / "compiled_kernels.py"), str(architecture), TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {kernel["architecture"] for kernel in kernels} == {architecture}
    for kernel in kernels:
        assert kernel["stack"] == kernel["local"] == kernel["instructions"]["STL"] == 0, kernel
        assert kernel["shared"] <= MAX_SHARED_BYTES[kernel["architecture"]], kernel
        is_exact = "fp32" in kernel["types"].get("rows", "")
        if kernel["kernel"] in ("attend_splits", "multiply") and not is_exact:
            assert any(kernel["instructions"][name] for name in PRODUCTS), kernel
    _check_that_rows_do_not_choose_the_instruction([each for each in kernels if each["kernel"] == "multiply"])


def _check_that_rows_do_not_choose_the_instruction(products: list[dict[str, Any]]) -> None:
    """One shape of matrix instructions for few rows and for many, and Hopper's own on Hopper."""
    found: dict[str, set[str]] = {}
    for kernel in products:
        assert not kernel["flushes"], "FP8 is widened through the smallest floats"
        constants = {name: value for name, value in kernel["constants"].items() if name != "TILES"}
        of_weight = str((kernel["architecture"], constants, kernel["types"]))
        found.setdefault(of_weight, set()).update(kernel["products"])
        if kernel["architecture"] == 90 and kernel["products"]:
            assert kernel["products"] == ["HGMMA.64x16x16.F32.BF16"]
    assert len(found) < len(products)
    assert all(len(shapes) <= 1 for shapes in found.values()), found
