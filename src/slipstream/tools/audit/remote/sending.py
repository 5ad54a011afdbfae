"""Sends an audit's requests to its servers, several at once, each request to all sides at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack

import httpx2

from slipstream.core.meter import Meter
from slipstream.rpc.client import connect
from slipstream.tools.audit.journal import AuditJournal
from slipstream.tools.audit.records import AuditReply, AuditRequest
from slipstream.tools.audit.remote.side import ServerSide

MAX_FAILURES_IN_A_ROW = 20
"""So many failures in a row end an audit: the server is gone."""

OnReplies = Callable[[AuditRequest, list[AuditReply]], bool]
"""Called with a request and each side's reply; True ends the audit early."""


async def send_all(
    sides: Seq[ServerSide],
    requests: Seq[AuditRequest],
    concurrency: int,
    journal: AuditJournal,
    shown: Meter,
    on_replies: OnReplies,
) -> str:
    """Send what the journal lacks; returns why not everything was sent, or an empty text.

    `on_replies` sees the replies in the order of the requests, whichever come first: short answers come before long
    ones, and what came from the slower side would be shorter among the first.
    """
    sending = _Sending(sides, requests, journal, shown, on_replies)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(side.address)) for side in sides]
        await asyncio.gather(*(sending.work(clients) for _ in range(concurrency)))
    return sending.why or ""


class _Sending:
    """Requests that are sent several at a time, and whose replies are handed over in order."""

    def __init__(
        self,
        sides: Seq[ServerSide],
        requests: Seq[AuditRequest],
        journal: AuditJournal,
        shown: Meter,
        on_replies: OnReplies,
    ) -> None:
        self._sides = sides
        self._requests = requests
        self._journal = journal
        self._shown = shown
        self._on_replies = on_replies
        self._waiting = iter(enumerate(requests))
        self._answered: dict[int, list[AuditReply]] = {}
        """What came before its turn, by place in `requests`; empty where one of the replies is a failure."""
        self._turn = 0
        """The place of the request whose replies are handed over next."""
        self._failures_in_a_row = 0
        self.why: str | None = None
        """Why no more is sent; empty where `on_replies` wanted no more, None while sending goes on."""

    async def work(self, clients: Seq[httpx2.AsyncClient]) -> None:
        """Send one request after another until none is left or sending is over."""
        for turn, request in self._waiting:
            if self.why is not None:
                return
            sent = [
                _reply(side, client, request, self._journal)
                for side, client in zip(self._sides, clients, strict=True)
            ]
            replies = await asyncio.gather(*sent)
            self._shown.advance(
                "both sides" if len(self._sides) > 1 else self._sides[0].name, len(self._sides)
            )
            errors = [reply.error for reply in replies if reply.error is not None]
            self._failures_in_a_row = self._failures_in_a_row + 1 if errors else 0
            self._answered[turn] = [] if errors else replies
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                self.why = self.why or (
                    f"{self._failures_in_a_row} requests in a row failed, the last one: {errors[0]}"
                )
            elif self.why is None and self._hand_over():
                self.why = ""

    def _hand_over(self) -> bool:
        """Hand over what is due; True where that ends the audit."""
        while self._turn in self._answered:
            turn = self._turn
            replies, self._turn = self._answered.pop(turn), turn + 1
            if replies and self._on_replies(self._requests[turn], replies):
                return True
        return False


async def _reply(
    side: ServerSide, client: httpx2.AsyncClient, request: AuditRequest, journal: AuditJournal
) -> AuditReply:
    known = journal.get(side.name, request.number)
    if known is not None and known.error is None:
        return known
    reply = await side.send(client, request)
    journal.add(side.name, reply)
    return reply
