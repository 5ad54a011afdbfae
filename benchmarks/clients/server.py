"""`slipstream serve` on the embedded pair in a process of its own, as a user starts it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.command import ROOT
from benchmarks.harness.processes import SLIPSTREAM, Server

MODEL = "pair"
API_KEY = "a-key-of-the-clients"


@dataclass
class Running:
    """A server that answers."""

    url: str
    log: Path

    def failures(self) -> list[dict[str, Any]]:
        """What the server logged as an error, as JSON objects: its own fault, whatever a client made of it."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return [entry for entry in entries if str(entry.get("level", "")).lower() in ("error", "critical")]


@contextmanager
def serving(*flags: str) -> Iterator[Running]:
    """A server with `flags`; it is stopped at the end. Raises `RuntimeError` with its log where it does not start."""
    environment = {"PYTHONPATH": str(ROOT / "src"), "SLIPSTREAM_API_KEY": API_KEY, "HF_HUB_OFFLINE": "1"}
    command = [*SLIPSTREAM, "serve", "--served-model-name", MODEL, "--metrics-alias", "vllm", *flags]
    with TemporaryDirectory() as folder, Server(command, Path(folder) / "log", environment) as server:
        yield Running(server.url, server.log)
