"""A replica: one engine that serves fronts over the replica protocol."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.metrics.decoded import DecodedSteps
from slipstream.deploy.fleet import ReplicaInfo, ReplicaReport
from slipstream.deploy.guard import FaultGuard
from slipstream.deploy.protocol import (
    CODEC,
    MAX_GREETING_BYTES,
    AttemptEnded,
    AttemptUpdate,
    BeginRequest,
    CancelAttempt,
    PauseAttempt,
    QueueShare,
    ReplicaBeat,
    ReplicaDrains,
    ReplicaMessage,
    check_protocol,
    greeting_frame,
    read_greeting,
    welcome,
)
from slipstream.deploy.served import engine_info
from slipstream.deploy.stepped import StepCounter
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.client import RequestHandle
from slipstream.engine.outputs import Update
from slipstream.errors import DeployError, EngineStoppedError, ProtocolError, RequestError
from slipstream.rpc.frames import Frames
from slipstream.rpc.peer import Peer
from slipstream.serve.process.answers import params_in, update_out

logger = logging.getLogger(__name__)

BEAT_S = 0.25
HELLO_TIMEOUT_S = 5.0
MAX_UNREAD_BYTES = 64 * 2**20
"""A front that leaves so much unread is dropped: it hangs, and its memory is not ours to be."""


@dataclass(slots=True)
class _Attempt:
    """A request of one front: what aborts or pauses it, once the engine has it, and what was requested before."""

    handle: RequestHandle | None = None
    cancelled: bool = False
    paused: bool = False


@dataclass(eq=False, slots=True)
class _Front:
    name: str
    peer: Peer
    attempts: dict[tuple[str, int], _Attempt] = field(default_factory=dict)

    def send(self, message: ReplicaMessage) -> None:
        """Raises `ProtocolError` where the message is too long."""
        self.peer.send(CODEC.frame(message))


class ReplicaServer:
    """Listens for fronts; belongs to one event loop. The engine steps in its own thread."""

    def __init__(
        self,
        engine: AsyncEngine,
        info: ReplicaInfo,
        secret: str,
        beat_s: float = BEAT_S,
        about: dict[str, Any] | None = None,
    ) -> None:
        """`secret` is what fronts must know; `info` is what they are given, and `about`, by default `engine_info`."""
        self.engine = engine
        self.info = info
        self.report = ReplicaReport()
        self.is_draining = False
        self._queued: dict[str, float] = {}
        self._without_accounts: set[str] = set()
        """Fronts that keep no accounts apart."""
        self._guard = FaultGuard("telling fronts of steps")
        self._about = engine_info(engine.engine) if about is None else about
        self._secret = secret
        self._beat_s = beat_s
        self._fronts: set[_Front] = set()
        self._server: asyncio.Server | None = None
        self._beats: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Listen; returns the address."""
        self._server = await asyncio.start_server(self._serve, host, port)
        self._beats = asyncio.create_task(self._beat())
        found = self._server.sockets[0].getsockname()
        return str(found[0]), int(found[1])

    @property
    def num_under_way(self) -> int:
        """Requests of all fronts."""
        return sum(len(front.attempts) for front in self._fronts)

    @property
    def queue_share(self) -> float:
        """This replica's part of what waits at the fronts."""
        return sum(self._queued.values())

    async def drain(self, timeout_s: float) -> bool:
        """Request that the fronts take their requests elsewhere; True once none is left, False after `timeout_s`."""
        self.is_draining = True
        for front in self._fronts:
            front.send(ReplicaDrains())
        deadline_s = time.monotonic() + timeout_s
        while self.num_under_way and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        return not self.num_under_way

    async def close(self) -> None:
        """Close all connections; the engine is the caller's."""
        if self._beats is not None:
            self._beats.cancel()
        if self._server is not None:
            self._server.close()
        for front in list(self._fronts):
            front.peer.writer.close()

    # --- one front --------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        front = None
        peer = Peer(reader, writer, Frames(MAX_GREETING_BYTES), MAX_UNREAD_BYTES)
        try:
            front = await self._admit(peer)
            if front is not None:
                self._fronts.add(front)
                while (body := await peer.read()) is not None:
                    self._hear(front, CODEC.read(body))
        except (DeployError, ProtocolError) as error:
            logger.warning("a connection is closed: %s", error)
        except (OSError, TimeoutError):
            pass
        finally:
            if front is not None:
                self._fronts.discard(front)
                self._queued.pop(front.name, None)
                self._without_accounts.discard(front.name)
                for key in list(front.attempts):
                    self._cancel(front, key)
            writer.close()

    async def _admit(self, peer: Peer) -> _Front | None:
        """The front that says hello; None where it is none of ours."""
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            body = await peer.read()
        message = None if body is None else read_greeting(body)
        if message is None or message["type"] != "hello":
            return None
        try:
            check_protocol(message, "the front")
            if not hmac.compare_digest(str(message.get("secret", "")).encode(), self._secret.encode()):
                raise DeployError("the front does not know this deployment's secret")
        except DeployError as error:
            peer.send(greeting_frame({"type": "refused", "message": str(error)}))
            await peer.writer.drain()
            raise
        peer.frames.max_bytes = CODEC.max_bytes
        peer.send(greeting_frame(welcome(self.info, self._about)))
        front = _Front(str(message.get("front")), peer)
        if self.is_draining:
            front.send(ReplicaDrains())
        return front

    def _hear(self, front: _Front, message: ReplicaMessage) -> None:
        match message:
            case BeginRequest():
                key = (message.id, message.attempt)
                front.attempts[key] = _Attempt()
                task = asyncio.create_task(self._begin(front, key, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case CancelAttempt():
                self._cancel(front, (message.id, message.attempt))
            case PauseAttempt():
                attempt = front.attempts.get((message.id, message.attempt))
                if attempt is not None:
                    attempt.paused = message.paused
                    if attempt.handle is not None:
                        attempt.handle.set_paused(attempt.paused)
            case QueueShare():
                self._queued[front.name] = message.share
                if message.by_account:
                    self._without_accounts.discard(front.name)
                else:
                    self._without_accounts.add(front.name)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is not expected here")

    def _cancel(self, front: _Front, key: tuple[str, int]) -> None:
        attempt = front.attempts.pop(key, None)
        if attempt is not None:
            attempt.cancelled = True
            if attempt.handle is not None:
                attempt.handle.leave()

    async def _begin(self, front: _Front, key: tuple[str, int], message: BeginRequest) -> None:
        attempt = front.attempts[key]

        def put(item: Update | Exception) -> None:
            if attempt.cancelled:
                return
            if isinstance(item, Exception):
                self._fail(front, key, item)
                return
            try:
                front.send(AttemptUpdate(*key, update_out(item)))
            except ProtocolError as error:
                self._cancel(front, key)
                self._fail(front, key, RequestError(f"the answer cannot be sent: {error}"))
                return
            if item.output is not None:
                front.attempts.pop(key, None)

        try:
            attempt.handle = await self.engine.begin(
                message.token_ids,
                params_in(message.params),
                put,
                request_id=f"{front.name}/{message.id}/{message.attempt}",
                options=message.options,
                emitted=message.emitted,
            )
            if attempt.cancelled:
                attempt.handle.leave()
            elif attempt.paused:
                attempt.handle.set_paused(True)
        except Exception as error:
            self._fail(front, key, error)

    def _fail(self, front: _Front, key: tuple[str, int], error: Exception) -> None:
        """A request that no replica can serve is refused; another failure is this replica's own."""
        front.attempts.pop(key, None)
        if not isinstance(error, RequestError | EngineStoppedError):
            logger.error("a request failed", exc_info=error)
        front.send(AttemptEnded(*key, str(error), by_any=isinstance(error, RequestError)))

    # --- reports ----------------------------------------------------------------------------------------------

    @property
    def by_account(self) -> bool:
        """Accounts are kept apart unless every front has said that its statistics have none."""
        return not self._fronts or any(front.name not in self._without_accounts for front in self._fronts)

    async def _beat(self) -> None:
        """Report from the engine's thread, so that a replica with a hung engine is silent."""
        counter = StepCounter()
        with contextlib.suppress(EngineStoppedError):
            await self.engine.ask(counter.attach)
            while True:
                counter.by_account = self.engine.engine.shares_by_account = self.by_account
                self.report, steps = await self.engine.ask(counter.report)
                if self._fronts:
                    beat = self._beat_frame(steps)
                    for front in list(self._fronts):
                        front.peer.send(beat)
                await asyncio.sleep(self._beat_s)
        logger.error("the engine has stopped; the replica goes")
        await self.close()

    def _beat_frame(self, steps: DecodedSteps) -> bytes:
        """The same for all fronts. Steps that no message holds are left out: they are counted in the report."""
        with self._guard:
            return CODEC.frame(ReplicaBeat(self.report, steps if steps.steps else None))
        return CODEC.frame(ReplicaBeat(self.report))
