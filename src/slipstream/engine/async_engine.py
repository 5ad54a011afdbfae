"""The engine for asyncio: many callers, one thread that steps."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from slipstream.config import SpeculativeConfig
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.request import EmittedTokens, RequestOptions
from slipstream.engine.client import EngineClient, RequestHandle
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.engine.mailbox import Item, Mailbox, Put
from slipstream.engine.requests import request_options
from slipstream.errors import ConfigError, EngineStoppedError
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput
from slipstream.text.prompts import EncodedPrompt, Prompt, encode_chat

T = TypeVar("T")

logger = logging.getLogger(__name__)

SHORT_CHARACTERS = 4096
"""Texts up to this length are tokenised in the engine's thread: it takes a few milliseconds."""


@dataclass(eq=False, slots=True)
class _Caller:
    """Where a request's updates go."""

    mailbox: Mailbox
    put: Put
    has_heard: bool = False
    """Belongs to the engine's thread."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call for the engine's thread to run between two steps, and what to call if the engine stops first."""

    run: Callable[[], None]
    fail: Callable[[EngineStoppedError], None]


class _Waiting:
    """A request before it is added to the engine: its grammar is being compiled, or its text tokenised."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.was_aborted = False
        self._aborted: Future[None] = Future()

    def abort(self) -> None:
        """May be called from any thread, and again."""
        self.was_aborted = True
        with contextlib.suppress(InvalidStateError):
            self._aborted.set_result(None)

    async def grammar(self, compiling: Future[Grammar]) -> Grammar | None:
        """The compiled grammar; None where the request is aborted first, which cancels work that has not begun."""
        aborted, compiled = asyncio.wrap_future(self._aborted), asyncio.wrap_future(compiling)
        try:
            await asyncio.wait((aborted, compiled), return_when=asyncio.FIRST_COMPLETED)
            return await compiled if compiled.done() else None
        finally:
            aborted.cancel()
            compiled.cancel()


@dataclass(slots=True)
class _Post:
    """A step's updates for the callers of one loop."""

    items: list[tuple[Put, Item]] = field(default_factory=list)
    urgent: bool = False


class AsyncEngine(EngineClient):
    """Serves any number of concurrent requests; the engine steps in a thread of its own while any are under way.

        async with AsyncEngine("model", speculative_config={"method": "ngram"}) as engine:
            async for update in engine.stream("Once upon a time"):
                print(update.text, end="")

    Made as `LLM` is, or around an `engine` that exists. Leaving a stream early, or cancelling the task that reads
    it, aborts the request and frees what it holds. Updates that follow one another within `stream_interval_s` come as
    one; first and last ones come at once.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        engine: Engine | None = None,
        stream_interval_s: float = 0.0,
        **engine_options: Any,
    ) -> None:
        if not stream_interval_s >= 0:
            raise ConfigError(f"stream_interval_s must be at least 0, got {stream_interval_s}")
        if engine is None:
            engine = make_engine(model, speculative_config, engine_options)
        elif model is not None or speculative_config is not None or engine_options:
            raise ConfigError("give either an engine or a model with its options, not both")
        self.engine = engine
        self._stream_interval_s = stream_interval_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # no call is queued once the thread has stopped taking them
        self._stopped: EngineStoppedError | None = None
        self._waiting: set[_Waiting] = set()
        self._mailboxes: WeakValueDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakValueDictionary()
        # What follows belongs to the engine's thread.
        self._callers: dict[str, _Caller] = {}
        self._held: dict[Mailbox, _Post] = {}
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()

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
        """As in `EngineClient`."""
        name = request_id if request_id is not None else f"async-{next(self._ids)}"
        caller = _Caller(self._mailbox(), put)
        waiting = _Waiting(name)
        params = self.engine.intake.default_params() if params is None else params
        if isinstance(params, SamplingParams):
            params = params.clone()  # the caller may go on to change its own

        def add() -> None:
            try:
                self.engine.add_request(
                    name,
                    encoded,
                    # An aborted request is added for its last updates only, which need no grammar.
                    replace(params, structured=None) if waiting.was_aborted else params,
                    options,
                    grammar=grammar,
                    emitted=emitted,
                )
                self._callers[name] = caller
                if waiting.was_aborted:
                    self._abort(name, caller)
            except BaseException as error:
                self._hold(caller, _as_exception(error))

        self._waiting.add(waiting)
        try:
            encoded, grammar = await self._prepared(prompt, params, options, waiting)
            self._post(add, fail=lambda error: self._hold(caller, error))
        finally:
            self._waiting.discard(waiting)
        return self._handle(name, caller)

    async def _prepared(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions | None,
        waiting: _Waiting,
    ) -> tuple[Prompt | EncodedPrompt, Grammar | None]:
        """The prompt encoded and the grammar compiled, as far as that takes long: in other threads than the engine's,
        where all would wait for it."""
        if not isinstance(params, SamplingParams):
            return prompt, None
        given = request_options(options)
        compiling = self.engine.intake.compile_grammar(params, tenant=given.tenant)
        grammar = None if compiling is None else await waiting.grammar(compiling)
        if not _takes_long_to_encode(prompt, params, given):
            return prompt, grammar
        return await asyncio.to_thread(self.engine.intake.encode, prompt, params, given), grammar

    def _handle(self, name: str, caller: _Caller) -> RequestHandle:
        def leave() -> None:
            with contextlib.suppress(EngineStoppedError):
                self._post(lambda: self._abort(name, caller))

        def set_paused(paused: bool) -> None:
            with contextlib.suppress(EngineStoppedError):
                self._post(lambda: self._set_paused(name, caller, paused))

        return RequestHandle(leave, set_paused)

    def encode_chat(self, messages: Seq[dict[str, Any]]) -> list[int]:
        """A conversation, `{"role": ..., "content": ...}` each, as a prompt for `stream` or `generate`."""
        return encode_chat(self.engine.tokenizer, messages)

    async def check_grammar(self, structured: StructuredOutput, tenant: str = "") -> None:
        """Raise `RequestError` where a part of a larger constraint cannot be followed."""
        await asyncio.wrap_future(self.engine.intake.check_grammar(structured, tenant))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last update with `finish_reason` abort. Unknown ids are ignored."""
        for waiting in [waiting for waiting in tuple(self._waiting) if waiting.request_id == request_id]:
            waiting.abort()
        self._post(lambda: self._abort(request_id))

    async def idle(self) -> None:
        """Wait until no request is under way."""
        while await self.ask(lambda engine: engine.has_unfinished):
            await asyncio.sleep(0.005)

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """The result of `question`, called with the engine between two steps, when its state is consistent.

        Raises `EngineStoppedError` when the engine has stopped, and what `question` raises.
        """
        return await asyncio.wrap_future(self._asked(question))

    def between_steps(self, change: Callable[[Engine], T]) -> T:
        """As `ask`, for threads without an event loop: waits. Never to be called in the engine's own thread."""
        return self._asked(change).result()

    def _asked(self, question: Callable[[Engine], T]) -> Future[T]:
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # the caller was cancelled
            try:
                answer.set_result(question(self.engine))
            except BaseException as error:
                answer.set_exception(_as_exception(error))

        def fail(error: EngineStoppedError) -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)

        self._post(run, fail)
        return answer

    async def stats(self) -> EngineStats:
        """What the engine holds and has counted, between two of its steps; raises `EngineStoppedError`."""
        return await self.ask(Engine.stats)

    @property
    def has_stopped(self) -> bool:
        """True once the engine was closed or has failed: it serves no request any more."""
        return self._stopped is not None

    def close(self) -> None:
        """Stop the thread; requests under way end with `EngineStoppedError`. May be called again."""
        self._calls.put(None)
        self._thread.join()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    # --- between the callers and the engine's thread ----------------------------------------------------------

    def _mailbox(self) -> Mailbox:
        """The mailbox of the running event loop; it is dropped with the last of its callers."""
        loop = asyncio.get_running_loop()
        with self._lock:
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                mailbox = self._mailboxes[loop] = Mailbox(loop, self._stream_interval_s)
        return mailbox

    def _post(
        self, run: Callable[[], None], fail: Callable[[EngineStoppedError], None] = lambda error: None
    ) -> None:
        """Have the engine's thread `run` something between two steps, or `fail` if the engine stops first."""
        with self._lock:
            if self._stopped is not None:
                raise EngineStoppedError(f"the engine has stopped: {self._stopped}")
            self._calls.put(_Call(run, fail))

    def _run(self) -> None:
        """The engine's thread: take calls, step while there is work, wait while there is none."""
        try:
            while True:
                while not self.engine.has_work or not self._calls.empty():
                    call = self._calls.get()
                    if call is None:
                        self._stop(EngineStoppedError("the engine was closed"))
                        return
                    call.run()
                    self._give_out()
                self._step()
        except BaseException as error:  # such as a panic of a library written in Rust, which is no Exception
            logger.exception("the engine failed; every request under way ends with an error")
            self._stop(EngineStoppedError(f"the engine failed: {error}"))

    # --- in the engine's thread -------------------------------------------------------------------------------

    def _step(self) -> None:
        for update in self.engine.step():
            caller = self._callers.get(update.request_id)
            if caller is not None:
                self._hold(caller, update)
                if update.output is not None:
                    del self._callers[update.request_id]
        self._give_out()

    def _hold(self, caller: _Caller, item: Item) -> None:
        """Keep an item until it is delivered; all items go this way, so their order is kept."""
        post = self._held.setdefault(caller.mailbox, _Post())
        post.items.append((caller.put, item))
        post.urgent |= not caller.has_heard or isinstance(item, Exception) or item.finish_reason is not None
        caller.has_heard = True

    def _give_out(self) -> None:
        """Deliver what is held, in one call for each event loop."""
        while self._held:
            mailbox, post = self._held.popitem()
            mailbox.post(post.items, post.urgent)

    def _abort(self, request_id: str, caller: _Caller | None = None) -> None:
        """End a request, but only the one that `caller` has begun when that is given."""
        known = self._callers.get(request_id)
        if known is not None and caller in (None, known):
            del self._callers[request_id]
            for update in self.engine.abort(request_id):
                self._hold(known, update)

    def _set_paused(self, request_id: str, caller: _Caller, paused: bool) -> None:
        if self._callers.get(request_id) is caller:
            (self.engine.pause if paused else self.engine.resume)(request_id)

    def _stop(self, error: EngineStoppedError) -> None:
        """End every request under way with `error`, and refuse new ones."""
        with self._lock:
            self._stopped = error
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                call.fail(error)
        for request_id, caller in self._callers.items():
            self._hold(caller, error)
            with contextlib.suppress(BaseException):  # a failed engine may not even abort
                self.engine.abort(request_id)
        self._callers.clear()
        self._give_out()


def _takes_long_to_encode(prompt: Prompt, params: SamplingParams, options: RequestOptions) -> bool:
    """True for texts that would delay the engine's steps, or the other callers of the event loop."""
    text: Any = prompt
    if isinstance(prompt, Mapping):
        if "audio" in prompt:
            return True
        text = prompt.get("encoder_prompt", prompt.get("prompt"))
    num_characters = len(text) if isinstance(text, str) else 0
    num_characters += len(options.prediction or "")
    return num_characters + sum(map(len, params.bad_words)) > SHORT_CHARACTERS


def _as_exception(error: BaseException) -> Exception:
    """The error for callers. A `BaseException` of another kind would end the caller's event loop too."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
