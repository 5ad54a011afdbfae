"""The origin of a result: versions, machine, commit and command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence as Seq
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.profiling.machine import cpu_name

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy")


def provenance(packages: Seq[str] = PACKAGES, num_threads: int | None = None) -> dict[str, Any]:
    """Versions, machine, threads, commit and command of this process.

    `commit` is that of the checkout that Slipstream runs from, with `+changes` for uncommitted changes of the sources;
    None without a checkout.
    """
    import torch

    from slipstream.core.version import __version__
    from slipstream.models.cpu import threads

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": command(sys.argv),
        "python": platform.python_version(),
        "slipstream": __version__,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "platform": platform.system(),
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": num_threads or threads.available(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def commit() -> str | None:
    """The checkout's commit, as in `provenance`; None without a checkout."""
    root = _checkout()
    if root is None:
        return None
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None
    return head.strip() + ("+changes" if _git(root, "status", "--porcelain", "--", "src") else "")


def without_folders(text: str) -> str:
    """`text` with each absolute path reduced to its last part, so that published results name no folders."""
    return re.sub(r"(^|[\s=:,\"'(\[{]|file://)/(?:[^/\s=:,\"']+/)+(?=[^/\s=:,\"'])", r"\1", text)


def command(argv: Seq[str]) -> str:
    """The command line, with paths reduced to what a reader can use."""
    program, root = Path(argv[0]), _checkout()
    argv = [argv[0], *map(without_folders, argv[1:])]
    if program.name == "__main__.py" and root is not None and program.resolve().is_relative_to(root):
        package = program.resolve().parent.relative_to(root)
        if package.parts[0] != "src":
            return shlex.join(["python", "-m", ".".join(package.parts), *argv[1:]])
    if program.name in ("slipstream", "__main__.py"):
        return shlex.join(["slipstream", *argv[1:]])
    inside = root is not None and program.resolve().is_relative_to(root)
    place = program.resolve().relative_to(root) if root is not None and inside else Path(program.name)
    if place.parts[0] == "benchmarks":  # its modules import one another
        return shlex.join(["python", "-m", ".".join(place.with_suffix("").parts), *argv[1:]])
    return shlex.join(["python", str(place), *argv[1:]])


def _checkout() -> Path | None:
    """The checkout's root; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "pyproject.toml").is_file() else None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
