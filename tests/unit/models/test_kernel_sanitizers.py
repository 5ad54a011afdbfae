"""The CPU kernels under the address and undefined-behaviour sanitizers, once for each length of vectors.

Compiling is what takes time: the best build of this machine is compiled once, with planted faults that can be turned
off.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from operator import attrgetter
from pathlib import Path

import pytest

from slipstream.models.cpu import builds, native
from slipstream.models.cpu.builds import BUILDS, Build
from tests.kit.planted_faults import Fault, plant

DRIVER = Path(__file__).with_name("odd_shapes.cpp")
SEED, NUM_CASES, NUM_CASES_ELSEWHERE = "5", 100, 50
"""Among these cases memory is short in every part of a pass. Other builds than this machine's try half of them: with
sanitizers a case takes seconds there."""
OTHERS = [build for build in BUILDS if build.name in ("avx2", "generic")]
"""Vectors of 8 and 4 numbers, where this machine's best build has others."""
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


def compiled(folder: Path, build: Build, kernels: Path = builds.SOURCES, *more: str) -> Path:
    """The driver with sanitizers; skips where the compiler has none."""
    program = folder / "odd_shapes"
    flags = ["-O1", "-g1", *build.flags, "-ffp-contract=off", "-std=c++20", "-pthread", *SANITIZERS, *more]
    command = ["c++", *flags, f"-I{kernels}", str(DRIVER), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr:  # libasan or libubsan
        pytest.skip("the compiler's sanitizers are not installed")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, num_cases: int) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",
    }  # the teams of threads are never taken down
    return subprocess.run(
        [str(program), SEED, str(num_cases)], capture_output=True, text=True, check=False, env=environment
    )


FAULTS = (
    Fault(
        "writes-behind-a-row",
        "linear.h",
        "for (int k = 0; k < in; ++k) out[k] = widened",
        "for (int k = 0; k < in + faulty; ++k) out[k] = widened",
        "AddressSanitizer",
    ),
    Fault(
        "misses-an-ancestor",
        "attention.h",
        "end = run + int(tail_end - tail_begin);",
        "end = run + int(tail_end - tail_begin) - (faulty && tail_end - tail_begin > 2);",
        "a node of a tree",
    ),
    Fault(
        "rounds-by-batch",
        "linear.h",
        "store(out + r * UNIT + c * LANES, total[r][c]);",
        "store(out + r * UNIT + c * LANES, faulty && R > 3 ? total[r][c] * 1.0000002f : total[r][c]);",
        "has other bits in a batch",
    ),
    Fault(
        "rounds-groups-by-batch",
        "groups.h",
        "* row_at(r).scale, total[r][c]);",
        "* row_at(r).scale * (faulty && R > 3 ? 1.0000002f : 1.0f), total[r][c]);",
        "other bits than where all are",
    ),
    Fault(
        "numbers-tokens-by-unit",
        "decoder.h",
        "own[row].take(logits_of(tile, changed), first, size);",
        "own[row].take(logits_of(tile, changed), faulty ? 0 : first, size);",
        "a best token",
    ),
    Fault(
        "widens-wrong",
        "widen.h",
        "(floats)(both << 16)",
        "(floats)(faulty ? both << 16 | 1 : both << 16)",
        "has other bits than in float32",
    ),
    Fault(
        "shares-too-far",
        "attention.h",
        "return int(std::min(shared_length[a], shared_length[b]) / PARTITION);",
        "return int((std::min(shared_length[a], shared_length[b]) + (faulty ? PARTITION - 1 : 0)) / PARTITION);",
        "what is shared",
    ),
    Fault(
        "walks-from-a-sibling",
        "recurrent.h",
        "from = buffer(w.sources[step]),",
        "from = buffer(w.sources[step] - (faulty && w.sources[step] > 1)),",
        "a step of a walk",
    ),
    Fault(
        "adds-scores-by-batch",
        "vectors.h",
        "return sums[0];",
        "return faulty ? sums[0] * 1.0000002f : sums[0];",
        "other bits",
    ),
    Fault(
        "asks-in-a-thread",
        "attention.h",
        "desk.visible.clear();",
        "if (faulty) std::vector<Visible>().swap(desk.visible); else desk.visible.clear();",
        "bad_alloc",
    ),
)


@pytest.fixture(scope="module")
def faulty_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver over kernels with every fault, of which the variable PLANTED chooses one by its number."""
    folder = tmp_path_factory.mktemp("planted")
    kernels, flags = plant(FAULTS, folder)
    return compiled(folder, native.build(), kernels, *flags)


def check_odd_shapes(program: Path, num_cases: int) -> None:
    """Every case is clean and equal in any batch, and memory was short in every part of a pass."""
    done = run(program, num_cases)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"{num_cases} cases" in done.stdout
    told = re.search(r"memory was short in reserve (\d+), divide (\d+), plan (\d+) times", done.stdout)
    assert told is not None
    assert min(map(int, told.groups())) > 0, "a part of a pass that never lacked memory"


def test_without_a_fault_odd_shapes_are_clean(faulty_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "-1")
    check_odd_shapes(faulty_driver, NUM_CASES)


@pytest.mark.parametrize("build", OTHERS, ids=attrgetter("name"))
def test_odd_shapes_are_clean_with_other_vectors(build: Build, tmp_path: Path) -> None:
    if build == native.build():
        pytest.skip("compiled with planted faults above")
    if build.machine not in (builds.machine(), "") or not build.needs <= builds.processor_flags():
        pytest.skip("not for this processor")
    check_odd_shapes(compiled(tmp_path, build), NUM_CASES_ELSEWHERE)


@pytest.mark.parametrize("fault", FAULTS, ids=attrgetter("name"))
def test_a_planted_fault_is_found(fault: Fault, faulty_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", str(FAULTS.index(fault)))
    done = run(faulty_driver, 50)
    assert done.returncode != 0
    assert fault.finding in done.stdout + done.stderr
