"""Every build of the CPU kernels computes the same bits: on this processor, and NEON's under qemu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from test_tiles import EMULATION, as_wide_as_the_build

from slipstream.config import cache_folder
from slipstream.models.cpu import builds
from slipstream.models.cpu.builds import BUILDS, Build

DRIVER = Path(__file__).with_name("odd_shapes.cpp")
SEED, NUM_CASES = "7", "100"
GENERIC = BUILDS[-1]
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


def emulated(build: Build) -> bool:
    return build.machine == "aarch64" != builds.machine()


def skip_unless_runnable(build: Build) -> None:
    if emulated(build):
        for program in (CROSS_COMPILER, EMULATOR):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")
    elif build.machine not in (builds.machine(), "") or not build.needs <= builds.processor_flags():
        pytest.skip("not for this processor")


def digest(
    build: Build, folder: Path, kernels: Path = builds.SOURCES, flags: tuple[str, ...] = builds.FLAGS
) -> str:
    """Of all results of the driver, compiled as the kernels are: products, embeddings, hidden states, logits."""
    program = folder / f"odd_shapes_{build.name}"
    flags = tuple(flag for flag in flags if flag not in ("-shared", "-fPIC"))
    compiler = [CROSS_COMPILER, "-static"] if emulated(build) else ["c++"]
    command = [*compiler, *flags, *build.flags, f"-I{kernels}", str(DRIVER), "-o", str(program)]
    subprocess.run(command, check=True)
    run = [*([EMULATOR] if emulated(build) else []), str(program), SEED, NUM_CASES]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    return printed.rpartition("digest ")[2].strip()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """By the build that has the shortest vectors and no instructions of its own."""
    return digest(GENERIC, tmp_path_factory.mktemp("generic"))


@pytest.mark.parametrize("build", BUILDS[:-1], ids=attrgetter("name"))
def test_odd_shapes_have_the_same_bits(build: Build, expected: str, tmp_path: Path) -> None:
    skip_unless_runnable(build)
    assert digest(build, tmp_path) == expected


X86 = pytest.mark.skipif(
    sys.platform != "linux" or builds.machine() != "x86_64", reason="for x86 processors on Linux"
)


@X86
def test_emulated_tiles_have_the_same_bits(expected: str, tmp_path: Path) -> None:
    kernels = as_wide_as_the_build(tmp_path)
    assert digest(GENERIC, tmp_path, kernels, (*builds.FLAGS, *EMULATION)) == expected


@X86
def test_where_the_system_refuses_tiles_the_bits_are_the_same(expected: str, tmp_path: Path) -> None:
    """The system itself: it refuses wherever the processor has no AMX."""
    avx2 = next(build for build in BUILDS if build.name == "avx2")
    skip_unless_runnable(avx2)
    if "amx_tile" in builds.processor_flags():
        pytest.skip("this processor has AMX")
    assert digest(avx2, tmp_path, flags=(*builds.FLAGS, "-mamx-tile", "-mamx-int8")) == expected


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("vectors.h", "return parts[0] + parts[1];", "return plus_partner<1>(parts[0], parts[1], Lanes());"),
        (
            "sines.h",
            "const int64_t quarters",
            "if (LANES == 8) return {std::sin(angle), std::cos(angle)};\n  const int64_t quarters",
        ),
        ("decoder.h", "1.0f / std::sqrt(", "(LANES == 8 ? 0.99999994f : 1.0f) / std::sqrt("),
    ],
    ids=["another-order", "sines-of-the-library", "another-root"],
)
def test_another_arithmetic_in_one_build_is_found(
    file: str, before: str, after: str, expected: str, tmp_path: Path
) -> None:
    avx2 = next(build for build in BUILDS if build.name == "avx2")
    skip_unless_runnable(avx2)
    kernels = tmp_path / "kernels"
    shutil.copytree(builds.SOURCES, kernels)
    source = (kernels / file).read_text()
    assert before in source, "the kernels have changed: plant the fault anew"
    (kernels / file).write_text(source.replace(before, after))
    assert digest(avx2, tmp_path, kernels) != expected


def test_contracted_products_would_be_other_bits(expected: str, tmp_path: Path) -> None:
    """What `-ffp-contract=off` is for."""
    avx2 = next(build for build in BUILDS if build.name == "avx2")
    skip_unless_runnable(avx2)
    flags = tuple(flag.replace("-ffp-contract=off", "-ffp-contract=fast") for flag in builds.FLAGS)
    assert digest(avx2, tmp_path, flags=flags) != expected


def test_sines_are_right_to_the_last_place(tmp_path: Path) -> None:
    """Within one unit in the last place of a float."""
    program = tmp_path / "sines"
    source = DRIVER.with_name("sines.cpp")
    flags = ["-O2", "-ffp-contract=off", "-std=c++20", f"-I{builds.SOURCES}"]
    subprocess.run(["c++", *flags, str(source), "-o", str(program)], check=True)
    error, rest = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split(
        maxsplit=1
    )
    assert float(error) <= 0.51
    assert rest.strip() == "and NaN where they must be"


LOGITS = """
import hashlib, sys
import torch
from slipstream.assets import EMBEDDED_TARGET
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, load_model
from slipstream.models.cpu.native import build
torch.set_num_threads(1)
text = [(17 * i * i + 5 * i + 3) % 96 for i in range(150)]
for quantization in (None, "int8"):
    lm = load_model(EMBEDDED_TARGET, quantization=quantization, cpu_kernels="native")
    pool = KVPool(lm.shapes, 200, lm.dtype, lm.device)
    digest = hashlib.sha256()
    for begin, end in ((0, 149), (149, 150)):
        rows = RowGroup(range(200), begin, text[begin:end], range(end - begin))
        digest.update(lm.forward([rows], pool).logits.numpy().tobytes())
    print(lm.quantization, digest.hexdigest())
print(build().name, file=sys.stderr)
"""


def test_a_models_logits_have_the_same_bits() -> None:
    """A prompt, then one row, float32 and int8, with each build that this processor runs."""
    printed = {}
    for build in builds.runnable():
        environment = os.environ | {"SLIPSTREAM_CPU_ISA": build.name, "SLIPSTREAM_CACHE": str(cache_folder())}
        done = subprocess.run(
            [sys.executable, "-c", LOGITS], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stderr.splitlines()[-1] == build.name
        printed[build.name] = done.stdout
    assert len(set(printed.values())) == 1, printed
