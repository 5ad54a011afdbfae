"""The engine's process: `python -m slipstream.serve.process.worker FD`, started by `launch`.

FD is an open socket whose other end is the server. What the process logs goes to standard error, in the server's form.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

from slipstream.core.version import __version__
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.engine.labels import engine_labels
from slipstream.errors import ProtocolError, SlipstreamError
from slipstream.learn.session import begin_learning
from slipstream.rpc.children import parent_socket
from slipstream.rpc.codec import error_out
from slipstream.rpc.frames import Frames
from slipstream.rpc.sockets import next_body
from slipstream.serve import logs
from slipstream.serve.config import ServeConfig
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.process.host import EngineHost
from slipstream.serve.process.protocol import (
    CODEC,
    VERSION,
    Failed,
    Hello,
    Load,
    Loaded,
    check_version,
)

logger = logging.getLogger(__name__)


def main() -> None:
    """Load what the server requests, and serve it until it leaves."""
    # Signals are the server's: it drains, and closes the stream when it has. A terminal's Ctrl-C reaches both.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sock = parent_socket()
    frames = CODEC.frames()
    try:
        load = _greet(sock, frames)
        if load is None:
            return
        with _Watch(sock):
            engine = _load(load)
    except Exception as error:
        if not isinstance(error, SlipstreamError):
            logger.exception("the engine cannot be loaded")
        sock.sendall(CODEC.frame(Failed(*error_out(error))))
        sys.exit(1)
    sock.sendall(CODEC.frame(Loaded(EngineInfo.of(engine))))
    host = EngineHost(engine, sock, frames, has_keys=load.has_keys, stream_interval_s=load.stream_interval_s)
    session = None
    if load.learn is not None:  # where it cannot, the server is notified and the engine serves all the same
        session, host.learn_status = begin_learning(host, load.learn)
    try:
        host.run()
    except BaseException:
        logger.exception("the engine failed; every request under way ends with an error")
        sys.exit(1)
    finally:
        if session is not None:
            session.close()


def _greet(sock: socket.socket, frames: Frames) -> Load | None:
    """What to load, after both have said their versions; None where the server has left. Raises `ProtocolError`."""
    sock.sendall(CODEC.frame(Hello(VERSION, __version__)))
    body = next_body(sock, frames)
    if body is None:
        return None
    check_version(CODEC.read(body), __version__)
    body = next_body(sock, frames)
    if body is None:
        return None
    load = CODEC.read(body)
    if isinstance(load, Load):
        return load
    raise ProtocolError(f"a {type(load).__name__} came where Load was due")


def _load(load: Load) -> Engine:
    logs.configure(ServeConfig(log_level=load.log_level, log_format=load.log_format))
    logs.take_over_transformers()
    engine = make_engine(load.model, load.speculative, load.engine)
    for label in engine_labels(engine):  # the engine has logged its memory plan itself
        logger.info("note: %s", label)
    return engine


class _Watch:
    """While the engine loads, which may take minutes: ends the process when the server has gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.5):
            try:
                if self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    os._exit(1)
            except BlockingIOError:
                continue


if __name__ == "__main__":
    main()
