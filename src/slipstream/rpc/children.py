"""How a child process of Python is started: the one place, so that none imports what lies in the working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module in a child. `-P` is Python's safe path: without it the working directory, which
    may be a folder of downloads, comes first in the search for modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(**changes: str) -> dict[str, str]:
    """The environment of a child: this process's own with `changes`. The child finds the package where this one did,
    which may have been in the working directory."""
    root = Path(__file__).resolve().parents[2]
    path = [str(root)] if root.name not in ("site-packages", "dist-packages") else []
    environment = {**os.environ, **changes}
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    path += filter(None, given)  # an empty entry is the working directory
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}
