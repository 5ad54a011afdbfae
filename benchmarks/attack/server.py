"""The attacked server: `slipstream serve` in a process of its own, its memory watched, its log kept."""

from __future__ import annotations

import http.client
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from slipstream.serve.network.listening import bind

START_S = 180.0
_LOOK_EVERY_S = 0.1


class AttackedServer:
    """A context: inside it the server answers on `port`, until it dies or its memory passes `memory_bytes`."""

    def __init__(
        self, source: Path, arguments: Seq[str], memory_bytes: int, max_descriptors: int | None
    ) -> None:
        """`source` is the folder that holds the package to serve with."""
        with bind("127.0.0.1", 0) as free:
            self.port: int = free.getsockname()[1]
        self._command = [
            *(sys.executable, "-m", "slipstream.cli.main", "serve", "--port", str(self.port)),
            *arguments,
        ]
        self._environment = {**os.environ, "PYTHONPATH": str(source)}
        self._memory_bytes = memory_bytes
        self._max_descriptors = max_descriptors
        self._over = threading.Event()
        self.rss_bytes = 0
        """Resident memory of the server and its children, when last looked at."""
        self.peak_rss_bytes = 0
        self.killed_for_memory = False

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            preexec_fn=self._limit,
        )
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        end_s = time.monotonic() + START_S
        while not self._is_ready():
            if not self.is_alive or time.monotonic() > end_s:
                self.__exit__(None, None, None)
                raise RuntimeError("the server did not start; it said:\n" + self.log_text[-2000:])
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watcher.join()
        family = self._family()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in family:  # none may be left behind
            if process.is_running():
                process.kill()
        self._log.seek(0)
        self._text = self._log.read().decode(errors="replace")
        self._log.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def log_text(self) -> str:
        """Everything that it wrote; once the context is left."""
        return self._text

    def _limit(self) -> None:
        if self._max_descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._max_descriptors, self._max_descriptors))

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _family(self) -> list[psutil.Process]:
        try:
            server = psutil.Process(self._process.pid)
            return [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S) and self.is_alive:
            total = 0
            for process in self._family():
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.rss_bytes = total
            self.peak_rss_bytes = max(self.peak_rss_bytes, total)
            if total > self._memory_bytes:
                self.killed_for_memory = True
                self._process.kill()
