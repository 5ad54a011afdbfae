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


async def ask_all(
    sides: Seq[ServerSide],
    requests: Seq[AuditRequest],
    concurrency: int,
    journal: AuditJournal,
    shown: Meter,
    on_replies: OnReplies,
) -> str:
    """Ask what the journal lacks; returns why not everything was asked, or an empty text.

    `on_replies` sees the replies in the order of the requests, whichever come first: short answers come before long
    ones, and what came from the slower side would be shorter among the first.
    """
    waiting = iter(enumerate(requests))
    state = {"row": 0, "turn": 0}
    answered: dict[int, list[AuditReply]] = {}
    """What came before its turn, by place in `requests`; empty where one of the replies is a failure."""
    why: list[str] = []

    def hand_over() -> bool:
        """What is due; True where that ends the audit."""
        while state["turn"] in answered:
            turn = state["turn"]
            replies, state["turn"] = answered.pop(turn), turn + 1
            if replies and on_replies(requests[turn], replies):
                return True
        return False

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(side.address)) for side in sides]

        async def work() -> None:
            for turn, request in waiting:
                if why:
                    return
                asked = [
                    _reply(side, client, request, journal)
                    for side, client in zip(sides, clients, strict=True)
                ]
                replies = await asyncio.gather(*asked)
                shown.advance("both sides" if len(sides) > 1 else sides[0].name, len(sides))
                errors = [reply.error for reply in replies if reply.error is not None]
                state["row"] = state["row"] + 1 if errors else 0
                answered[turn] = [] if errors else replies
                if state["row"] >= MAX_FAILURES_IN_A_ROW:
                    why.append(f"{state['row']} requests in a row failed, the last one: {errors[0]}")
                elif not why and hand_over():
                    why.append("")

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return next((reason for reason in why if reason), "")


async def _reply(
    side: ServerSide, client: httpx2.AsyncClient, request: AuditRequest, journal: AuditJournal
) -> AuditReply:
    known = journal.get(side.name, request.number)
    if known is not None and known.error is None:
        return known
    reply = await side.ask(client, request)
    journal.add(side.name, reply)
    return reply
