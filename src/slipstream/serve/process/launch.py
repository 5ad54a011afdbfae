"""Has the engine's process load an engine, and sees it out."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.core.version import __version__
from slipstream.errors import EngineStoppedError, ProtocolError
from slipstream.rpc.children import SocketChild, see_out
from slipstream.rpc.codec import error_in
from slipstream.rpc.frames import Frames
from slipstream.rpc.sockets import next_body
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.process.protocol import (
    CODEC,
    VERSION,
    Failed,
    Hello,
    Load,
    Loaded,
    check_version,
)
from slipstream.serve.process.spawn import spawn_engine

LEAVE_S = 10.0
"""How long a process may take to end by itself after the stream was closed: it finishes its step."""


@dataclass(slots=True)
class EngineLink:
    """The server's end of the stream, and what is behind the other end."""

    socket: socket.socket
    info: EngineInfo
    frames: Frames = field(default_factory=CODEC.frames)
    process: subprocess.Popen[bytes] | None = None
    """None where this process hosts the other end too."""

    def close(self) -> None:
        """Close the stream; may be called from any thread, and again."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> str:
        """Close the stream, see the process out, and say how it ended."""
        self.close()
        return "it has left" if self.process is None else f"it {see_out(self.process, LEAVE_S)}"


def start_engine(load: Load, spawned: SocketChild | None = None) -> EngineLink:
    """A process with the engine that `load` describes, loaded; in the one that was `spawned`, if any.

    Raises what loading raises there (`ConfigError`, `ModelError`, `CapacityError`), `EngineStoppedError` where the
    process ends without a word or is killed, and `ProtocolError`.
    """
    spawned = spawned or spawn_engine()
    try:
        return greet(spawned.socket, load, spawned.process)
    except BaseException:
        spawned.kill()
        raise


def as_loaded(load: Load, info: EngineInfo) -> Load:
    """The same engine again, with the room that was found for it first: what is free by now may be less or more, and an
    answer that goes on in another process must not end earlier there."""
    given = {name for name, value in load.engine.items() if value is not None}
    room: dict[str, Any] = {"max_model_len": info.max_model_len}
    if given.isdisjoint(("kv_cache_bytes", "kv_cache_memory_bytes")):
        room["kv_cache_bytes"] = info.kv_bytes
    return msgspec.structs.replace(load, engine={**load.engine, **room})


def greet(mine: socket.socket, load: Load, process: subprocess.Popen[bytes] | None = None) -> EngineLink:
    """Have the process behind a socket load an engine; errors as for `start_engine`."""
    frames = CODEC.frames()

    def read() -> object:
        body = next_body(mine, frames)
        if body is None:
            why = "closed the stream" if process is None else see_out(process, LEAVE_S)
            memory = "; is there memory for it?" if "SIGKILL" in why else ""
            raise EngineStoppedError(f"the engine's process {why} before the engine was loaded{memory}")
        message = CODEC.read(body)
        if isinstance(message, Failed):
            raise error_in(message.error, message.message)
        return message

    with contextlib.suppress(ConnectionError):  # reading will tell
        mine.sendall(CODEC.frame(Hello(VERSION, __version__)) + CODEC.frame(load))
    hello = read()
    check_version(hello, __version__)
    loaded = read()
    if not isinstance(loaded, Loaded):
        raise ProtocolError(f"a {type(loaded).__name__} came where Loaded was due")
    return EngineLink(mine, loaded.info, frames, process)
