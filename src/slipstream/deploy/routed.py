"""An engine of many replicas: it takes what `AsyncEngine` takes and gives what that gives."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.request import (
    DEFAULT_OPTIONS,
    FinishReason,
    RequestOptions,
    TokenLogprob,
    tenant_account,
)
from slipstream.deploy.prefixes import blocks_of
from slipstream.deploy.protocol import BeginRequest
from slipstream.deploy.relay import Passage, Relay
from slipstream.deploy.work import Work
from slipstream.engine.client import RequestHandle
from slipstream.engine.logprobs import TokenTexts
from slipstream.engine.outputs import Update
from slipstream.engine.unread import UnreadUpdates
from slipstream.errors import SlipstreamError
from slipstream.sampling.noise import derive_seed, draw_seed
from slipstream.sampling.params import SamplingParams
from slipstream.serve.process.answers import (
    AnswerEnd,
    AnswerRecord,
    AnswerUpdate,
    RequestEnd,
    output_of,
    params_out,
    update_in,
)

Item = Update | SlipstreamError


class RoutedEngine:
    """Requests over a relay. An answer that goes on elsewhere under way has no seam: its updates follow one another."""

    def __init__(self, relay: Relay, tokenizer: Any) -> None:
        self.relay = relay
        self._texts = TokenTexts(tokenizer)
        self._ids = itertools.count()
        self._aborts: dict[str, Callable[[], None]] = {}
        """By the id of a request under way."""

    def begin(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        put: Callable[[Item], None],
        *,
        request_id: str | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        timeout_s: float | None = None,
        on_seam: Callable[[int, bool], None] | None = None,
    ) -> RequestHandle:
        """`put` is called in this event loop with each update, or with the error that ends the request.

        `timeout_s` is the request's deadline; `on_seam` is called at the end with how often it was moved and whether to
        unlike arithmetic. Raises `OverloadedError` where the request is not taken.
        """
        params = _with_seed(params)
        name = request_id or f"routed-{uuid.uuid4().hex}-{next(self._ids)}"
        answers = [AnswerRecord(params) for _ in range(params.n)]

        def receive(item: AnswerUpdate | SlipstreamError) -> None:
            if isinstance(item, SlipstreamError):
                self._aborts.pop(name, None)
                put(item)
                return
            pieces = answers[item.index].add(item)
            output = None
            if item.end is not None:
                if on_seam is not None:
                    on_seam(passage.num_moves, passage.crossed_unlike)
                self._aborts.pop(name, None)
                output = output_of(name, None, list(prompt), answers, item.end, self._texts)
            put(update_in(name, item, pieces, output))

        begin = BeginRequest(name, 0, list(prompt), params_out(params), options)
        passage = Passage(begin, answers, receive)
        begun = self.relay.begin(self._work(begin, params, timeout_s), passage)

        def leave() -> None:
            self._aborts.pop(name, None)
            begun.leave()

        def abort() -> None:
            leave()
            for update in aborted_updates(begin, params, answers, self._texts):
                put(update)

        if self.relay.router.ticket(name) is not None:  # else it has ended already
            self._aborts[name] = abort
        return RequestHandle(leave, begun.set_paused)

    def _work(self, begin: BeginRequest, params: SamplingParams, timeout_s: float | None) -> Work:
        """The request as the router sees it."""
        options = begin.options
        return Work(
            id=begin.id,
            blocks=blocks_of(begin.token_ids, options.tenant, self.relay.router.config.block_tokens),
            tenant=options.tenant,
            account=tenant_account(options.tenant) if self.relay.by_account else "",
            task=options.task,
            num_answers=params.n,
            num_prompt_tokens=len(begin.token_ids),
            min_tokens=max(params.min_tokens, 1),
            deadline_s=None if timeout_s is None else time.monotonic() + timeout_s,
        )

    def abort(self, request_id: str) -> None:
        """End a request: it gets a last update with `finish_reason` abort. Unknown ids are ignored."""
        abort = self._aborts.get(request_id)
        if abort is not None:
            abort()

    async def stream(
        self, prompt: Seq[int], params: SamplingParams, **keywords: Any
    ) -> AsyncIterator[Update]:
        """The request's updates as they come; keywords and errors as for `begin`. Leaving it early aborts it, and where
        it is not read no more are made beyond a bound (`unread`)."""
        updates = UnreadUpdates[Item]()

        def put(item: Item) -> None:
            updates.put(item, 0 if isinstance(item, SlipstreamError) else len(item.token_ids))

        request = self.begin(prompt, params, put, **keywords)
        updates.of(request)
        try:
            while True:
                item = await updates.get()
                if isinstance(item, SlipstreamError):
                    raise item
                yield item
                if item.output is not None:
                    return
        finally:
            request.leave()


def aborted_updates(
    begin: BeginRequest, params: SamplingParams, answers: Seq[AnswerRecord], texts: TokenTexts
) -> list[Update]:
    """The last updates of a request that is aborted: what was passed on is all of its answers. Steps and times are
    with the replica, and are not counted."""
    assert params.seed is not None
    ends: list[AnswerEnd] = []
    for index, answer in enumerate(answers):
        metrics = RequestMetrics(
            num_prompt_tokens=len(begin.token_ids),
            num_output_tokens=len(answer.token_ids),
            seed=derive_seed(params.seed, index),
            lossy=begin.options.reasoning is not None,
        )
        ends.append(AnswerEnd("", answer.finish_reason or FinishReason.ABORT, None, metrics.seed, metrics))
    output = output_of(begin.id, None, begin.token_ids, answers, RequestEnd(ends, None), texts)
    going_on = [index for index, answer in enumerate(answers) if answer.finish_reason is None]
    logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
    return [
        Update(
            begin.id, index, [], [], logprobs, FinishReason.ABORT, output if index == going_on[-1] else None
        )
        for index in going_on
    ]


def _with_seed(params: SamplingParams) -> SamplingParams:
    """`params` with a seed, which a replica that goes on with the request must use too."""
    if params.seed is None:
        params = params.clone()
        params.seed = draw_seed()
    return params
