"""The driver's side of a worker process, which handles one request at a time."""

from __future__ import annotations

import json
import selectors
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil


class WorkerRefused(Exception):
    """A worker refused a request, or died of it; the message is the reason."""


class Worker:
    """One process of one peer. `log` receives what it prints."""

    def __init__(self, command: list[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=folder,
                env=dict(environment),
                text=True,
                bufsize=1,
            )

    def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """The reply to `request`; raises `WorkerRefused` when it is a refusal, late, or does not come at all."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerRefused(self._death()) from None
        line = self._line(timeout_s)
        if not line:
            raise WorkerRefused(self._death())
        reply: dict[str, Any] = json.loads(line)
        if reply["event"] == "refused":
            raise WorkerRefused(reply["reason"])
        return reply

    def _line(self, timeout_s: float) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self.kill()
                raise WorkerRefused(f"no answer within {timeout_s:.0f} s")
        return self.process.stdout.readline()

    def _death(self) -> str:
        code = self.process.wait(timeout=60)
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"the worker ended with {code}: {lines[-1].strip()[:300] if lines else 'it said nothing'}"

    def cpu_s(self) -> float:
        """Processor time that the worker and its children have used so far."""
        return sum(
            times.user + times.system for times in (process.cpu_times() for process in self._processes())
        )

    def process_ids(self) -> list[int]:
        """The worker's and its children's."""
        return [process.pid for process in self._processes()]

    def resident_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._processes())

    def peak_memory_bytes(self) -> int:
        """The sum of its processes' highest resident sizes so far, loading included, files that are mapped too."""
        total = 0
        for process in self._processes():
            status = Path(f"/proc/{process.pid}/status").read_text()
            [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")] or ["VmHWM: 0 kB"]
            total += int(line.split()[1]) * 1024
        return total

    def _processes(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """End it and whatever it started."""
        processes = self._processes()
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            try:
                self.process.stdin.close()
                self.process.wait(timeout=20)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                pass
        for process in processes:
            if process.is_running():
                process.kill()
        psutil.wait_procs(processes, timeout=20)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def kill(self) -> None:
        for process in self._processes():
            process.kill()
