"""What a caller does with an engine for asyncio, in this process or in another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Unpack

from slipstream.core.metrics.engine import EngineStats
from slipstream.core.request import EmittedTokens, RequestOptions
from slipstream.engine.mailbox import Item, Put
from slipstream.engine.outputs import RequestOutput, Update
from slipstream.engine.requests import RequestKeywords, request_options
from slipstream.engine.unread import UnreadUpdates
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput
from slipstream.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """What the caller of a request that has begun may do with it. Both may be called again, and after its end."""

    leave: Callable[[], None]
    """Aborts the request; `put` is not called any more."""
    set_paused: Callable[[bool], None]
    """True: no more steps are made for it until False, while its reader does not keep up. Its text does not change."""


class EngineClient(ABC):
    """Requests to an engine, from an event loop. `AsyncEngine` has it in a thread of this process."""

    @abstractmethod
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
        """`stream` without an iterator: `put` is called in this event loop with each update, or with what ends them.

        `emitted` continues a request, as in `Engine.add_request`. Raises `RequestError` for a constraint that cannot
        be followed or a long text that cannot be served, and `EngineStoppedError`.
        """

    @abstractmethod
    def encode_chat(self, messages: Seq[dict[str, Any]]) -> list[int]:
        """A conversation, `{"role": ..., "content": ...}` each, as a prompt for `stream` or `generate`."""

    @abstractmethod
    async def check_grammar(self, structured: StructuredOutput, tenant: str = "") -> None:
        """Raise `RequestError` where a part of a larger constraint of `tenant` cannot be followed."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last update with `finish_reason` abort. Unknown ids are ignored."""

    @abstractmethod
    async def stats(self) -> EngineStats:
        """What the engine holds and has counted, between two of its steps; raises `EngineStoppedError`."""

    @property
    @abstractmethod
    def has_stopped(self) -> bool:
        """True once the engine was closed or has failed: it serves no request any more."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine; requests under way end with `EngineStoppedError`. May be called again."""

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        emitted: Seq[EmittedTokens] = (),
        **keywords: Unpack[RequestKeywords],
    ) -> AsyncIterator[Update]:
        """The request's updates as they come; the last one carries the whole `output`.

        Where they are not read, no more are made beyond a bound until they are (`unread`); the text does not change.

        `keywords` (`tenant`, `task`, `max_draft_tokens`, `draft_method`, `prediction`, `learn`) are fields of
        `RequestOptions`; they replace those of `options`. `emitted` continues a request, as in `Engine.add_request`.

        Raises `RequestError` before the first update when the request cannot be served, `EngineStoppedError` when
        the engine stops under way.
        """
        updates = UnreadUpdates[Item]()
        request = await self.begin(
            prompt,
            params,
            lambda item: updates.put(item, 0 if isinstance(item, Exception) else len(item.token_ids)),
            request_id=request_id,
            options=request_options(options, **keywords),
            emitted=emitted,
        )
        updates.of(request)
        finished = False
        try:
            while not finished:
                item = await updates.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.output is not None
                yield item
        finally:
            if not finished:
                request.leave()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        emitted: Seq[EmittedTokens] = (),
        **keywords: Unpack[RequestKeywords],
    ) -> RequestOutput:
        """The finished request; parameters and errors as for `stream`."""
        updates = self.stream(
            prompt,
            params,
            request_id=request_id,
            options=options,
            emitted=emitted,
            **keywords,
        )
        async for update in updates:
            if update.output is not None:
                return update.output
        raise AssertionError("a stream ends with an output or an error")
