"""A front's connection to one replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from slipstream.deploy.fleet import ReplicaInfo
from slipstream.deploy.protocol import CODEC, ReplicaMessage, greeting_frame, hello, info_of, read_greeting
from slipstream.errors import DeployError, ProtocolError
from slipstream.rpc.peer import Peer

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class ReplicaConnection:
    """Opened once; `on_message` gets what the replica says until `on_closed` is called, once."""

    def __init__(self, info: ReplicaInfo, about: dict[str, Any], peer: Peer) -> None:
        self.info = info
        self.about = about
        """What the replica says of its engine."""
        self._peer = peer
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, host: str, port: int, front: str, secret: str) -> ReplicaConnection:
        """Connect and be welcomed; raises `DeployError` where that fails, in one line."""
        address = f"{host}:{port}"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                peer = Peer(*await asyncio.open_connection(host, port), CODEC.frames())
                try:
                    peer.send(greeting_frame(hello(front, secret)))
                    body = await peer.read()
                    if body is None:
                        raise DeployError(
                            f"{address} closed the connection without a word; is it a slipstream replica?"
                        )
                    greeting = read_greeting(body)
                    return cls(info_of(greeting, address), greeting.get("about") or {}, peer)
                except BaseException:
                    peer.writer.close()
                    raise
        except (OSError, TimeoutError, ProtocolError) as error:
            reason = str(error) or "no answer"
            raise DeployError(f"no replica can be reached at {address}: {reason}") from None

    def follow(self, on_message: Callable[[ReplicaMessage], None], on_closed: Callable[[], None]) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._read(on_message, on_closed))

    def send(self, message: ReplicaMessage) -> None:
        """Send a message; a closed connection takes it to nowhere. Raises `ProtocolError` where it is too long."""
        self._peer.send(CODEC.frame(message))

    async def close(self) -> None:
        """Close it; `on_closed` is not called for that."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._peer.close()

    async def _read(
        self, on_message: Callable[[ReplicaMessage], None], on_closed: Callable[[], None]
    ) -> None:
        try:
            while (body := await self._peer.read()) is not None:
                on_message(CODEC.read(body))
        except ProtocolError as error:
            logger.warning("replica %s is left: %s", self.info.id, error)
        except Exception:  # half of it was followed: what comes behind it would not fit
            logger.exception("replica %s is left: a message of it could not be followed", self.info.id)
        self._peer.writer.close()
        on_closed()
