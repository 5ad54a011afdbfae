"""Killed at any instant, a server and a learner lose nothing that they had written, and leave nothing half there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killed_writers.py")


def kill(folder: Path, number: int, seed: int) -> dict[str, int]:
    """How much was written by those that were killed `number` times."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(number), str(seed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].split()
    return {what: int(count) for what, count in zip(words[::2], words[1::2], strict=True)}


def test_a_few_instants(tmp_path: Path) -> None:
    written = kill(tmp_path / "learn", 6, seed=0)
    assert min(written.values()) > 0


@pytest.mark.long
def test_thirty_instants(tmp_path: Path) -> None:
    written = kill(tmp_path / "learn", 30, seed=1)
    assert min(written.values()) > 0
