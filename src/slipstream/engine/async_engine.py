"""The engine for asyncio: many callers, one thread that steps."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from slipstream.config import SpeculativeConfig
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.engine.inputs import Prompt, encode_chat
from slipstream.engine.outputs import RequestOutput, Update
from slipstream.errors import ConfigError, EngineStoppedError
from slipstream.sampling.grammar import Grammar
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Stream:
    """One caller's queue of updates; an exception in it ends the stream."""

    loop: asyncio.AbstractEventLoop
    updates: asyncio.Queue[Update | BaseException] = field(default_factory=asyncio.Queue)

    def put(self, item: Update | BaseException) -> None:
        """Called from the engine's thread."""
        _hand_over(self.loop, [(self, item)])


def _hand_over(loop: asyncio.AbstractEventLoop, items: Seq[tuple[_Stream, Update | BaseException]]) -> None:
    """Called from the engine's thread: give the streams of one loop what is theirs, and wake it once."""

    def put_all() -> None:
        for stream, item in items:
            stream.updates.put_nowait(item)

    with contextlib.suppress(RuntimeError):  # the callers' loop has closed: nobody listens
        loop.call_soon_threadsafe(put_all)


@dataclass(frozen=True, slots=True)
class _Call:
    """Something for the engine's thread to do between two steps, and whom to tell if it never gets to it."""

    run: Callable[[], None]
    fail: Callable[[EngineStoppedError], None]


class AsyncEngine:
    """Serves any number of concurrent requests; the engine steps in a thread of its own while any are under way.

        async with AsyncEngine("model", speculative_config={"method": "ngram"}) as engine:
            async for update in engine.stream("Once upon a time"):
                print(update.text, end="")

    Made as `LLM` is, or around an `engine` that exists. Leaving a stream early, or cancelling the task that reads
    it, aborts the request and frees what it holds.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        engine: Engine | None = None,
        **engine_options: Any,
    ) -> None:
        if engine is None:
            engine = make_engine(model, speculative_config, engine_options)
        elif model is not None or speculative_config is not None or engine_options:
            raise ConfigError("give an engine or what to make one of, not both")
        self.engine = engine
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # no call is queued once the thread has stopped taking them
        self._stopped: EngineStoppedError | None = None
        self._streams: dict[str, _Stream] = {}
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        task: str = "",
        max_draft_tokens: int | None = None,
        draft_method: str | None = None,
    ) -> AsyncIterator[Update]:
        """The request's updates as they come; the last one carries the whole `output`.

        Raises `RequestError` before the first update when the request cannot be served, `EngineStoppedError` when
        the engine stops under way.
        """
        name = request_id if request_id is not None else f"async-{next(self._ids)}"
        stream = _Stream(asyncio.get_running_loop())
        grammar: Grammar | None = None
        compiling = self.engine.compile_grammar(params) if isinstance(params, SamplingParams) else None
        if compiling is not None:  # not in the engine's thread, where all others would wait for it
            grammar = await asyncio.wrap_future(compiling)

        def add() -> None:
            try:
                self.engine.add_request(
                    name,
                    prompt,
                    params,
                    tenant=tenant,
                    task=task,
                    max_draft_tokens=max_draft_tokens,
                    draft_method=draft_method,
                    grammar=grammar,
                )
                self._streams[name] = stream
            except Exception as error:
                stream.put(error)

        self._post(add, fail=stream.put)
        finished = False
        try:
            while not finished:
                item = await stream.updates.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.output is not None
                yield item
        finally:
            if not finished:
                with contextlib.suppress(EngineStoppedError):
                    self._post(lambda: self._abort(name, stream))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        task: str = "",
        max_draft_tokens: int | None = None,
        draft_method: str | None = None,
    ) -> RequestOutput:
        """The finished request; parameters and errors as for `stream`."""
        updates = self.stream(
            prompt,
            params,
            request_id=request_id,
            tenant=tenant,
            task=task,
            max_draft_tokens=max_draft_tokens,
            draft_method=draft_method,
        )
        async for update in updates:
            if update.output is not None:
                return update.output
        raise AssertionError("a stream ends with an output or an error")

    def encode_chat(self, messages: Seq[dict[str, Any]]) -> list[int]:
        """A conversation, `{"role": ..., "content": ...}` each, as a prompt for `stream` or `generate`."""
        return encode_chat(self.engine.tokenizer, messages)

    async def check_grammar(self, structured: StructuredOutput) -> None:
        """Raise `RequestError` where a part of a larger constraint cannot be followed."""
        await asyncio.wrap_future(self.engine.check_grammar(structured))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last update with `finish_reason` abort. Unknown ids are ignored."""
        self._post(lambda: self._abort(request_id))

    async def idle(self) -> None:
        """Wait until no request is under way."""
        while await self.ask(lambda engine: engine.has_unfinished):
            await asyncio.sleep(0.005)

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """What `question` makes of the engine between two steps, when its books are closed.

        Raises `EngineStoppedError` when the engine has stopped, and what `question` raises.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # nobody waits any more
            try:
                answer.set_result(question(self.engine))
            except Exception as error:
                answer.set_exception(error)

        def fail(error: EngineStoppedError) -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)

        self._post(run, fail)
        return await asyncio.wrap_future(answer)

    @property
    def has_stopped(self) -> bool:
        """True once the engine was closed, or failed: it serves nobody any more."""
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

    def _post(
        self, run: Callable[[], None], fail: Callable[[EngineStoppedError], None] = lambda error: None
    ) -> None:
        """Have the engine's thread `run` something between two steps, or `fail` if the engine stops first."""
        with self._lock:
            if self._stopped is not None:
                raise EngineStoppedError(f"the engine has stopped: {self._stopped}")
            self._calls.put(_Call(run, fail))

    def _abort(self, request_id: str, stream: _Stream | None = None) -> None:
        """Engine's thread: end a request, but only the one that `stream` belongs to when that is given."""
        known = self._streams.get(request_id)
        if known is not None and stream in (None, known):
            del self._streams[request_id]
            for update in self.engine.abort(request_id):
                known.put(update)

    def _run(self) -> None:
        """The engine's thread: take calls, step while there is work, wait while there is none."""
        try:
            while True:
                while not self.engine.has_unfinished or not self._calls.empty():
                    call = self._calls.get()
                    if call is None:
                        self._stop(EngineStoppedError("the engine was closed"))
                        return
                    call.run()
                self._deliver(self.engine.step())
        except Exception as error:
            logger.exception("the engine failed; every request under way ends with an error")
            self._stop(EngineStoppedError(f"the engine failed: {error}"))

    def _deliver(self, updates: Seq[Update]) -> None:
        """Engine's thread: give out what a step has added. Every wake-up hands the interpreter's lock to a loop that
        then keeps the next step waiting, so there is one a loop and step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Update | BaseException]]] = {}
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is None:
                continue
            by_loop.setdefault(stream.loop, []).append((stream, update))
            if update.output is not None:
                del self._streams[update.request_id]
        for loop, items in by_loop.items():
            _hand_over(loop, items)

    def _stop(self, error: EngineStoppedError) -> None:
        """Engine's thread, last thing: tell everyone who waits, and refuse whoever comes."""
        with self._lock:
            self._stopped = error
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                call.fail(error)
        for request_id, stream in self._streams.items():
            stream.put(error)
            with contextlib.suppress(Exception):  # a failed engine may not even abort
                self.engine.abort(request_id)
        self._streams.clear()
