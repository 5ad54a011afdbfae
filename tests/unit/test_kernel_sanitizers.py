"""The CPU kernels under the address and undefined-behaviour sanitizers, with each instruction set of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from operator import attrgetter
from pathlib import Path

import pytest

from slipstream.models.cpu import builds, native
from slipstream.models.cpu.builds import BUILDS, Build

DRIVER = Path(__file__).with_name("odd_shapes.cpp")
NUM_CASES = 300
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


def compiled(folder: Path, build: Build, kernels: Path = builds.SOURCES) -> Path:
    """The driver with sanitizers; skips where the compiler has none."""
    program = folder / "odd_shapes"
    flags = ["-O1", "-g", *build.flags, "-ffp-contract=off", "-std=c++20", "-pthread", *SANITIZERS]
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
        [str(program), "7", str(num_cases)], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize("build", BUILDS, ids=attrgetter("name"))
def test_odd_shapes_are_clean_and_equal_in_any_company(build: Build, tmp_path: Path) -> None:
    if build.machine not in (builds.machine(), "") or not build.needs <= builds.processor_flags():
        pytest.skip("not for this processor")
    done = run(compiled(tmp_path, build), NUM_CASES)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"{NUM_CASES} cases" in done.stdout


@pytest.mark.parametrize(
    ("file", "before", "after", "finding"),
    [
        (
            "linear.h",
            "for (int k = 0; k < in; ++k) out[k] = widened",
            "for (int k = 0; k <= in; ++k) out[k] = widened",
            "AddressSanitizer",
        ),
        (
            "attention.h",
            "end = run + int(tail_end - tail_begin);",
            "end = run + int(tail_end - tail_begin) - (tail_end - tail_begin > 2);",
            "a node of a tree",
        ),
        (
            "linear.h",
            "store(out + r * UNIT + c * LANES, total[r][c]);",
            "store(out + r * UNIT + c * LANES, R > 3 ? total[r][c] * 1.0000002f : total[r][c]);",
            "has other bits in company",
        ),
        (
            "widen.h",
            "(floats)(both << 16)",
            "(floats)(both << 16 | 1)",
            "has other bits than in float32",
        ),
    ],
    ids=["writes-behind-a-row", "misses-an-ancestor", "rounds-by-company", "widens-wrong"],
)
def test_a_planted_fault_is_found(file: str, before: str, after: str, finding: str, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(builds.SOURCES, kernels)
    source = (kernels / file).read_text()
    assert before in source, "the kernels have changed: plant the fault anew"
    (kernels / file).write_text(source.replace(before, after))
    done = run(compiled(tmp_path, native.build(), kernels), 50)
    assert done.returncode != 0
    assert finding in done.stdout + done.stderr
