"""A wheel with compiled kernels: installed where there is no compiler, it computes with them at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from recipes import demo
from slipstream.models.cpu import builds

ROOT = Path(__file__).parents[3]
CROSS_COMPILER = "aarch64-linux-gnu-g++"
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""The number at byte 18 of a library."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        sys.platform != "linux" or builds.machine() not in ELF_MACHINES,
        reason="wheels with kernels are for Linux on x86-64 and aarch64",
    ),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


def write_quick_compiler(name: str, folder: Path) -> None:
    """A compiler that optimises little: what kernels do is asked here, and not how fast."""
    program = folder / name
    program.write_text(f'#!/bin/bash\nexec {shutil.which(name)} "${{@/#-O3/-O1}}"\n')
    program.chmod(0o755)


def make_wheel(machine: str, folder: Path) -> Path:
    """As `make wheel` does, but elsewhere, and compiled in a third of the time."""
    pytest.importorskip("hatchling")
    programs = folder / "programs"
    programs.mkdir()
    write_quick_compiler(CROSS_COMPILER if machine != builds.machine() else "c++", programs)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true",
        "SLIPSTREAM_WHEEL_MACHINE": machine,
    }
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout + done.stderr  # some need a whole compilation to come
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path, machine: str) -> None:
    assert re.search(rf"-py3-none-manylinux_2_\d+_{machine}\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        expected = [build.file_name for build in builds.BUILDS if build.machine == machine]
        assert sorted(libraries) == sorted(f"slipstream/models/cpu/prebuilt/{name}" for name in expected)
        for name in libraries:
            assert int.from_bytes(archive.read(name)[18:20], "little") == ELF_MACHINES[machine]


def test_a_wheel_for_another_machine(tmp_path: Path) -> None:
    if builds.machine() == "aarch64" or shutil.which(CROSS_COMPILER) is None:
        pytest.skip(f"{CROSS_COMPILER} is not installed")
    check_contents(make_wheel("aarch64", tmp_path), "aarch64")


def test_the_demo_runs_from_a_wheel_without_a_compiler(tmp_path: Path) -> None:
    wheel = make_wheel(builds.machine(), tmp_path)
    check_contents(wheel, builds.machine())
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin/python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)],
        check=True,
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind its own

    cache = tmp_path / "cache"
    cache.mkdir()
    bare = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}
    bare |= {"PATH": str(environment / "bin"), "SLIPSTREAM_CACHE": str(cache)}
    words = demo.EMBEDDED.replace("docs/", f"{ROOT}/docs/").split()

    def slipstream(*words: str) -> str:
        """What the command prints, warnings included."""
        command = [environment / "bin/slipstream", *words]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=bare,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        ).stdout

    printed = slipstream(*words)
    assert "texts identical      yes" in printed
    assert "compil" not in printed
    assert "PyTorch's own operators" not in printed
    assert "own kernels" in slipstream("info")
    where = "import slipstream.models.cpu.native as native; print(native.__file__, native.library()._name)"
    loaded = subprocess.run(
        [python, "-c", where], cwd=tmp_path, env=bare, capture_output=True, text=True, check=True
    )
    assert all(Path(path).is_relative_to(packages) for path in loaded.stdout.split()), loaded.stdout
    assert not list(cache.glob("kernels*"))
