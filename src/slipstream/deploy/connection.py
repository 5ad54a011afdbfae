"""A front's connection to one replica."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from slipstream.deploy.fleet import ReplicaFacts
from slipstream.deploy.protocol import Message, facts_of, frame, hello, read_frame
from slipstream.errors import DeployError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class ReplicaConnection:
    """Opened once; `on_message` gets what the replica says until `on_closed` is called, once."""

    def __init__(
        self,
        facts: ReplicaFacts,
        about: Message,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.facts = facts
        self.about = about
        """What the replica says of its engine."""
        self._reader = reader
        self._writer = writer
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, host: str, port: int, front: str, secret: str) -> ReplicaConnection:
        """Connect and be welcomed; raises `DeployError` where that fails, in one line."""
        address = f"{host}:{port}"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(frame(hello(front, secret)))
                try:
                    message = await read_frame(reader)
                    facts = facts_of(message, address)
                except BaseException:
                    writer.close()
                    raise
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no answer"
            raise DeployError(f"no replica can be reached at {address}: {reason}") from None
        return cls(facts, (message or {}).get("about") or {}, reader, writer)

    def follow(self, on_message: Callable[[Message], None], on_closed: Callable[[], None]) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._read(on_message, on_closed))

    def send(self, message: Message) -> None:
        """Send a message; a closed connection takes it to nowhere. Raises `DeployError` where it is too long."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def close(self) -> None:
        """Close it; `on_closed` is not called for that."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self, on_message: Callable[[Message], None], on_closed: Callable[[], None]) -> None:
        try:
            while (message := await read_frame(self._reader)) is not None:
                on_message(message)
        except DeployError as error:
            logger.warning("replica %s is left: %s", self.facts.id, error)
        except Exception:  # half of it was followed: what comes behind it would not fit
            logger.exception("replica %s is left: a message of it could not be followed", self.facts.id)
        self._writer.close()
        on_closed()
