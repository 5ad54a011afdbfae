"""Both ends of the engine protocol in one process: the engine's side in a thread."""

from __future__ import annotations

import socket
import threading

from slipstream.engine.engine import Engine
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.process.host import EngineHost
from slipstream.serve.process.launch import EngineLink
from slipstream.serve.process.protocol import CODEC
from slipstream.serve.process.remote import RemoteEngine, Restart


class ThreadedHost:
    """Hosts an engine that exists in a thread, so that a `RemoteEngine` of this process speaks to it."""

    def __init__(
        self,
        engine: Engine,
        *,
        has_keys: bool = False,
        stream_interval_s: float = 0.0,
        restart: Restart | None = None,
        max_restarts: int = 0,
    ) -> None:
        self.link, other = stream_to(engine)
        host = EngineHost(
            engine, other, CODEC.frames(), has_keys=has_keys, stream_interval_s=stream_interval_s
        )
        self.remote = RemoteEngine(self.link, engine.tokenizer, restart, max_restarts)
        self._thread = threading.Thread(target=host.run, name="slipstream-host", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the server's end, and wait until the engine has dropped what it asked for."""
        self.remote.close()
        self._thread.join()


def stream_to(engine: Engine) -> tuple[EngineLink, socket.socket]:
    """A stream's two ends: the server's, which knows the engine, and the engine's."""
    mine, other = socket.socketpair()
    return EngineLink(mine, EngineInfo.of(engine)), other
