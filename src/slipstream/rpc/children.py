"""How child processes are started and how they end. None of Python imports what lies in the working directory."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_BOUND_PROGRAM = str(Path(__file__).with_name("bound_program.py"))


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module in a child. `-P` is Python's safe path: without it the working directory, which
    may be a folder of downloads, comes first in the search for modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(**changes: str) -> dict[str, str]:
    """The environment of a child: this process's own with `changes`. The child finds the package where this one did,
    which may have been in the working directory."""
    root = Path(__file__).resolve().parents[2]
    path = [str(root)] if root.name not in ("site-packages", "dist-packages") else []
    environment = {**os.environ, **changes}
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    path += filter(None, given)  # an empty entry is the working directory
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


@dataclass(frozen=True, slots=True)
class SocketChild:
    """A child process that is spoken to over a pair of sockets, and this process's end of the pair."""

    socket: socket.socket
    process: subprocess.Popen[bytes]

    @classmethod
    def start(
        cls,
        command: Seq[str],
        *,
        is_silent: bool = False,
        read_errors: Callable[[IO[str]], None] | None = None,
        process_group: int | None = None,
        **environment: str,
    ) -> SocketChild:
        """Run `command` with the number of the child's socket as one more argument, which `parent_socket` opens there.

        A silent child's output is dropped, else it goes where this process's goes. `read_errors` is called in a thread
        of its own with the child's standard error, and closes it. `process_group` is as in `subprocess`.
        Raises `OSError`.
        """
        output = subprocess.DEVNULL if is_silent else None
        mine, other = socket.socketpair()
        with other:
            try:
                process = subprocess.Popen(
                    [*command, str(other.fileno())],
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output if read_errors is None else subprocess.PIPE,
                    env=child_environment(**environment),
                    process_group=process_group,
                )
            except BaseException:
                mine.close()
                raise
        if read_errors is not None:
            _read_in_thread(process.stderr, read_errors)
        return cls(mine, process)

    def kill(self) -> None:
        """End it at once."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True, slots=True)
class ProgramChild:
    """Another program in a session of its own, so that Ctrl-C reaches only this process, which then stops it."""

    process: subprocess.Popen[bytes]
    reader: threading.Thread

    @classmethod
    def start(
        cls, command: Seq[str], environment: Mapping[str, str], read_output: Callable[[IO[str]], None]
    ) -> ProgramChild:
        """Run `command`. `read_output` is called in a thread of its own with all that it prints, and closes it.

        The system sends the program SIGTERM when the thread that started it ends. Raises `OSError`.
        """
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such program")
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", _BOUND_PROGRAM, str(os.getpid()), *command]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        return cls(process, _read_in_thread(process.stdout, read_output))

    def stop(self, grace_s: float) -> None:
        """Signal it to end, kill it after `grace_s`, and with it whatever it started and did not end; call it once."""
        if self.process.poll() is None:
            self.process.terminate()
            see_out(self.process, grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait_for_output()

    def wait_for_output(self) -> None:
        """Wait a moment until all that it printed has been read; it has ended."""
        self.reader.join(timeout=2.0)


def _read_in_thread(stream: IO[bytes] | None, read: Callable[[IO[str]], None]) -> threading.Thread:
    """Have `read` read a child's stream in a thread, as text."""
    assert stream is not None
    text = io.TextIOWrapper(stream, errors="replace")
    thread = threading.Thread(target=read, args=(text,), name="child-output", daemon=True)
    thread.start()
    return thread


def parent_socket() -> socket.socket:
    """In a `SocketChild`: the socket whose other end its parent has."""
    return socket.socket(fileno=int(sys.argv[-1]))


def see_out(process: subprocess.Popen[bytes], grace_s: float) -> str:
    """Wait for a process that should end by itself, and kill it after `grace_s`; returns how it ended, in words."""
    try:
        code = process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return how_it_ended(code)


def how_it_ended(code: int) -> str:
    """A process's exit code in words, behind "it"."""
    if code >= 0:
        return f"ended with status {code}"
    return f"was ended by signal {-code} ({signal.Signals(-code).name})"
