"""`make wheel`: kernels for the machines that it can compile for, and a wheel without them elsewhere, which it says.
What the other targets install: the demo what the engine needs to run, those for contributors their tools as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = 'echo "$SLIPSTREAM_WHEEL_MACHINE/$HATCH_BUILD_HOOK_ENABLE_CUSTOM: $*"'
COMMAND = "-m hatchling build --target wheel"


def install(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.mark.parametrize(
    ("target", "installed"),
    [
        ("demo", ["-e ."]),
        ("models", ["-e ."]),
        *((target, ["-e .", '-e ".[dev]"']) for target in ("install", "test", "test-long", "check", "docs")),
    ],
)
def test_what_is_installed(target: str, installed: list[str], tmp_path: Path) -> None:
    command = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    installs = [line.split(" -m pip install ")[1] for line in done.stdout.splitlines() if " -m pip " in line]
    assert [line.split("-c constraints.txt ")[1] for line in installs] == installed


@pytest.mark.parametrize(
    ("system", "machine", "cross", "expected"),
    [
        ("Linux", "x86_64", "", ["x86_64/true"]),
        ("Linux", "x86_64", "aarch64", ["x86_64/true", "aarch64/true"]),
        ("Linux", "riscv64", "", ["/false"]),
        ("Darwin", "arm64", "", ["/false"]),
        ("Darwin", "x86_64", "aarch64", ["/false"]),
    ],
)
def test_what_is_built(system: str, machine: str, cross: str, expected: list[str], tmp_path: Path) -> None:
    tools, stamp = tmp_path / "tools", tmp_path / "stamp"
    install(tools, "uname", f"test $1 = -s && echo {system} || echo {machine}")
    install(tools, "python", PYTHON)
    if cross:
        install(tools, f"{cross}-linux-gnu-g++", "")
    stamp.touch()
    for tool in ("sh", "make"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "SLIPSTREAM_WHEEL_MACHINE")
    }
    environment |= {"PATH": str(tools)}
    done = subprocess.run(
        [
            "make",
            "-f",
            str(ROOT / "Makefile"),
            "wheel",
            f"BIN={tools}",
            f"DEV_STAMP={stamp}",
            "--old-file",
            str(stamp),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    *notes, last = done.stdout.splitlines()
    builds = [f"{line}: {COMMAND}" for line in expected]
    if expected == ["/false"]:
        assert notes == [
            "Compiled CPU kernels are put into wheels on Linux, for x86-64 and aarch64; "
            "this one has their sources alone."
        ]
        assert last == builds[0]
    else:
        assert [*notes, last] == builds
