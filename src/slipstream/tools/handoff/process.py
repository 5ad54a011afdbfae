"""A `vllm serve` of ours: started, waited for, its last lines kept, and stopped with all that it started."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import IO

import httpx2

from slipstream.errors import ConfigError, RemoteError
from slipstream.rpc.children import ProgramChild

NUM_LAST_LINES = 200
"""Lines of vLLM's output that are kept."""
GRACE_S = 20.0
"""For vLLM to end after SIGTERM; then it is killed."""
_LOOK_EVERY_S = 0.2
_VERSION_TIMEOUT_S = 180.0


def find_vllm(given: str | None) -> str:
    """The path of vLLM's command; raises `ConfigError` where there is none."""
    found = shutil.which(given or "vllm")
    if found is not None:
        return found
    if given is None:
        raise ConfigError(
            "there is no vllm on the PATH; install it (pip install vllm, in an environment of its own) and name its "
            "command: --vllm ENVIRONMENT/bin/vllm. Or attach to a running server: --attach URL"
        )
    what = "is a folder" if Path(given).is_dir() else "is no command that can be run"
    raise ConfigError(f"--vllm {given!r} {what}; name the file, as in ENVIRONMENT/bin/vllm")


def version_of(command: str) -> str:
    """What `vllm --version` prints last, as in "0.32.0"; raises `ConfigError` where it fails or prints none."""
    try:
        done = subprocess.run(
            [command, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command} --version does not run: {error}") from None
    words = done.stdout.split()
    if done.returncode or not words:
        last = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise ConfigError(f"{command} --version fails with exit code {done.returncode}: {last}")
    if not words[-1][0].isdigit():
        raise ConfigError(
            f"{command} is not vLLM: its --version ends with {words[-1]!r}, where a version like 0.32.0 should be"
        )
    return words[-1]


class VllmProcess:
    """One server process, in a session of its own, so that Ctrl-C reaches only this program, which then stops it."""

    def __init__(
        self,
        command: Seq[str],
        url: str,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """`url` is where it will be, without `/v1`. All that it prints is appended to `log`."""
        self.command = list(command)
        self.url = url
        self._environment = {**os.environ, **(environment or {})}
        self._lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._log = log
        self._child: ProgramChild | None = None
        self._abandoned = threading.Event()
        self._is_gone = False

    @property
    def pid(self) -> int | None:
        """None before the start."""
        return None if self._child is None else self._child.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and before the start."""
        return None if self._child is None else self._child.process.poll()

    @property
    def last_lines(self) -> list[str]:
        """The last lines that it printed."""
        return list(self._lines)

    def start(self) -> None:
        """Start it; raises `ConfigError` where that is impossible. Call it from the main thread: the kernel ends the
        process when the thread that started it ends."""
        self._lines.clear()
        self._abandoned.clear()
        self._is_gone = False
        try:
            log = None if self._log is None else self._log.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {str(self._log)!r}: {error.strerror}") from None
        try:
            self._child = ProgramChild.start(self.command, self._environment, partial(self._read, log=log))
        except OSError as error:
            if log is not None:
                log.close()
            raise ConfigError(f"cannot run {self.command[0]}: {error.strerror or error}") from None

    def wait_until_healthy(self, timeout_s: float, tell: Callable[[float, str], None]) -> float:
        """Wait until `/health` answers 200; returns the seconds that it took.

        `tell` is called every now and then with the seconds so far and the latest line. Raises `RemoteError`, with
        the last line, where the process ends first or takes longer than `timeout_s`.
        """
        started_s = time.monotonic()
        while True:
            passed_s = time.monotonic() - started_s
            if self._abandoned.is_set():
                raise RemoteError("the start of vLLM was given up")
            if self.exit_code is not None:
                raise RemoteError(self.obituary("before it was ready"))
            if is_healthy(self.url):
                return passed_s
            if passed_s > timeout_s:
                raise RemoteError(
                    f"vLLM was not ready after {timeout_s:g} s (--start-timeout-s){self._last()}"
                )
            tell(passed_s, self._lines[-1] if self._lines else "")
            time.sleep(_LOOK_EVERY_S)

    def abandon(self) -> None:
        """Have `wait_until_healthy`, which waits in another thread, raise `RemoteError`."""
        self._abandoned.set()

    def obituary(self, when: str) -> str:
        """Says in one line that it ended, and what it printed last."""
        if self._child is not None:
            self._child.wait_for_output()
        code = self.exit_code
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"vLLM ended with {how} {when}{self._last()}"

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End it and all processes of its session; returns when they are gone. May be called repeatedly."""
        if self._child is None or self._is_gone:  # long after its end its number may be another process's
            return
        self._child.stop(grace_s)
        self._is_gone = True

    def _last(self) -> str:
        last = next((line for line in reversed(self._lines) if line.strip()), None)
        return ", and printed nothing" if last is None else f"; its last line: {last}"

    def _read(self, output: IO[str], log: IO[str] | None) -> None:
        """Keep the last lines, and write all of them to the log."""
        with output, log or contextlib.nullcontext():
            for line in output:
                self._lines.append(line.rstrip())
                if log is not None:
                    log.write(line)
                    log.flush()

    def __str__(self) -> str:
        return shlex.join(self.command)


def is_healthy(url: str, timeout_s: float = 5.0) -> bool:
    """True where `/health` answers 200."""
    try:
        return httpx2.get(f"{url}/health", timeout=timeout_s).status_code == 200
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return False
