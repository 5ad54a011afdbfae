"""Has the engine's process load an engine, and sees it out."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections import deque
from dataclasses import dataclass, field

from slipstream import __version__
from slipstream.errors import EngineStoppedError, ProtocolError
from slipstream.serve.facts import EngineFacts
from slipstream.serve.process.protocol import (
    VERSION,
    Failed,
    Frames,
    Hello,
    Load,
    Loaded,
    check_version,
    frame,
    read_from_engine,
)
from slipstream.serve.process.spawn import SpawnedEngine, spawn_engine
from slipstream.serve.process.values import error_in

LEAVE_S = 10.0
"""How long a process may take to end by itself after the stream was closed: it finishes its step."""


@dataclass(slots=True)
class EngineLink:
    """The server's end of the stream, and what is behind the other end."""

    socket: socket.socket
    facts: EngineFacts
    frames: Frames = field(default_factory=Frames)
    process: subprocess.Popen[bytes] | None = None
    """None where this process hosts the other end too."""

    def close(self) -> None:
        """Close the stream; may be called from any thread, and again."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> str:
        """Close the stream, see the process out, and say how it ended."""
        self.close()
        if self.process is None:
            return "it has left"
        try:
            code = self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code >= 0:
            return f"it ended with status {code}"
        return f"it was ended by signal {-code} ({signal.Signals(-code).name})"


def start_engine(load: Load, spawned: SpawnedEngine | None = None) -> EngineLink:
    """A process with the engine that `load` describes, loaded; in the one that was `spawned`, if any.

    Raises what loading raises there (`ConfigError`, `ModelError`, `CapacityError`), `EngineStoppedError` where the
    process ends without a word, and `ProtocolError`.
    """
    spawned = spawned or spawn_engine()
    try:
        return greet(spawned.socket, load, spawned.process)
    except BaseException:
        spawned.kill()
        raise


def greet(mine: socket.socket, load: Load, process: subprocess.Popen[bytes] | None = None) -> EngineLink:
    """Have the process behind a socket load an engine; errors as for `start_engine`."""
    frames = Frames()
    bodies: deque[bytes] = deque()

    def read() -> object:
        while not bodies:
            data = mine.recv(2**16)
            if not data:
                code = None if process is None else process.wait(LEAVE_S)
                why = "closed the stream" if code is None else f"ended with status {code}"
                raise EngineStoppedError(f"the engine's process {why} before the engine was loaded")
            bodies.extend(frames.add(data))
        message = read_from_engine(bodies.popleft())
        if isinstance(message, Failed):
            raise error_in(message.error, message.message)
        return message

    mine.sendall(frame(Hello(VERSION, __version__)) + frame(load))
    hello = read()
    check_version(hello, __version__)
    loaded = read()
    if not isinstance(loaded, Loaded):
        raise ProtocolError(f"a {type(loaded).__name__} came where Loaded was due")
    return EngineLink(mine, loaded.facts, frames, process)
