"""`slipstream serve` on the embedded pair in a process of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "pair"
API_KEY = "a-key-of-the-clients"
START_TIMEOUT_S = 120.0
ROOT = Path(__file__).parents[2]


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

    def counters(self) -> Mapping[str, float]:
        """Name with labels to value, of everything that `/metrics` shows."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        samples = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in samples}


@contextmanager
def serving(*flags: str) -> Iterator[Running]:
    """A server with `flags`; it is stopped at the end. Raises `RuntimeError` with its log where it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "SLIPSTREAM_API_KEY": API_KEY,
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "slipstream.cli.main", "serve", "--port", str(port)]
    command += ["--served-model-name", MODEL, "--metrics-alias", "vllm", *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as writing:
            process = subprocess.Popen(command, env=environment, stdout=writing, stderr=subprocess.STDOUT)
        try:
            server = Running(f"http://127.0.0.1:{port}", log)
            _wait(server, process)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(server: Running, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(f"{server.url}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{server.log.read_text()[-4000:]}")
