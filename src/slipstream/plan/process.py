"""What the process itself takes: Python, PyTorch, the libraries, the kernels, the threads.

That is no property of a model, and no formula gives it. It is measured once on a machine, in a process of its own that
runs a small model of a known size, and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
import subprocess
from dataclasses import asdict, dataclass

from slipstream.config import cache_folder
from slipstream.core.version import __version__
from slipstream.rpc.children import child_environment, module_command

log = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
_PROBE = "slipstream.engine.process_probe"
"""The program that is measured."""
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes that are there whatever model runs."""

    loading_bytes: int
    """While weights are read: Python, what is imported, and what loading a model sets up."""
    running_bytes: int
    """While requests run: that, the tokenizer, threads, and what libraries set up at their first use."""
    measured: bool = True
    """False for `USUAL`, where it could not be measured."""


USUAL = ProcessMemory(loading_bytes=430 * 2**20, running_bytes=480 * 2**20, measured=False)
"""Taken where the process cannot be measured."""


def process_memory() -> ProcessMemory:
    """The measurement of this machine and these versions; takes some seconds the first time."""
    file = cache_folder() / f"process-{_fingerprint()}.json"
    try:
        return ProcessMemory(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    try:
        found = _measure()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("what a process takes cannot be measured here (%s); a usual figure is used", error)
        return USUAL
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(found)) + "\n")
    except OSError as error:
        log.warning("the process's own memory cannot be kept in %s: %s", file.parent, error.strerror)
    return found


def is_kept() -> bool:
    """Whether `process_memory` answers at once."""
    return (cache_folder() / f"process-{_fingerprint()}.json").is_file()


def _measure() -> ProcessMemory:
    done = subprocess.run(
        module_command(_PROBE),
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ValueError(lines[-1] if lines else f"exit status {done.returncode}")
    return ProcessMemory(**json.loads(done.stdout.strip().splitlines()[-1]))


def _fingerprint() -> str:
    """Changes with what is imported and what runs it."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    parts = [__version__, platform.python_version(), platform.machine(), *versions]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
