"""Where a result came from: enough to run it again."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    """Versions, machine, threads, commit and command of this run."""
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "src"], cwd=root, capture_output=True, text=True, check=False
    ).stdout
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit + ("+changes" if changed else ""),
        "command": " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(root)), *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")
        },
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
