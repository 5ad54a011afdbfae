"""Other processes: programs that answer once, workers that answer line by line, and servers."""

from __future__ import annotations

import http.client
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import IO, Any, Self

import psutil

from benchmarks.harness.command import ROOT

START_S = 600.0
"""How long a server may take to start: one without a cache compiles the kernels first, which takes minutes."""
SLIPSTREAM = (sys.executable, "-m", "slipstream.cli.main")


def answer_of(
    arguments: Seq[str | Path],
    given: object = None,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> Any:
    """What a program makes of `given`, as JSON on its standard input: the last line that it prints.

    Raises RuntimeError with the program's last lines where it fails.
    """
    done = subprocess.run(
        [*map(str, arguments)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
        env=None if environment is None else dict(environment),
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(
            "\n".join(done.stderr.strip().splitlines()[-3:]) or f"exit status {done.returncode}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it started; empty where it is gone."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(process: psutil.Process) -> float:
    """Processor time that it has used so far, all its threads together."""
    times = process.cpu_times()
    return float(times.user + times.system)


class WorkerRefused(Exception):
    """A worker refused a request, or died of it; the message is the reason."""


class Worker:
    """A process that answers each JSON line with a JSON line. `log` receives what it says besides; a context."""

    def __init__(
        self, command: Seq[str], log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with (log or Path(os.devnull)).open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if log is None else file,
                cwd=ROOT,
                env=None if environment is None else dict(environment),
                text=True,
                bufsize=1,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
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
        if reply.get("event") == "refused":
            raise WorkerRefused(reply["reason"])
        return reply

    def _line(self, timeout_s: float | None) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                for process in family(self.process.pid):
                    process.kill()
                raise WorkerRefused(f"no answer within {timeout_s:.0f} s")
        return self.process.stdout.readline()

    def _death(self) -> str:
        code = self.process.wait(timeout=60)
        said = "" if self.log is None else self.log.read_text(errors="replace")
        lines = [line for line in said.splitlines() if line.strip()]
        return f"the worker ended with {code}: {lines[-1].strip()[:300] if lines else 'it said nothing'}"

    def cpu_s(self) -> float:
        """Processor time that the worker and its children have used so far."""
        return sum(map(cpu_s, family(self.process.pid)))

    def process_ids(self) -> list[int]:
        """The worker's and its children's."""
        return [process.pid for process in family(self.process.pid)]

    def peak_memory_bytes(self) -> int:
        """The sum of its processes' highest resident sizes so far, loading included, files that are mapped too."""
        total = 0
        for process in family(self.process.pid):
            status = Path(f"/proc/{process.pid}/status").read_text()
            [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")] or ["VmHWM: 0 kB"]
            total += int(line.split()[1]) * 1024
        return total

    def close(self) -> None:
        """End it and whatever it started."""
        processes = family(self.process.pid)
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


class Server:
    """A server in a process of its own, on a port of this machine; a context, inside which it takes requests.

    `command` gets `--port` and the number. At the end it is asked to stop, and whatever is left of it is killed.
    """

    ready = "/ready"
    """Answers 200 once requests are taken."""

    def __init__(self, command: Seq[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start it. `environment` is added to ours."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._file: IO[bytes] = log.open("ab")
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            env={**os.environ, **(environment or {})},
            stdout=self._file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def log_text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self) -> Self:
        """Until it takes requests; raises RuntimeError with the end of its log where it does not."""
        end_s = time.monotonic() + START_S
        while not self._is_ready():
            if not self.is_alive or time.monotonic() > end_s:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self.log_text()[-4000:]}")
            time.sleep(0.05)
        return self

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", self.ready)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL, as a machine does that runs out of memory."""
        self.process.kill()
        self.process.wait()
        self._file.close()

    def stop(self, timeout_s: float = 60.0) -> bool:
        """SIGTERM, and wait: whether it ended by itself. Whatever is left is killed."""
        processes = family(self.process.pid)
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        for process in processes:
            if process.is_running():
                process.kill()
        self.process.wait()
        self._file.close()
        return ended

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            self.stop()
