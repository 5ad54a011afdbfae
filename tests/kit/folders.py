"""Folders that live as long as the tests' process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path


def kept_folder() -> Path:
    """A new one, which is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="slipstream-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
