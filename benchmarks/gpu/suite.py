"""tests/gpu in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.harness.command import ROOT

PYTEST = """import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(sys.argv[1:]))"""
"""Pytest that can be interrupted, also where this process was started to ignore interrupts, as shells do behind &."""


def run_tests(limit_s: float | None = None) -> dict[str, Any]:
    """How many passed, and the names of those that did not. At the limit pytest is interrupted: what has run counts."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-c", PYTEST, "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
        command += ["-W", "ignore::pytest.PytestConfigWarning"]  # pytest-timeout need not be there
        process = subprocess.Popen([*command, "tests/gpu"], cwd=ROOT, stdout=sys.stderr)
        try:
            process.wait(limit_s)
            was_ended = False
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
            was_ended = True
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {process.returncode} and left no report")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    kinds = [next((child.tag for child in case if child.tag != "system-out"), "passed") for case in cases]
    if was_ended and kinds and kinds[-1] == "passed":  # it was under way
        del cases[-1], kinds[-1]
    return {
        "passed": kinds.count("passed"),
        "skipped": kinds.count("skipped"),
        "failed": [
            case.get("name") for case, kind in zip(cases, kinds, strict=True) if kind in ("failure", "error")
        ],
        "seconds": sum(float(case.get("time", 0)) for case in cases),
        "complete": not was_ended,
    }
