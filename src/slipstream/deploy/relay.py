"""Carries out the router's orders: passes on what replicas say, and keeps it, so that others can go on.

What was passed on of an answer and the request are all that another replica needs: the rest of the answer is a
function of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import msgspec

from slipstream.core.metrics.decoded import DecodedSteps
from slipstream.deploy.connection import ReplicaConnection
from slipstream.deploy.guard import FaultGuard
from slipstream.deploy.orders import Cancel, Order, SetPaused, Start
from slipstream.deploy.protocol import (
    AttemptEnded,
    AttemptUpdate,
    BeginRequest,
    CancelAttempt,
    PauseAttempt,
    QueueShare,
    ReplicaBeat,
    ReplicaDrains,
    ReplicaMessage,
)
from slipstream.deploy.router import Router
from slipstream.deploy.work import Work
from slipstream.engine.client import RequestHandle
from slipstream.errors import DeployError, OverloadedError, ProtocolError, RequestError, SlipstreamError
from slipstream.serve.process.answers import AnswerRecord, AnswerUpdate, all_emitted

logger = logging.getLogger(__name__)

TICK_S = 0.1
DISCOVER_S = 0.5
MAX_PAUSE_S = 1.0
"""A longer pause of the front itself says nothing of its replicas."""
Address = tuple[str, int]
Discover = Callable[[], Awaitable[Iterable[Address]]]
Put = Callable[[AnswerUpdate | SlipstreamError], None]


@dataclass(slots=True)
class Passage:
    """A request while it is under way."""

    begin: BeginRequest
    """Its parameters."""
    answers: Seq[AnswerRecord]
    """What was passed on; `put` keeps them."""
    put: Put
    num_moves: int = 0
    """How often it was moved, once it has ended."""
    crossed_unlike: bool = False
    """Whether it was moved to unlike arithmetic."""


class Relay:
    """Requests over the connections to replicas; belongs to one event loop."""

    def __init__(self, router: Router, secret: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.router = router
        self.name = f"front-{uuid.uuid4().hex[:12]}"
        self.on_steps: Callable[[DecodedSteps], None] | None = None
        """Told of the steps that a replica has made, a few times a second."""
        self.by_account = True
        """Whether there is more than one account: `on_steps` gets them apart, and requests take turns by
        account."""
        self._guard = FaultGuard("counting a replica's steps")
        self._secret = secret
        self._clock = clock
        self._connections: dict[str, ReplicaConnection] = {}
        self._addresses: dict[Address, str] = {}
        self._connecting: dict[Address, asyncio.Task[None]] = {}
        self._passages: dict[str, Passage] = {}
        self._told: dict[Address, str] = {}
        """What was logged last of an address, so that it is logged once."""

    # --- requests ---------------------------------------------------------------------------------------------

    def begin(self, work: Work, passage: Passage) -> RequestHandle:
        """Serve a request: its `put` gets every update, or the error that ends it.

        Raises `OverloadedError` where it is not taken.
        """
        self._passages[work.id] = passage
        try:
            orders = self.router.submit(work, self._clock())
        except BaseException:
            del self._passages[work.id]
            raise
        self._obey(orders)

        def leave() -> None:
            if self._passages.get(work.id) is passage:
                del self._passages[work.id]
                self._obey(self.router.abandon(work.id, self._clock()))

        def set_paused(paused: bool) -> None:
            if self._passages.get(work.id) is passage:
                self._obey(self.router.set_paused(work.id, paused, self._clock()))

        return RequestHandle(leave, set_paused)

    def about_generation(self, generation: str) -> dict[str, Any] | None:
        """What a replica of that generation, or of none, said of its engine; None while there is none."""
        said = (connection.about for connection in self._connections.values())
        return next((about for about in said if about.get("generation", "") in ("", generation)), None)

    def about_of(self, replica: str) -> dict[str, Any]:
        """What a replica said of its engine; nothing for one that is not connected."""
        connection = self._connections.get(replica)
        return {} if connection is None else connection.about

    # --- replicas ---------------------------------------------------------------------------------------------

    async def run(self, discover: Discover) -> None:
        """Keep time, and connect to the replicas that `discover` finds, until cancelled."""
        next_look_s, last_s = 0.0, self._clock()
        try:
            while True:
                now_s = self._clock()
                if now_s - last_s < max(MAX_PAUSE_S, self.router.config.hang_timeout_s / 4):
                    self._tick(now_s)
                last_s = now_s  # after a pause of our own, what replicas said meanwhile is read first
                if now_s >= next_look_s:
                    next_look_s = now_s + DISCOVER_S
                    self._tell_queue()
                    try:
                        found = list(await discover())
                    except Exception as error:  # the directory is away for a moment: the replicas are not
                        self._tell(("directory", 0), f"cannot look for replicas: {error}")
                        found = []
                    for address in found:
                        if address not in self._addresses and address not in self._connecting:
                            self._connecting[address] = asyncio.create_task(self._connect(address))
                await asyncio.sleep(TICK_S)
        finally:
            await self.close()

    def _tick(self, now_s: float) -> None:
        """A fault of one tick must not end the time of all requests."""
        try:
            self._obey(self.router.tick(now_s))
        except Exception as error:
            if self._tell(("router", 0), f"the router's time: {type(error).__name__}: {error}"):
                logger.exception("the router's time goes on without this tick")

    async def connect(self, host: str, port: int) -> str:
        """Add a replica; raises `DeployError` where it cannot be reached or does not fit. Returns its id."""
        connection = await ReplicaConnection.open(host, port, self.name, self._secret)
        name, address = connection.info.id, (host, port)
        try:
            if name in self._connections:
                raise DeployError(f"the replica at {host}:{port} is {name}, which is there already")
            orders = self.router.join(connection.info, self._clock())
        except DeployError:
            await connection.close()
            raise
        self._connections[name], self._addresses[address] = connection, name
        connection.follow(lambda message: self._heard(name, message), lambda: self._closed(name, address))
        self._told.pop(address, None)
        self._obey(orders)
        return name

    def drain(self, replica: str) -> None:
        """Move a replica's requests elsewhere, and give it nothing new."""
        self._obey(self.router.drain(replica, self._clock()))

    async def close(self) -> None:
        """Close all connections; requests under way end with an error."""
        for task in list(self._connecting.values()):
            task.cancel()
        for connection in list(self._connections.values()):
            await connection.close()
        self._connections.clear()
        self._addresses.clear()
        for passage in list(self._passages.values()):
            passage.put(DeployError("the front was closed"))
        self._passages.clear()

    def _tell_queue(self) -> None:
        """Tell each replica its part of what waits, which its autoscaling statistics hold."""
        share = self.router.queue.num_answers / max(len(self._connections), 1)
        for connection in self._connections.values():
            connection.send(QueueShare(share, self.by_account))

    async def _connect(self, address: Address) -> None:
        """In a task of its own: time goes on for the others while one address does not answer."""
        try:
            name = await self.connect(*address)
            logger.info("replica %s has joined", name)
        except DeployError as error:
            self._tell(address, str(error))
        finally:
            self._connecting.pop(address, None)

    def _tell(self, address: Address, message: str) -> bool:
        """Log a message of an address unless it was the last one too; whether it was logged."""
        if self._told.get(address) == message:
            return False
        self._told[address] = message
        logger.warning(message)
        return True

    def _closed(self, name: str, address: Address) -> None:
        self._connections.pop(name, None)
        self._addresses.pop(address, None)
        logger.warning("replica %s is gone", name)
        self._obey(self.router.leave(name, self._clock()))

    # --- what is said -----------------------------------------------------------------------------------------

    def _heard(self, name: str, message: ReplicaMessage) -> None:
        match message:
            case ReplicaBeat():
                self._obey(self.router.hear(name, message.report, self._clock()))
                with self._guard:  # statistics may fail, requests go on
                    if self.on_steps is not None and message.steps is not None:
                        self.on_steps(message.steps)
            case ReplicaDrains():
                self.drain(name)
            case AttemptUpdate():
                self._pass_on(name, message)
            case AttemptEnded(by_any=True):
                if self.router.passed_on(message.id, message.attempt, 0, self._clock()):
                    self._over(message.id, RequestError(message.message))
            case AttemptEnded():
                logger.warning("replica %s cannot go on with a request: %s", name, message.message)
                self._obey(self.router.give_back(message.id, message.attempt, self._clock()))
            case _:
                raise ProtocolError(f"a {type(message).__name__} is not expected here")

    def _pass_on(self, name: str, message: AttemptUpdate) -> None:
        request, attempt, update = message.id, message.attempt, message.update
        passage, now_s = self._passages.get(request), self._clock()
        if passage is None or not self.router.passed_on(request, attempt, len(update.token_ids), now_s):
            if name in self._connections:  # it was taken for hung, and does not know yet
                self._connections[name].send(CancelAttempt(request, attempt))
            return
        if update.end is None:
            passage.put(update)
            return
        ticket = self.router.ticket(request)
        if ticket is not None:
            passage.num_moves, passage.crossed_unlike = ticket.num_moves, ticket.crossed_unlike
        del self._passages[request]
        orders = self.router.finish(request, now_s)
        passage.put(update)
        self._obey(orders)

    def _over(self, request: str, error: SlipstreamError) -> None:
        passage = self._passages.pop(request, None)
        self._obey(self.router.abandon(request, self._clock()))
        if passage is not None:
            passage.put(error)

    def _obey(self, orders: Seq[Order]) -> None:
        for order in orders:
            if isinstance(order, Start):
                self._start(order)
            elif isinstance(order, Cancel):
                connection = self._connections.get(order.replica)
                if connection is not None:
                    connection.send(CancelAttempt(order.request, order.attempt))
            elif isinstance(order, SetPaused):
                connection = self._connections.get(order.replica)
                if connection is not None:
                    connection.send(PauseAttempt(order.request, order.attempt, order.paused))
            else:
                passage = self._passages.pop(order.request, None)
                if passage is not None:
                    late = OverloadedError(order.message, 1, is_deadline=True)
                    passage.put(late if order.is_deadline else DeployError(order.message))

    def _start(self, order: Start) -> None:
        passage, connection = self._passages.get(order.request), self._connections.get(order.replica)
        if passage is None:  # no caller waits for it any more
            return
        if connection is None:  # it went between the order and now; `_closed` moves its requests
            return
        begin = msgspec.structs.replace(
            passage.begin, attempt=order.attempt, emitted=all_emitted(passage.answers)
        )
        try:
            connection.send(begin)
        except ProtocolError as error:
            self._over(order.request, RequestError(f"the request cannot be sent to a replica: {error}"))
