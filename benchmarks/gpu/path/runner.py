"""Runs the parts one after another, each in a process group of its own that is ended when its time is over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.path.part import INCOMPLETE, settings_of
from benchmarks.harness.command import ROOT
from benchmarks.harness.kept import say, write_result
from slipstream.profiling.provenance import commit, provenance

PARTS = {"device": 10, "kernels": 40, "bits": 50, "steps": 110, "baseline": 90, "engine": 110, "tests": 40}
"""The parts in their order, and the seconds that each may take at least, while there are so many left."""
INTERPRETED = ("device", "kernels", "bits")
"""Parts that launch kernels by themselves: on a CPU Triton's interpreter runs them."""
LEAST_S = 5.0
"""A part is not begun with less."""
LAST_S = 3.0
"""How long before its end a part is told that its time is over: it may still write what it has."""
SUMMARY = "run.json"
DONE = ("done", "kept")

Command = Callable[[str, float], Seq[str]]
"""The command line of a part that must have ended at a time, in seconds since 1970."""


@dataclass(frozen=True)
class Plan:
    """What runs, for how long, and where."""

    limits_s: Mapping[str, float]
    """By part, in order."""
    budget_s: float
    folder: Path
    device: str = "cuda"

    def limit_s(self, name: str, left_s: float) -> float:
        """How long the part `name` may take with so much left: what those before it did not need is its own too."""
        names = list(self.limits_s)
        later_s = sum(self.limits_s[other] for other in names[names.index(name) + 1 :])
        return min(max(self.limits_s[name], left_s - later_s), left_s)

    def finished(self, name: str) -> bool:
        """Whether a call before has measured all of a part, on this device with this code."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            return False
        found = json.loads(file.read_text())
        mine = (settings_of(self.device), commit())
        return (found.get("settings"), found.get("provenance", {}).get("commit")) == mine

    def command(self, name: str, until_s: float) -> Seq[str]:
        """See `Command`."""
        where = ["--output", str(self.folder), "--until", f"{until_s:.1f}", "--device", self.device]
        return [sys.executable, "-m", "benchmarks.gpu.path.part", name, *where]

    def environment(self, name: str) -> dict[str, str]:
        """That of a part: it needs nothing but the checkout."""
        found = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        found["PYTHONPATH"] = os.pathsep.join(paths)
        found.pop("TRITON_INTERPRET", None)
        return found | ({"TRITON_INTERPRET": "1"} if self.device == "cpu" and name in INTERPRETED else {})


def run_parts(plan: Plan, command: Command | None = None) -> dict[str, dict[str, Any]]:
    """How each part ended, which is written to the folder after each: `done`, `kept` of a call before, `incomplete` or
    `failed`, `out of time` or, where it was not begun, `no time`."""
    end_s = time.monotonic() + plan.budget_s
    outcomes: dict[str, dict[str, Any]] = {}
    origin = provenance()
    for name in plan.limits_s:
        left_s = end_s - time.monotonic()
        limit_s = plan.limit_s(name, left_s)
        started_s = time.monotonic()
        if plan.finished(name):
            outcome = "kept"
        elif limit_s < LEAST_S:
            outcome = "no time"
        else:
            (plan.folder / f"{name}.json").unlink(missing_ok=True)  # of other code, or of another device
            say(f"== {name}: up to {limit_s:.0f} of {left_s:.0f} s")
            asked = (command or plan.command)(name, time.time() + limit_s - LAST_S)
            outcome = run_part(asked, limit_s, plan.environment(name))
        seconds = time.monotonic() - started_s
        say(f"== {name}: {outcome}, {seconds:.0f} s")
        outcomes[name] = {"outcome": outcome, "seconds": seconds}
        summary = {"provenance": origin, "budget_s": plan.budget_s, "parts": outcomes}
        write_result(plan.folder / SUMMARY, summary)
    return outcomes


def run_part(command: Seq[str], limit_s: float, environment: Mapping[str, str]) -> str:
    """How the part ended. Whatever it started is ended with it, also where this process is stopped."""
    process = subprocess.Popen(command, cwd=ROOT, env=dict(environment), start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {0: "done", INCOMPLETE: "incomplete"}.get(code, f"failed with status {code}")
