"""Which clients there are, who runs them, and what came out."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.clients.drives.wire import Job
from benchmarks.clients.server import API_KEY, MODEL, Running
from slipstream.assets import EMBEDDED_TARGET
from slipstream.profiling.provenance import without_folders

DRIVES = Path(__file__).parent / "drives"
TIMEOUT_S = 900.0


def clients() -> list[str]:
    """The names of all that can be driven."""
    return sorted(path.stem.removeprefix("drive_") for path in DRIVES.glob("drive_*.py"))


def variable(client: str) -> str:
    """The environment variable that names the client's interpreter."""
    return f"SLIPSTREAM_CLIENT_{client.upper()}"


def interpreters(given: Mapping[str, str]) -> dict[str, str]:
    """Client to interpreter, of those that have one: as `given`, else as the environment says."""
    named = {name: given.get(name) or os.environ.get(variable(name)) for name in clients()}
    return {name: python for name, python in named.items() if python}


def drive(client: str, python: str, server: Running, script: Path | None = None) -> dict[str, Any]:
    """Run one client and return its report, with `met`: all of its checks were, and the server logged no error."""
    script = script or DRIVES / f"drive_{client}.py"
    known = len(server.failures())
    with tempfile.TemporaryDirectory() as folder:
        job = Job(server.url, MODEL, API_KEY, str(EMBEDDED_TARGET), folder)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": folder, "PYTHONNOUSERSITE": "1"}
        try:
            done = subprocess.run(
                [python, str(script), json.dumps(asdict(job))],
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"met": False, "error": without_folders(str(error))[:2000]}
    lines = done.stdout.strip().splitlines()
    try:
        report: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"met": False, "error": without_folders((done.stderr or done.stdout)[-2000:])}
    for check in report["checks"].values():
        if "error" in check:
            check["error"] = without_folders(check["error"])
    failures = server.failures()[known:]
    report["server_errors"] = len(failures)
    report["met"] = (
        not failures and bool(report["checks"]) and all(c["met"] for c in report["checks"].values())
    )
    if not report["met"]:
        report["stderr"] = without_folders(done.stderr[-2000:])
    return report
