"""A connection to one draft worker that is kept up in a thread of its own. Nothing here raises to the engine."""

from __future__ import annotations

import logging
import random
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from slipstream.core.proposal import ProposalKind
from slipstream.draft.remote.address import Address
from slipstream.draft.remote.handshake import (
    RefusedError,
    check_version,
    check_worker,
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
    printable,
)
from slipstream.errors import ProtocolError, RemoteError
from slipstream.rpc.frames import Frames
from slipstream.rpc.sockets import READ_BYTES, Outbox, Waker, next_body

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Before a worker that went away is tried again; each time twice as long."""
REFUSED_PAUSE_S = 60.0
STEADY_S = 5.0
"""A connection that lasted so long begins with the first pause again."""
PING_EVERY_S = 1.0
MAX_INBOX = 4096
"""Messages that may wait for the engine: a worker sends one or two for what it is sent."""
DOUBT_S = 2.0
"""A worker that answers no ping for so long is given nothing, and counts as away until it is heard of."""
SILENCE_S = 5.0
"""A worker that answers no ping for so long is taken for hung, and left."""
MAX_BACKLOG_BYTES = 2 * MAX_FRAME_BYTES
"""What a worker may leave unread before it is left."""


class Link(ABC):
    """The engine's end of a connection to a worker."""

    name: str
    """Name of the worker, for messages and metrics."""
    generation = 0
    """Counts connections: a worker knows nothing of what was said in an earlier one."""
    kind = ProposalKind.ONE_HOT
    """Kind of the worker's drafts."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """True while messages can be sent."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message, or drop it where there is no connection. Does not wait."""

    @abstractmethod
    def take(self) -> list[Message]:
        """The continuations and refusals that have arrived in the present connection and were not taken yet;
        `arrived_s` is when, by `time.perf_counter`."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """True where `take` has something to return."""

    def state(self) -> tuple[str, str]:
        """One of `WORKER_STATES`, and why it is not `connected`."""
        return ("connected", "") if self.connected else ("away", "")

    def round_trip_s(self) -> float | None:
        """The last ping's; None before one was answered."""
        return None

    def close(self) -> None:
        """End the connection for good. Idempotent."""
        return


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What an engine sends to a worker, and requests of it."""

    vocabulary: bytes
    """Its fingerprint."""
    vocab_size: int
    kinds: frozenset[str]
    """Kinds of proposals that the engine's verifier can judge."""
    depth: int
    """The most draft tokens that are requested at once."""
    key: bytes


class SocketLink(Link):
    """A link over TCP or a unix socket; connects again, after growing pauses, whenever the connection breaks."""

    def __init__(self, address: Address, terms: LinkTerms, arrived: threading.Condition) -> None:
        """`arrived` is notified when a message has arrived; its lock guards what is taken."""
        self.name = str(address)
        self._address, self._terms, self._arrived = address, terms, arrived
        self._inbox: list[Message] = []
        self._lock = threading.Lock()
        """Guards the outbox."""
        self._socket: socket.socket | None = None
        self._outbox: Outbox | None = None
        """What waits for the socket, while there is one."""
        self._state, self._why = "away", "not tried yet"
        self._round_trip_s: float | None = None
        self._closed = threading.Event()
        self._tried = threading.Event()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name=f"slipstream-link-{self.name}", daemon=True)
        self._thread.start()

    # --- the engine's thread ----------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._socket is not None and self._state == "connected"

    @property
    def pending(self) -> bool:
        return bool(self._inbox)

    def state(self) -> tuple[str, str]:
        return self._state, self._why

    def round_trip_s(self) -> float | None:
        return self._round_trip_s

    def wait_tried(self, timeout_s: float) -> None:
        """Wait until the first attempt to connect has succeeded or failed."""
        self._tried.wait(timeout_s)

    def send(self, message: Message) -> None:
        try:
            frame = encode(message)
        except ProtocolError as error:
            logger.warning("draft worker %s is not sent a request: %s", self.name, error)
            return
        with self._lock:
            if self._outbox is None:
                return
            try:
                self._outbox.put(frame)
            except OSError:
                return  # its thread sees the same
            if not self._outbox.num_bytes:
                return
            if self._outbox.is_full:
                self._drop("it does not read what it is sent")
        self._waker.wake()

    def take(self) -> list[Message]:
        with self._arrived:
            taken, self._inbox = self._inbox, []
        return taken

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._drop("closed")
        self._waker.wake()

    # --- the link's own thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed.is_set():
            began_s = time.monotonic()
            try:
                connection, frames = self._connect()
            except RefusedError as error:
                self._note("refused", str(error))
                self._closed.wait(REFUSED_PAUSE_S)
                continue
            except (
                OSError,
                ValueError,
                RemoteError,
                ProtocolError,
            ) as error:  # ValueError: no host can have such a name
                self._note("away", _reason(error))
            else:
                why = self._serve(connection, frames)
                if time.monotonic() - began_s >= STEADY_S:
                    pause_s = FIRST_PAUSE_S
                self._note("away", why)
            self._closed.wait(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._waker.close()

    def _note(self, state: str, why: str) -> None:
        if (state, why) != (self._state, self._why) and not self._closed.is_set():
            level = logging.INFO if state == "connected" else logging.WARNING
            logger.log(level, "draft worker %s is %s%s", self.name, state, f": {why}" if why else "")
        self._state, self._why = state, why
        self._tried.set()

    def _connect(self) -> tuple[socket.socket, Frames]:
        connection = self._address.connect(CONNECT_TIMEOUT_S)
        try:
            connection.settimeout(CONNECT_TIMEOUT_S)
            frames = self._greet(connection)
        except BaseException:
            connection.close()
            raise
        connection.setblocking(False)
        with self._lock:
            self._outbox = Outbox(connection, MAX_BACKLOG_BYTES)
            with self._arrived:
                self._inbox.clear()
                self.generation += 1
            self._note("connected", "")  # before the engine's thread can find a fault in it, and say so
            self._socket = connection
        return connection, frames

    def _greet(self, connection: socket.socket) -> Frames:
        """Exchange versions, proofs of the key and vocabularies; raises `RefusedError`, OSError or `RemoteError`."""
        terms, nonce, frames = self._terms, new_nonce(), Frames(MAX_GREETING_BYTES)
        hello = {"type": "hello", "protocol": PROTOCOL_VERSION, "nonce": nonce, "depth": terms.depth}
        connection.sendall(encode(hello))
        challenge = _next(connection, frames, "challenge")
        check_version(challenge["protocol"], "the worker")
        if challenge["needs_key"] and not terms.key:
            raise RefusedError("the worker requires a key; give its file as key_file")
        theirs = challenge["nonce"]
        connection.sendall(encode({"type": "proof", "mac": proof(terms.key, "engine", nonce, theirs)}))
        welcome = _next(connection, frames, "welcome")
        if not proves(welcome["mac"], terms.key, "worker", nonce, theirs):
            raise RefusedError("the worker does not know the key")
        check_worker(welcome, terms.vocabulary, terms.vocab_size, terms.kinds)
        self.kind = ProposalKind(welcome["kind"])
        frames.max_bytes = MAX_FRAME_BYTES
        return frames

    def _serve(self, connection: socket.socket, frames: Frames) -> str:
        """Read and send until the connection breaks; returns why it did."""
        heard_s = pinged_s = time.monotonic()
        in_doubt = False
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._waker, selectors.EVENT_READ)
                selector.register(connection, selectors.EVENT_READ)
                while not self._closed.is_set():
                    waits = self._outbox is not None and self._outbox.num_bytes
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
                    selector.modify(connection, events)
                    ready = {key.fileobj: event for key, event in selector.select(PING_EVERY_S / 2)}
                    now_s = time.monotonic()
                    self._waker.clear()
                    if ready.get(connection, 0) & selectors.EVENT_READ:
                        data = connection.recv(READ_BYTES)
                        if not data:
                            return "it closed the connection"
                        heard_s = now_s
                        if in_doubt:
                            in_doubt = False
                            self._note("connected", "")
                        self._arrive([checked(body) for body in frames.add(data)])
                    if ready.get(connection, 0) & selectors.EVENT_WRITE:
                        self._flush()
                    if now_s - pinged_s >= PING_EVERY_S:
                        pinged_s = now_s
                        self.send({"type": "ping", "sent_s": time.perf_counter()})
                    if now_s - heard_s > DOUBT_S and not in_doubt:
                        in_doubt = True
                        self._note("away", f"it has not answered for {DOUBT_S:g} s")
                    if now_s - heard_s > SILENCE_S:
                        return f"it has not answered for {SILENCE_S:g} s"
            return "closed"
        except (OSError, ValueError, KeyError, ProtocolError) as error:
            # ValueError, KeyError: the engine's thread has closed the socket
            return self._why or _reason(error)
        finally:
            with self._lock:
                self._drop("")

    def _arrive(self, messages: list[Message]) -> None:
        now_s = time.perf_counter()
        pongs = [message for message in messages if message["type"] == "pong"]
        if pongs:
            self._round_trip_s = max(now_s - pongs[-1]["sent_s"], 0.0)
        others = [
            message | {"arrived_s": now_s} for message in messages if message["type"] in ("tail", "unknown")
        ]
        if others:
            with self._arrived:
                if len(self._inbox) + len(others) > MAX_INBOX:
                    raise ProtocolError("it sends more than was requested")
                self._inbox += others
                self._arrived.notify_all()

    def _flush(self) -> None:
        with self._lock:
            if self._outbox is not None:
                self._outbox.flush()

    def _drop(self, why: str) -> None:
        """Close the socket, with the lock held."""
        if self._socket is not None:
            if why:
                self._note("away", why)
            self._socket.close()
            self._socket = self._outbox = None
        with self._arrived:
            self._arrived.notify_all()


def _next(connection: socket.socket, frames: Frames, wanted: str) -> Message:
    """The next message, which must be the `wanted` one or `refused`."""
    try:
        body = next_body(connection, frames)
        if body is None:
            raise RemoteError("it closed the connection while it was greeted; is it a draft worker?")
        message = checked(body)
    except ProtocolError as error:
        raise ProtocolError(f"{error}; is it a draft worker?") from None
    if message["type"] == "refused":
        raise RefusedError(f"it refuses: {printable(message['reason'])}")
    if message["type"] != wanted:
        raise ProtocolError(f"a {message['type']} message instead of {wanted}")
    return message


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error)
