"""What every drive has in common. Standard library only: the interpreter is the client's."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """Where the server is, and what may be used."""

    base_url: str
    """Without `/v1`."""
    model: str
    api_key: str
    tokenizer: str
    """The folder of the target: weights and tokenizer."""
    folder: str
    """Empty, for what the client writes."""


@dataclass
class Report:
    """What was checked, by name; a check that raises is not met, and the others go on."""

    packages: tuple[str, ...]
    """Distributions whose versions are told, the client first."""
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Met unless what is within raises; what it puts into the dictionary is told too."""
        told: dict[str, Any] = {}
        try:
            yield told
            self.checks[name] = {"met": True, **told}
        except Exception as error:
            traceback.print_exc()
            self.checks[name] = {"met": False, **told, "error": f"{type(error).__name__}: {error}"[:2000]}

    def json(self) -> str:
        """One line."""
        versions = {name: importlib.metadata.version(name) for name in self.packages}
        return json.dumps({"versions": versions, "checks": self.checks, "figures": self.figures})


def run(packages: tuple[str, ...], drive: Callable[[Job, Report], None]) -> None:
    """Do what the command line says; the report is the last line of standard output."""
    report = Report(packages)
    with report.check("the script ran to its end"):
        drive(Job(**json.loads(sys.argv[1])), report)
    print(report.json(), flush=True)


def expect(holds: bool, what: str) -> None:
    """An `assert` that no interpreter leaves out."""
    if not holds:
        raise AssertionError(what)
