"""Runs files of this folder in processes of their own: Triton reads its variables where a kernel is defined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, without what pytest has set in this process."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *arguments],
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1100,
        check=False,
    )


def interpreted(file: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Pytest over a file, with the kernels interpreted."""
    file = str(HERE / file)
    return run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", file, *arguments, TRITON_INTERPRET="1"
    )
