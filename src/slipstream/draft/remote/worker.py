"""A draft worker: it listens, greets engines, and drafts ahead for all of them in one thread.

Connections are served by an event loop, which answers pings whatever the drafter does. The drafter runs in a thread of
its own, which takes all that has arrived before each of its rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import signal
import socket
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.draft.remote.address import Address
from slipstream.draft.remote.ahead import AheadDrafting
from slipstream.draft.remote.handshake import (
    KEY_VARIABLE,
    RefusedError,
    check_version,
    new_nonce,
    proof,
    proves,
)
from slipstream.draft.remote.protocol import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    PROTOCOL_VERSION,
    Message,
    checked,
    encode,
)
from slipstream.draft.remote.serving import ServedDrafter
from slipstream.errors import ConfigError, ProtocolError
from slipstream.models.cpu import threads
from slipstream.rpc.frames import Frames
from slipstream.rpc.peer import Peer

logger = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 256
MAX_UNREAD_BYTES = 1 << 20
"""Continuations that an engine may leave unread before it is left: it is dead, or stopped."""
MAX_UNTAKEN = 1024
"""Messages of an engine that wait for the drafter; until they are taken no more are read."""
MAX_UNTAKEN_BYTES = MAX_FRAME_BYTES
"""The same in bytes of their frames."""


@dataclass(eq=False)
class EngineConnection:
    """One engine, while it is connected."""

    number: int
    depth: int
    """The most draft tokens that it requests at once."""
    peer: Peer
    party: str
    """Who shares the places for requests with it: engines of one address do, if it is not this machine's."""
    num_untaken: int = 0
    num_untaken_bytes: int = 0
    room: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_full(self) -> bool:
        """True while no more of it should be read."""
        return self.num_untaken >= MAX_UNTAKEN or self.num_untaken_bytes >= MAX_UNTAKEN_BYTES


Task = tuple[EngineConnection, Message | None, int]
"""What an engine says, and the bytes of its frame; None where it is gone."""
Taken = dict[EngineConnection, tuple[int, int]]
"""Messages that the drafter's thread has taken, and their bytes."""


def check_listening(address: Address, key: bytes) -> None:
    """Raise `ConfigError` where others than this machine could reach a worker at `address` without a key."""
    if not address.is_local and not key:
        raise ConfigError(
            f"a draft worker at {address} can be reached from other machines, so it needs a shared key: set "
            f"--key-file or {KEY_VARIABLE}, or listen at 127.0.0.1"
        )


class DraftWorker:
    """Serves one drafter to any number of engines until it is stopped."""

    def __init__(self, served: ServedDrafter, address: Address, key: bytes = b"") -> None:
        """Raises `ConfigError` where others than this machine could reach it without a key."""
        check_listening(address, key)
        self.address = address
        """Where it listens; its port is the chosen one once it does."""
        self._served, self._key = served, key
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._connections: set[EngineConnection] = set()
        self._num_greeting = 0
        """Connections that are not greeted yet."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None

    def run(self, on_ready: Callable[[Address], None] | None = None, *, handle_signals: bool = False) -> None:
        """Serve until `stop`, or a signal; `on_ready` is called with the address once it listens.

        Raises `ConfigError` where the address cannot be listened at.
        """
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(self._run(on_ready, handle_signals))

    def stop(self) -> None:
        """End `run`; may be called from any thread."""
        loop, stopped = self._loop, self._stopped
        if loop is not None and stopped is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stopped.set)

    async def _run(self, on_ready: Callable[[Address], None] | None, handle_signals: bool) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        if handle_signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._stopped.set)
        server = await self._listen()
        drafting = threading.Thread(target=self._draft, name="slipstream-drafting", daemon=True)
        drafting.start()
        try:
            if on_ready is not None:
                on_ready(self.address)
            await self._stopped.wait()
        finally:
            server.close()
            for connection in list(self._connections):
                connection.peer.writer.close()
            self._tasks.put(None)
            if self.address.path:
                with contextlib.suppress(OSError):
                    Path(self.address.path).unlink()
            await asyncio.to_thread(drafting.join, 5.0)

    async def _listen(self) -> asyncio.Server:
        try:
            if self.address.path:
                _remove_socket(self.address.path)
                mask = os.umask(0o177)  # its owner alone may connect
                try:
                    return await asyncio.start_unix_server(self._serve, self.address.path)
                finally:
                    os.umask(mask)
            server = await asyncio.start_server(self._serve, self.address.host, self.address.port)
        except OSError as error:
            raise ConfigError(f"cannot listen at {self.address}: {error.strerror or error}") from None
        self.address = Address(self.address.host, server.sockets[0].getsockname()[1])
        return server

    # --- the event loop ---------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: EngineConnection | None = None
        peer = Peer(reader, writer, Frames(MAX_GREETING_BYTES), MAX_UNREAD_BYTES)
        self._num_greeting += 1
        try:
            if len(self._connections) + self._num_greeting > MAX_CONNECTIONS:
                raise RefusedError(f"{MAX_CONNECTIONS} engines are connected already")
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                depth = await self._greet(peer)
            number = next(self._numbers)
            connection = EngineConnection(number, depth, peer, _party(writer) or f"connection {number}")
            self._num_greeting -= 1
            self._connections.add(connection)
            logger.info("engine %d is connected", connection.number)
            await self._read(connection)
        except RefusedError as error:
            logger.warning("an engine is refused: %s", error)
            peer.send(encode({"type": "refused", "reason": str(error)}))
        except ProtocolError as error:
            logger.warning("a connection is closed: %s", error)
        except (OSError, TimeoutError):
            pass
        finally:
            if connection is None:
                self._num_greeting -= 1
            else:
                self._connections.discard(connection)
                self._tasks.put((connection, None, 0))
                logger.info("engine %d is gone", connection.number)
            writer.close()

    async def _greet(self, peer: Peer) -> int:
        """The engine's depth, once it has shown that it knows the key."""
        hello = await _next(peer, "hello")
        nonce = new_nonce()
        challenge = {"protocol": PROTOCOL_VERSION, "nonce": nonce, "needs_key": bool(self._key)}
        peer.send(encode({"type": "challenge", **challenge}))
        check_version(hello["protocol"], "the engine")
        answer = await _next(peer, "proof")
        if self._key and not proves(answer["mac"], self._key, "engine", hello["nonce"], nonce):
            raise RefusedError("the engine does not know the key")
        served = self._served
        welcome = {
            "type": "welcome",
            "mac": proof(self._key, "worker", hello["nonce"], nonce),
            "vocabulary": served.vocabulary,
            "vocab_size": served.vocab_size,
            "kind": str(served.kind),
            "drafter": served.method,
        }
        peer.send(encode(welcome))
        peer.frames.max_bytes = MAX_FRAME_BYTES
        depth: int = max(hello["depth"], 1)
        return depth

    async def _read(self, connection: EngineConnection) -> None:
        while (body := await connection.peer.read()) is not None:
            message = checked(body, self._served.drafting.max_len)
            if message["type"] == "ping":
                self._write(connection, message | {"type": "pong"})
            elif message["type"] in ("open", "commit", "release"):
                connection.num_untaken += 1
                connection.num_untaken_bytes += len(body)
                self._tasks.put((connection, message, len(body)))
            else:
                raise ProtocolError(f"a {message['type']} message from an engine")
            while connection.is_full:
                connection.room.clear()
                await connection.room.wait()

    def _write(self, connection: EngineConnection, message: Message) -> None:
        if not connection.peer.send(encode(message)):
            logger.warning("engine %d does not read its continuations and is left", connection.number)

    def _hand_over(self, taken: Taken, replies: list[tuple[int, Message]]) -> None:
        """In the event loop: what the drafter's thread has taken, and what it has to say."""
        for connection, (number, num_bytes) in taken.items():
            connection.num_untaken -= number
            connection.num_untaken_bytes -= num_bytes
            connection.room.set()
        by_number = {connection.number: connection for connection in self._connections}
        for number, message in replies:
            if number in by_number:
                self._write(by_number[number], message)

    def _leave(self, connection: EngineConnection, error: Exception) -> None:
        logger.warning("engine %d is left: %s", connection.number, error)
        connection.peer.leave()

    # --- the drafter's thread ---------------------------------------------------------------------------------

    def _draft(self) -> None:
        with threads.operators(self._served.num_operator_threads):
            self._rounds(self._served.drafting)

    def _rounds(self, drafting: AheadDrafting) -> None:
        loop = self._loop
        assert loop is not None
        while True:
            taken: Taken = {}
            replies: list[tuple[int, Message]] = []
            wait = not drafting.wants
            while True:
                try:
                    task = self._tasks.get(block=wait)
                except queue.Empty:
                    break
                if task is None:
                    return
                wait = False
                connection, message, num_bytes = task
                before = taken.get(connection, (0, 0))
                taken[connection] = before[0] + (message is not None), before[1] + num_bytes
                if message is None:
                    drafting.drop(connection.number)
                    continue
                try:
                    number, depth = connection.number, connection.depth
                    replies += drafting.receive(number, message, depth, connection.party)  # type: ignore[arg-type]
                except ProtocolError as error:
                    loop.call_soon_threadsafe(self._leave, connection, error)
            replies += drafting.draft()  # type: ignore[arg-type]
            if taken or replies:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._hand_over, taken, replies)


async def _next(peer: Peer, wanted: str) -> Message:
    """The next message, which must be the `wanted` one."""
    body = await peer.read()
    if body is None:
        raise ProtocolError(f"the connection was closed before {wanted}")
    message = checked(body)
    if message["type"] != wanted:
        raise ProtocolError(f"a {message['type']} message instead of {wanted}")
    return message


def _party(writer: asyncio.StreamWriter) -> str:
    """Another machine's address, the process at the other end of a unix socket; empty where neither is known."""
    peer = writer.get_extra_info("socket")
    if peer.family == socket.AF_UNIX:
        if not hasattr(socket, "SO_PEERCRED"):
            return ""
        size = struct.calcsize("3i")
        return (
            f"process {struct.unpack('3i', peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]}"
        )
    host = str(writer.get_extra_info("peername")[0])
    return "" if Address(host).is_local else host


def _remove_socket(path: str) -> None:
    """Remove what an earlier worker left; a file of another kind is not touched."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(Path(path).lstat().st_mode):
            Path(path).unlink()
