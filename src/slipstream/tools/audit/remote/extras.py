"""Requests in addition to the main ones: streams against whole answers, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import httpx2

from slipstream.tools.audit.findings import AuditCheck
from slipstream.tools.audit.records import AuditAnswer, AuditReply, AuditRequest
from slipstream.tools.audit.remote.side import ServerSide

ExtraCheck = Callable[
    [httpx2.AsyncClient, ServerSide, Seq[AuditRequest], Mapping[int, AuditReply]],
    Coroutine[Any, Any, AuditCheck],
]
"""Sends requests to a side again and compares with its replies."""

NUM_STREAMS = 8
NUM_STOPS = 8
MIN_STOP_CHARACTERS = 3


async def check_streams(
    client: httpx2.AsyncClient,
    side: ServerSide,
    requests: Seq[AuditRequest],
    replies: Mapping[int, AuditReply],
) -> AuditCheck:
    """Send again, streamed, what is repeated exactly, and compare with the whole answers."""
    check = AuditCheck("streams", "streamed answers against whole ones: text, tokens, usage, finish reason")
    if not side.info.streams:
        check.skipped = "the server does not stream"
        return check
    failures: list[str] = []
    for request, whole in await _repeated(client, side, _answered(requests, replies)[:NUM_STREAMS], replies):
        streamed = await side.send(client, request, stream=True)
        if streamed.error is not None:
            failures.append(f"request {request.number}: {streamed.error}")
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
    return _concluded(check, failures)


async def check_stops(
    client: httpx2.AsyncClient,
    side: ServerSide,
    requests: Seq[AuditRequest],
    replies: Mapping[int, AuditReply],
) -> AuditCheck:
    """Send again with a piece of the answer as its stop string: the text must end before it."""
    check = AuditCheck("cut at stop strings", "texts with a stop string against the same text without")
    failures: list[str] = []
    sent = [
        request
        for request in _answered(requests, replies)
        if not {"stop", "min_tokens"}
        & set(request.params)  # before so many tokens a stop string does not count
    ]
    for request, whole in await _repeated(client, side, sent[:NUM_STOPS], replies):
        text = whole.answers[0].text
        stop = stop_within(text)
        if stop is None:
            continue
        reply = await side.send(client, replace(request, params={**request.params, "stop": [stop]}))
        if reply.error is not None:
            failures.append(f"request {request.number}: {reply.error}")
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
    return _concluded(check, failures)


def _concluded(check: AuditCheck, failures: Seq[str]) -> AuditCheck:
    """Requests that failed are a violation only where none was answered."""
    if not check.num_compared and failures:
        check.violate(f"none of {len(failures)} such requests was answered, the first: {failures[0]}")
    elif not check.num_compared:
        check.skipped = "no answer is repeated exactly"
    return check


def stop_within(text: str) -> str | None:
    """A piece from the middle of the text; None where it is too short."""
    middle = len(text) // 2
    piece = text[middle : middle + MIN_STOP_CHARACTERS]
    return piece if len(piece) == MIN_STOP_CHARACTERS and piece.isascii() and piece.strip() else None


async def _repeated(
    client: httpx2.AsyncClient,
    side: ServerSide,
    requests: Seq[AuditRequest],
    replies: Mapping[int, AuditReply],
) -> list[tuple[AuditRequest, AuditReply]]:
    """Those that are answered alike when they are sent again alone, with the new replies. Others say nothing of
    streams and stop strings: in another batch rounding may change an answer."""
    found = []
    for request in requests:
        reply = await side.send(client, request)
        if reply.error is None and _texts(reply) == _texts(replies[request.number]):
            found.append((request, reply))
    return found


def _texts(reply: AuditReply) -> list[str]:
    return [answer.text for answer in reply.answers]


def _answered(requests: Seq[AuditRequest], replies: Mapping[int, AuditReply]) -> list[AuditRequest]:
    """Those with an answer of one."""
    return [
        request
        for request in requests
        if request.num_answers == 1 and request.number in replies and replies[request.number].error is None
    ]
