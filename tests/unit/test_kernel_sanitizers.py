"""The CPU kernels under the address and undefined-behaviour sanitizers, with each instruction set of this machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.models.cpu import native

DRIVER = Path(__file__).with_name("odd_shapes.cpp")
NUM_CASES = 300
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
INSTRUCTIONS = {
    "x86-64": {"sse2"},
    "x86-64-v3": {"avx2", "fma", "bmi2"},
    "skylake-avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"},
    "native": set(),
}
"""What a processor needs to run code that is compiled for `-march=` this; by the names of /proc/cpuinfo."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


def has(instructions: set[str]) -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return instructions <= set(flags.split())


def build(folder: Path, march: str, kernels: Path = native.SOURCES) -> Path:
    """The driver with sanitizers; skips where the compiler has none."""
    program = folder / "odd_shapes"
    flags = [*("-O1", "-g", f"-march={march}", "-ffp-contract=off", "-std=c++20", "-pthread"), *SANITIZERS]
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


@pytest.mark.parametrize("march", INSTRUCTIONS)
def test_odd_shapes_are_clean_and_equal_in_any_company(march: str, tmp_path: Path) -> None:
    if platform.machine() != "x86_64" and march != "native":
        pytest.skip("names x86 processors")
    if not has(INSTRUCTIONS[march]):
        pytest.skip(f"this processor has no {', '.join(sorted(INSTRUCTIONS[march]))}")
    done = run(build(tmp_path, march), NUM_CASES)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"{NUM_CASES} cases" in done.stdout


@pytest.mark.parametrize(
    ("file", "before", "after", "finding"),
    [
        (
            "linear.h",
            "for (int k = 0; k < linear.in; ++k)\n    out[k]",
            "for (int k = 0; k <= linear.in; ++k)\n    out[k]",
            "AddressSanitizer",
        ),
        (
            "attention.h",
            "int size() const { return length + num_tail; }",
            "int size() const { return length + num_tail - (num_tail > 2); }",
            "a node of a tree",
        ),
        (
            "linear.h",
            "store(out + r * UNIT + c * LANES, total[r][c]);",
            "store(out + r * UNIT + c * LANES, R > 3 ? total[r][c] * 1.0000002f : total[r][c]);",
            "has other bits in company",
        ),
    ],
    ids=["writes-behind-a-row", "misses-an-ancestor", "rounds-by-company"],
)
def test_a_planted_fault_is_found(file: str, before: str, after: str, finding: str, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(native.SOURCES, kernels)
    source = (kernels / file).read_text()
    assert before in source, "the kernels have changed: plant the fault anew"
    (kernels / file).write_text(source.replace(before, after))
    done = run(build(tmp_path, "native", kernels), 50)
    assert done.returncode != 0
    assert finding in done.stdout + done.stderr
