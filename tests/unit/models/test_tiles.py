"""The AMX kernels' own machine code on processors without AMX: each of its instructions traps and is emulated."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.models.cpu import builds

HERE = Path(__file__).parent
AMX = ("-mamx-tile", "-mamx-int8", "-mamx-bf16")
EMULATION = (*AMX, "-Wno-psabi", "-include", str(HERE / "tile_emulator.h"))

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64", reason="emulates x86 processors on Linux"
    ),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


def as_wide_as_the_build(folder: Path) -> Path:
    """The kernels with AVX-512's 16 lanes, which decide where tiles lie, for a processor that may not have them."""
    kernels = folder / "kernels"
    shutil.copytree(builds.SOURCES, kernels)
    source = (kernels / "vectors.h").read_text()
    assert source.count("constexpr int LANES = 4;") == 1
    (kernels / "vectors.h").write_text(
        source.replace("constexpr int LANES = 4;", "constexpr int LANES = 16;")
    )
    return kernels


def compiled(folder: Path, kernels: Path, *flags: str) -> Path:
    command = ["c++", "-O1", "-ffp-contract=off", "-std=c++20", *flags, *EMULATION]
    command += [f"-I{kernels}", str(HERE / "tiles.cpp"), "-o", str(folder / "tiles")]
    subprocess.run(command, check=True)
    return folder / "tiles"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiles")
    return compiled(folder, as_wide_as_the_build(folder))


def run(program: Path, answer: str) -> str:
    done = subprocess.run(
        [program, "7", "28"],
        env=os.environ | {"SLIPSTREAM_TEST_TILES": answer},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_products_of_tiles_have_the_bits_of_those_of_vectors(program: Path) -> None:
    assert int(run(program, "permitted")) > 1000


@pytest.mark.long
def test_they_do_beside_vectors_that_want_signs_on_both_sides(tmp_path: Path) -> None:
    """AVX2 without VNNI, of which there is no build: tiles take the rows' bytes as they were quantised all the same."""
    avx2 = next(build for build in builds.BUILDS if build.name == "avx2")
    if not avx2.needs <= builds.processor_flags():
        pytest.skip("not for this processor")
    assert int(run(compiled(tmp_path, builds.SOURCES, *avx2.flags), "permitted")) > 1000


def test_without_the_systems_permission_no_tile_is_used(program: Path) -> None:
    assert run(program, "refused") == "0"
