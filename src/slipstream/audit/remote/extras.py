"""Requests beside the main ones: streams against whole answers, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import httpx2

from slipstream.audit.findings import AuditCheck
from slipstream.audit.records import AuditAnswer, AuditReply, AuditRequest
from slipstream.audit.remote.side import ServerSide

ExtraCheck = Callable[
    [httpx2.AsyncClient, ServerSide, Seq[AuditRequest], Mapping[int, AuditReply]],
    Coroutine[Any, Any, AuditCheck],
]
"""Asks a side again and compares with its replies."""

NUM_STREAMS = 8
NUM_STOPS = 8
MIN_STOP_CHARACTERS = 3


async def check_streams(
    client: httpx2.AsyncClient,
    side: ServerSide,
    requests: Seq[AuditRequest],
    replies: Mapping[int, AuditReply],
) -> AuditCheck:
    """Ask again, streamed, what is repeated exactly, and compare with the whole answers."""
    check = AuditCheck("streams", "streamed answers against whole ones: text, tokens, usage, finish reason")
    if not side.facts.streams:
        check.skipped = "the server does not stream"
        return check
    for request in _answered(requests, replies)[:NUM_STREAMS]:
        streamed, whole = await side.ask(client, request, stream=True), replies[request.number]
        if streamed.error is not None:
            check.expect(False, f"request {request.number}: {streamed.error}", request.number)
            continue
        fields = ("text", "token_ids", "finish_reason")
        for name in fields:
            one, other = ([getattr(answer, name) for answer in reply.answers] for reply in (streamed, whole))
            if name == "token_ids" and (None in one or None in other):
                continue
            check.expect(
                one == other,
                f"request {request.number}: the streamed {name} is not that of the whole answer",
                request.number,
            )
        if streamed.num_output_tokens is not None:
            check.expect(
                streamed.num_output_tokens == whole.num_output_tokens,
                f"request {request.number}: usage counts {streamed.num_output_tokens} tokens streamed and "
                f"{whole.num_output_tokens} whole",
                request.number,
            )
    if not check.num_compared:
        check.skipped = "no answer is repeated exactly"
    return check


async def check_stops(
    client: httpx2.AsyncClient,
    side: ServerSide,
    requests: Seq[AuditRequest],
    replies: Mapping[int, AuditReply],
) -> AuditCheck:
    """Ask again with a piece of the answer as its stop string: the text must end before it."""
    check = AuditCheck("stop strings", "texts with a stop string against the same text without")
    for request in _answered(requests, replies)[:NUM_STOPS]:
        text = replies[request.number].answers[0].text
        stop = stop_within(text)
        if stop is None or "stop" in request.params:
            continue
        asked = replace(request, params={**request.params, "stop": [stop]})
        reply = await side.ask(client, asked)
        if reply.error is not None:
            check.expect(False, f"request {request.number}: {reply.error}", request.number)
            continue
        expected = text[: text.index(stop)]
        answer: AuditAnswer = reply.answers[0]
        check.expect(
            answer.text == expected,
            f"request {request.number}: with the stop string {stop!r} the text does not end where it begins",
            request.number,
            {"text": answer.text, "expected": expected},
        )
        check.expect(
            answer.finish_reason == "stop",
            f"request {request.number}: an answer ended by a stop string says {answer.finish_reason!r}",
            request.number,
        )
    if not check.num_compared:
        check.skipped = "no answer is repeated exactly"
    return check


def stop_within(text: str) -> str | None:
    """A piece from the middle of the text; None where it is too short."""
    middle = len(text) // 2
    piece = text[middle : middle + MIN_STOP_CHARACTERS]
    return piece if len(piece) == MIN_STOP_CHARACTERS and piece.isascii() and piece.strip() else None


def _answered(requests: Seq[AuditRequest], replies: Mapping[int, AuditReply]) -> list[AuditRequest]:
    """Those with an answer of one."""
    return [
        request
        for request in requests
        if request.num_answers == 1 and request.number in replies and replies[request.number].error is None
    ]
