"""The server's side: an engine in a process of its own, behind the same surface as `AsyncEngine`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from slipstream.control.types import ControlReport
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.request import EmittedTokens, RequestOptions
from slipstream.engine.client import EngineClient, RequestHandle
from slipstream.engine.logprobs import TokenTexts
from slipstream.engine.mailbox import Put
from slipstream.errors import EngineBusyError, EngineStoppedError, ProtocolError, RequestError
from slipstream.learn.server_status import ServerLearnStatus
from slipstream.rpc.codec import error_in
from slipstream.rpc.sockets import Outbox
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput
from slipstream.serve.accounts import Accounts
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.engines import StepListener, Take
from slipstream.serve.process.answers import (
    AnswerUpdate,
    output_of,
    update_in,
)
from slipstream.serve.process.calls import RemoteCall
from slipstream.serve.process.launch import EngineLink
from slipstream.serve.process.preparer import RequestPreparer
from slipstream.serve.process.protocol import (
    CODEC,
    CancelRequest,
    EngineMessage,
    Flow,
    Read,
    Refused,
    State,
    Steps,
    Stopped,
    steps_of,
)
from slipstream.text.prompts import Prompt, encode_chat

T = TypeVar("T")
Restart = Callable[[], EngineLink]
"""Starts another process with the same engine; called in a thread."""

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 64 * 2**20
"""The most that may wait for the engine to read it, which it does between two steps."""
RESTART_WINDOW_S = 600.0
"""Restarts are counted within this time."""
_READ_BYTES = 2**20


class RemoteEngine(EngineClient):
    """Requests to an engine in another process. Used from one event loop; `close` may be called from any thread.

    When the process dies, `restart` starts another one, at most `max_restarts` times in ten minutes: requests under way
    go on in it behind the tokens that they have, with the same seed, so their streams pause and nothing else changes.
    Otherwise they end with `EngineStoppedError`. Seeds of requests without one are drawn here, since another process
    would begin its own again.
    """

    def __init__(
        self, link: EngineLink, tokenizer: Any, restart: Restart | None = None, max_restarts: int = 0
    ) -> None:
        self.info: EngineInfo = link.info
        self.tokenizer = tokenizer
        self.num_restarts = 0
        """How often another process has taken over."""
        self._texts = TokenTexts(tokenizer)
        self._preparer = RequestPreparer(tokenizer, self.info)
        self._restart = restart
        self._max_restarts = max_restarts
        self._restarts: deque[float] = deque()
        self._restarting: asyncio.Task[None] | None = None
        self._stopped: EngineStoppedError | None = None
        self._closing = False
        self._numbers = itertools.count(1)
        self._calls: dict[int, RemoteCall] = {}
        self._waiting: dict[str, list[int]] = {}
        """Request ids whose constraint or text is being read, to what marks an abort meanwhile."""
        self._reads: dict[int, asyncio.Future[State]] = {}
        self._listener: StepListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._learn_status = ServerLearnStatus()
        self._use(link)

    # --- as `ServedEngine` --------------------------------------------------------------------------------------

    @property
    def client(self) -> RemoteEngine:
        """Itself."""
        return self

    def replicas(self) -> None:
        """None: it is one."""

    def report_to(self, listener: StepListener, accounts: Accounts) -> None:
        """As in `ServedEngine`; called in the event loop.

        Whether there are `accounts` the engine's process learned when it loaded.
        """
        self._listener = listener

    def learn_status(self) -> ServerLearnStatus:
        """What the drafter had learned when the engine was last read."""
        return self._learn_status

    async def read(self, take: Take[T]) -> T:
        """As in `ServedEngine`; `take` is called in the event loop."""
        state = await self._state()
        self._learn_status = state.learning or ServerLearnStatus()
        return take(state.stats, state.report)

    @property
    def has_stopped(self) -> bool:
        return self._stopped is not None

    @property
    def is_ready(self) -> bool:
        """False while another process is being started, too."""
        return self._stopped is None and self._restarting is None

    # --- as `EngineClient` --------------------------------------------------------------------------------------

    async def begin(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        put: Put,
        *,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        emitted: Seq[EmittedTokens] = (),
    ) -> RequestHandle:
        """As in `EngineClient`; raises `EngineBusyError` too, where the engine does not keep up with reading."""
        self._attach()
        number = next(self._numbers)
        name = request_id if request_id is not None else f"async-{number}"
        params = self._preparer.params_of(params, emitted)
        aborts = self._waiting.setdefault(name, [])
        try:
            request = await self._preparer.prepare(prompt, params, options, emitted)
            while self._restarting is not None:
                await asyncio.shield(self._restarting)
        finally:
            if self._waiting.get(name) is aborts:
                del self._waiting[name]
        if self._stopped is not None:
            raise EngineStoppedError(f"the engine has stopped: {self._stopped}")
        if self._outbox.is_full:
            raise EngineBusyError("the engine is busy: too much is on its way to it; try again")
        call = self._preparer.call(number, name, request, put, aborted=bool(aborts))
        try:
            data = call.frames()
        except ProtocolError as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        self._calls[number] = call
        self._write(data)

        def leave() -> None:
            if self._calls.pop(number, None) is not None and self._stopped is None:
                self._send(CancelRequest(number, reports=False))

        def set_paused(paused: bool) -> None:
            call.paused = paused
            if number in self._calls and self._stopped is None:
                self._send(Flow(number, paused))

        return RequestHandle(leave, set_paused)

    def encode_chat(self, messages: Seq[dict[str, Any]]) -> list[int]:
        return encode_chat(self.tokenizer, messages)

    async def check_grammar(self, structured: StructuredOutput, tenant: str = "") -> None:
        await asyncio.wrap_future(self._preparer.grammars.check(structured, tenant))

    async def abort(self, request_id: str) -> None:
        if request_id in self._waiting:
            self._waiting[request_id].append(1)
        for number, call in self._calls.items():
            if call.submit.request_id == request_id:
                call.aborted = True  # the process may die before it has acted
                self._send(CancelRequest(number, reports=True))

    async def stats(self) -> EngineStats:
        return (await self._state()).stats

    async def control_report(self) -> ControlReport:
        """What speculation gains, as `Engine.control_report`."""
        return (await self._state()).report

    def close(self) -> None:
        self._closing = True
        self._link.end()
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._on_close)
                return
        self._on_close()

    def _on_close(self) -> None:
        self._stop(EngineStoppedError("the engine was closed"))
        self._detach()

    def _detach(self) -> None:
        """Read and write the stream no more."""
        sock = self._link.socket
        if sock.fileno() >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(sock)
                self._loop.remove_writer(sock)
            sock.close()

    # --- the stream ---------------------------------------------------------------------------------------------

    def _use(self, link: EngineLink) -> None:
        self._link = link
        link.socket.setblocking(False)
        self._outbox = Outbox(link.socket, MAX_UNSENT_BYTES)

    def _attach(self) -> None:
        """Read the stream in the running event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("an engine in another process is used from one event loop")
        self._loop = loop
        if self._stopped is None:
            loop.add_reader(self._link.socket, self._on_readable)

    def _send(self, message: EngineMessage) -> None:
        self._write(CODEC.frame(message))

    def _write(self, data: bytes) -> None:
        if self._restarting is not None:
            return  # what is under way then is submitted again
        try:
            self._outbox.put(data)
        except OSError:
            return  # reading will tell
        if self._outbox.num_bytes and self._loop is not None:
            self._loop.add_writer(self._link.socket, self._on_writable)

    def _on_writable(self) -> None:
        with contextlib.suppress(OSError):
            self._outbox.flush()
            if self._outbox.num_bytes:
                return
        assert self._loop is not None
        self._loop.remove_writer(self._link.socket)

    def _on_readable(self) -> None:
        try:
            data = self._link.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        try:
            for body in self._link.frames.add(data):
                self._take(CODEC.read(body))
        except ProtocolError as error:
            logger.error("the engine's process is not understood: %s", error)
            self._lost()
        except Exception:  # half of a message was followed: what comes behind it would not fit
            logger.exception("a message of the engine's process could not be followed; the process is left")
            self._lost()

    def _take(self, message: EngineMessage) -> None:
        match message:
            case Steps():
                if self._listener is not None:
                    for step, rows in steps_of(message):
                        self._listener.on_step(step, rows)
                for number, update in message.updates:
                    self._pass_on(number, update)
            case Refused():
                call = self._calls.pop(message.id, None)
                if call is not None:
                    call.put(error_in(message.error, message.message))
            case State():
                waiting = self._reads.pop(message.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Stopped():
                logger.error("the engine's process: %s", message.message)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is not expected here")

    def _pass_on(self, number: int, update: AnswerUpdate) -> None:
        call = self._calls.get(number)
        if call is None:
            return  # no caller waits for it any more
        answer = call.answers[update.index]
        if answer.finish_reason is not None and update.end is None:
            return  # another process has said so before
        name, prompt = call.submit.request_id, call.submit.token_ids
        pieces = answer.add(update)
        output = None
        if update.end is not None:
            del self._calls[number]
            output = output_of(name, call.prompt, prompt, call.answers, update.end, self._texts)
        call.put(update_in(name, update, pieces, output))

    async def _state(self) -> State:
        self._attach()
        if self._stopped is not None:
            raise EngineStoppedError(f"the engine has stopped: {self._stopped}")
        if self._restarting is not None:
            raise EngineStoppedError("the engine is being started again")
        number = next(self._numbers)
        waiting: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._reads[number] = waiting
        self._send(Read(number))
        try:
            return await waiting
        finally:
            self._reads.pop(number, None)

    # --- the process's end --------------------------------------------------------------------------------------

    def _lost(self) -> None:
        """The stream has ended, or what comes on it cannot be read."""
        self._link.close()
        self._detach()
        for waiting in self._reads.values():
            if not waiting.done():
                waiting.set_exception(EngineStoppedError("the engine's process has ended"))
        if self._closing:
            self._stop(EngineStoppedError("the engine was closed"))
            return
        assert self._loop is not None
        self._restarting = self._loop.create_task(self._recover())

    async def _recover(self) -> None:
        """Have another process go on with what is under way, or end it with an error."""
        try:
            how = await asyncio.to_thread(self._link.end)
            died = f"the engine's process has ended: {how}"
            logger.error("%s, with %d requests under way", died, len(self._calls))
            for number, call in list(self._calls.items()):
                if not call.note_death(self.info):
                    del self._calls[number]
                    call.put(EngineStoppedError(died))
            now_s = time.monotonic()
            while self._restarts and now_s - self._restarts[0] > RESTART_WINDOW_S:
                self._restarts.popleft()
            if self._restart is None or len(self._restarts) >= self._max_restarts or self._closing:
                self._stop(EngineStoppedError(died))
                return
            self._restarts.append(now_s)
            logger.warning("another process is started for the engine")
            link = await asyncio.to_thread(self._restart)
            if self._closing:
                link.end()
                return
            differences = self.info.differences(link.info)
            if differences:
                link.end()
                raise EngineStoppedError(f"it loaded another engine than before: {differences}")
            self.info = link.info
            self._use(link)
            assert self._loop is not None
            self._loop.add_reader(link.socket, self._on_readable)
        except Exception as error:
            logger.exception("the engine's process cannot be started again")
            self._stop(EngineStoppedError(f"the engine's process cannot be started again: {error}"))
            return
        finally:
            self._restarting = None
        self.num_restarts += 1
        for number, call in list(self._calls.items()):
            try:
                self._write(call.frames())
            except ProtocolError as error:
                del self._calls[number]
                call.put(EngineStoppedError(f"another process cannot go on with it: {error}"))
        logger.warning("the engine is back, with %d requests that go on", len(self._calls))

    def _stop(self, error: EngineStoppedError) -> None:
        self._stopped = self._stopped or error
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.put(error)
