"""The engine's side: one thread that reads requests, steps, and writes what the steps made."""

from __future__ import annotations

import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import TypeVar

from slipstream.core.metrics.decoded import DecodedRow
from slipstream.core.metrics.step import StepReport
from slipstream.core.step import StepItem
from slipstream.engine.engine import Engine
from slipstream.engine.outputs import Update
from slipstream.errors import EngineStoppedError, ProtocolError, RequestError
from slipstream.learn.server_status import ServerLearnStatus
from slipstream.rpc.codec import error_out
from slipstream.rpc.frames import Frames
from slipstream.rpc.sockets import Outbox, Waker
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.sampling.params import SamplingParams
from slipstream.serve.accounts import Accounts, TaskLabels
from slipstream.serve.engine_info import decoded_rows
from slipstream.serve.process.answers import params_in, update_out
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
    Submit,
)
from slipstream.text.prompts import EncodedPrompt

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 32 * 2**20
"""The most that may wait for the server to read it; beyond it the engine makes no step."""
STALLED_S = 60.0
"""A server that reads nothing for so long is taken for dead."""
_READ_BYTES = 2**20


@dataclass(slots=True)
class _Served:
    """A request of the server's."""

    submit: Submit
    params: SamplingParams
    compiling: Future[Grammar] | None
    """Until the engine has it."""
    is_known: bool = False
    """To the server: its first update must not wait."""
    paused: bool = False
    """As the server said last; passed to the engine once it has the request."""

    @property
    def id(self) -> int:
        return self.submit.id


@dataclass(slots=True)
class _Made:
    """What steps have made and is not written yet."""

    reports: list[StepReport] = field(default_factory=list)
    rows: list[DecodedRow] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    updates: dict[tuple[int, int], Update] = field(default_factory=dict)
    """By request and answer; of the same answer the later one is joined to the earlier."""
    urgent: bool = False


class _Phase(Enum):
    """What `EngineHost.run` is doing."""

    BEFORE = auto()
    RUNS = auto()
    ENDED = auto()


class _ServerLeftError(Exception):
    """The server's process has closed the stream, or ended."""


class EngineHost:
    """Serves one server until it leaves; then everything that it requested is dropped."""

    def __init__(
        self,
        engine: Engine,
        sock: socket.socket,
        frames: Frames,
        *,
        has_keys: bool = False,
        stream_interval_s: float = 0.0,
    ) -> None:
        """`frames` may hold the beginning of a message that was read with the ones before."""
        self._engine = engine
        self._socket = sock
        self._frames = frames
        self._interval_s = stream_interval_s
        self._outbox = Outbox(sock, MAX_UNREAD_BYTES)
        self._served: dict[str, _Served] = {}
        self._names: dict[int, str] = {}
        """Engine's request id by the server's number."""
        self._compiled: queue.SimpleQueue[_Served] = queue.SimpleQueue()
        self._changes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._phase_lock = threading.Lock()
        self._phase = _Phase.BEFORE
        self.learn_status: Callable[[], ServerLearnStatus] | None = None
        """What the drafter has learned, where it does."""
        self._waker = Waker()
        self._made = _Made()
        self._sent_s = 0.0
        self._step_s = 0.0
        accounts = Accounts(has_keys, partial(TaskLabels, (), 0))  # labels are the server's
        self._group = accounts.name_of
        engine.on_step = self._on_step
        engine.on_observe = self._on_observe
        engine.group_tasks_by(accounts.name_of, accounts.task)
        engine.shares_by_account = accounts.are_kept_apart
        sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the server closes or is gone. Raises what the engine raises, after it has notified the server."""
        with self._phase_lock:
            self._phase = _Phase.RUNS
        try:
            while True:
                self._receive()
                if self._engine.has_work:
                    self._step()
        except _ServerLeftError:
            return
        except OSError as error:
            logger.warning("the server cannot be reached any more: %s", error)
        except BaseException as error:  # such as a panic of a library written in Rust, which is no Exception
            self._tell(error)
            raise
        finally:
            self._drop()

    @property
    def engine(self) -> Engine:
        """What is served."""
        return self._engine

    def between_steps(self, change: Callable[[Engine], T]) -> T:
        """What `change` returns, called with the engine between two steps; waits, so never in the thread of `run`.

        Before `run` it is called at once. Raises `EngineStoppedError` after it, and what `change` raises.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if self._phase is _Phase.ENDED:
                answer.set_exception(EngineStoppedError("the engine has stopped: its server has left"))
                return
            try:
                answer.set_result(change(self._engine))
            except Exception as error:
                answer.set_exception(error)

        with self._phase_lock:
            if self._phase is _Phase.RUNS:
                self._changes.put(run)
                self._waker.wake()
            else:
                run()
        return answer.result()

    # --- requests -----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take what has come; wait for something while there is nothing to do."""
        while True:
            self._wait()
            try:
                data = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                data = None
            if data is not None:
                if not data:
                    raise _ServerLeftError
                for body in self._frames.add(data):
                    self._take(CODEC.read(body))
            while not self._compiled.empty():
                self._add_compiled(self._compiled.get())
            while not self._changes.empty():
                self._changes.get()()
            if self._engine.has_work and not self._outbox.is_full:
                return

    def _wait(self) -> None:
        """Until something comes, or can be written; not at all while the engine has work and room for its results."""
        waits = bool(self._outbox.num_bytes)
        if self._engine.has_work and not self._outbox.is_full:
            if waits:
                self._outbox.flush()
            self._waker.clear()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
        self._selector.modify(self._socket, events)
        found = self._selector.select(STALLED_S if waits else None)
        if waits:
            before = self._outbox.num_bytes
            self._outbox.flush()
            if not found and self._outbox.num_bytes == before:
                raise OSError(f"it has read nothing for {STALLED_S:g} s")
        self._waker.clear()

    def _take(self, message: EngineMessage) -> None:
        match message:
            case Submit():
                self._submit(message)
            case CancelRequest():
                self._cancel(message)
            case Flow():
                self._set_paused(message)
            case Read():
                learned = None if self.learn_status is None else self.learn_status()
                stats, report = self._engine.stats(), self._engine.control_report()
                self._write(State(message.number, stats, report, learned))
            case _:
                raise ProtocolError(f"a {type(message).__name__} is not expected here")

    def _submit(self, submit: Submit) -> None:
        try:
            params = params_in(submit.params)
            compiling = self._engine.intake.compile_grammar(params, submit.tried_bytes, submit.options.tenant)
        except Exception as error:
            self._refuse(submit.id, error)
            return
        if submit.request_id in self._served:
            self._refuse(submit.id, ProtocolError(f"request id {submit.request_id!r} is in use"))
            return
        served = _Served(submit, params, compiling)
        self._served[submit.request_id] = served
        self._names[submit.id] = submit.request_id
        if compiling is None:
            self._add(served, None)
        else:
            compiling.add_done_callback(lambda _: self._on_compiled(served))

    def _on_compiled(self, served: _Served) -> None:
        """Called in the compiling thread, or in this one where the grammar was there."""
        self._compiled.put(served)
        self._waker.wake()

    def _add_compiled(self, served: _Served) -> None:
        compiling, served.compiling = served.compiling, None
        if compiling is None or served.id not in self._names:
            return  # it was cancelled
        try:
            grammar = compiling.result()
        except Exception as error:
            self._forget(served)
            self._refuse(served.id, error)
        else:
            self._add(served, grammar)

    def _add(self, served: _Served, grammar: Grammar | None) -> None:
        submit = served.submit
        given = submit.encoder_input
        prompt = EncodedPrompt(
            None, submit.token_ids, submit.bad_words, encoder_input=None if given is None else given.input()
        )
        try:
            if submit.options.prediction is not None:  # tokens, but for those that begin within another one
                prompt = replace(prompt, expected=self._engine.intake.expected(submit.options.prediction))
            self._engine.add_request(
                submit.request_id,
                prompt,
                served.params,
                submit.options,
                grammar=grammar,
                emitted=submit.emitted,
            )
            if served.paused:  # meanwhile its grammar was compiled
                self._engine.pause(submit.request_id)
        except Exception as error:
            self._forget(served)
            self._refuse(served.id, error)

    def _cancel(self, request: CancelRequest) -> None:
        name = self._names.get(request.id)
        if name is None:
            return
        served = self._served[name]
        if served.compiling is not None:
            served.compiling.cancel()
            served.compiling = None
            if request.reports:  # the engine gives its last updates, which need no grammar
                served.params = replace(served.params, structured=None)
                self._add(served, None)
                if name not in self._served:
                    return  # it was refused
        updates = self._engine.abort(name)
        if request.reports:
            for update in updates:
                self._hold(served, update)
        else:
            for key in [key for key in self._made.updates if key[0] == request.id]:
                del self._made.updates[key]
        self._forget(served)
        self._give_out()

    def _set_paused(self, flow: Flow) -> None:
        name = self._names.get(flow.id)
        if name is not None:
            self._served[name].paused = flow.paused
            (self._engine.pause if flow.paused else self._engine.resume)(name)
            self._give_out()  # the next step may be long in coming

    def _refuse(self, id_: int, error: Exception) -> None:
        self._write(Refused(id_, *error_out(error)))

    def _forget(self, served: _Served) -> None:
        self._served.pop(served.submit.request_id, None)
        self._names.pop(served.id, None)

    # --- steps --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        started_s = time.perf_counter()
        for update in self._engine.step():
            served = self._served.get(update.request_id)
            if served is not None:
                self._hold(served, update)
                if update.output is not None:
                    self._forget(served)
        now_s = time.perf_counter()
        self._step_s = now_s - started_s
        # What is held back now waits for another step at least.
        if self._made.urgent or now_s + self._step_s - self._sent_s >= self._interval_s:
            self._give_out()

    def _hold(self, served: _Served, update: Update) -> None:
        key = served.id, update.index
        before = self._made.updates.pop(key, None)
        self._made.updates[key] = update if before is None else before.joined(update)
        self._made.urgent |= not served.is_known or update.finish_reason is not None
        served.is_known = True

    def _on_observe(self, items: list[StepItem]) -> None:
        rows = decoded_rows(items, self._group)
        self._made.rows += rows
        self._made.lengths.append(len(rows))

    def _on_step(self, report: StepReport) -> None:
        self._made.reports.append(report)

    def _give_out(self) -> None:
        made = self._made
        if made.reports or made.updates:
            self._made = _Made()
            self._sent_s = time.perf_counter()
            updates = [(id_, update_out(update)) for (id_, _), update in made.updates.items()]
            self._write_steps(Steps(made.reports, made.rows, made.lengths, updates))

    def _write_steps(self, steps: Steps) -> None:
        """Write what steps have made. An update that no message holds ends its request with an error, and no other."""
        try:
            self._write(steps)
        except ProtocolError as error:
            if not steps.updates:
                raise
            if len(steps.updates) > 1:
                for number, update in enumerate(steps.updates):
                    counted = (steps.reports, steps.rows, steps.lengths) if number == 0 else ([], [], [])
                    self._write_steps(Steps(*counted, [update]))
                return
            self._write(Steps(steps.reports, steps.rows, steps.lengths, []))
            [(number, _)] = steps.updates
            if number in self._names:
                name = self._names[number]
                self._engine.abort(name)
                self._forget(self._served[name])
            self._refuse(
                number, RequestError(f"the answer cannot be sent: {error}; ask for fewer log-probabilities")
            )

    def _write(self, message: EngineMessage) -> None:
        self._outbox.put(CODEC.frame(message))

    # --- the end ------------------------------------------------------------------------------------------------

    def _tell(self, error: BaseException) -> None:
        """Tell the server why the engine ends, as far as it still listens."""
        try:
            self._socket.setblocking(True)
            self._socket.settimeout(5.0)
            self._outbox.put(CODEC.frame(Stopped(f"the engine failed: {error}")))
        except Exception:
            logger.debug("the server does not listen any more", exc_info=True)

    def _drop(self) -> None:
        """Drop what is read no more."""
        with self._phase_lock:
            self._phase = _Phase.ENDED
        while not self._changes.empty():
            self._changes.get()()
        self._engine.on_step = self._engine.on_observe = None
        for name in list(self._served):
            try:
                self._engine.abort(name)
            except Exception:  # a failed engine may not even abort
                logger.debug("a request could not be aborted", exc_info=True)
        self._selector.close()
        self._waker.close()
        self._socket.close()
