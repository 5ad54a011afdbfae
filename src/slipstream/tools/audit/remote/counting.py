"""A server's own counters against the sums of its answers."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from slipstream.tools.audit.findings import AuditCheck
from slipstream.tools.audit.remote.side import ServerSide
from slipstream.tools.bench.server.counters import ClientCounts, Counters, disagreements
from slipstream.tools.bench.server.remote import CounterWindow, read_counters

PATIENCE_S = 2.0
"""Counters may be late by this much."""
_EVERY_S = 0.25


class CounterWatch:
    """What the counters grow by during the audit."""

    def __init__(self, sides: Seq[ServerSide]) -> None:
        """`sides` are those that one server answers."""
        self._sides = sides
        self._address = sides[0].address
        self._start = self._sums()
        self._window = CounterWindow(self._address)

    def check(self) -> tuple[AuditCheck, list[str]]:
        """(the check, notes). Counters that move while nothing is sent count other traffic too, and decide nothing."""
        check = AuditCheck("counters", "the counters of /metrics against the sums of the answers")
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            grown, where = self._window.grown()
            if grown is None:
                check.skipped = where
                return check, []
            counts = self._counts(grown)
            found = disagreements(counts, grown)
            why = _excuse(counts, grown)
            if not found or why or time.monotonic() > deadline_s:
                break
            time.sleep(_EVERY_S)
        if found and not why and self._moves():
            why = "other requests are served at the same time"
        notes = _drafted(where, grown)
        if found and why:
            check.skipped = why
            return check, [*notes, *(f"not judged, because {why}: {text}" for text in found)]
        check.num_compared = sum(
            value is not None
            for value in (grown.num_output_tokens, grown.num_prompt_tokens, grown.num_requests)
        )
        for text in found:
            check.violate(text)
        return check, notes

    def _sums(self) -> list[int]:
        """Replies, their answers, failures, prompt tokens and output tokens of all sides so far."""
        parts = [
            (
                side.num_replies,
                side.num_answers,
                side.num_failed,
                side.num_prompt_tokens,
                side.num_output_tokens,
            )
            for side in self._sides
        ]
        return [sum(values) for values in zip(*parts, strict=True)]

    def _counts(self, grown: Counters) -> ClientCounts:
        """What was sent and came. A server may count a request with several answers once or several times."""
        replies, answers, failed, prompt, output = (
            now - before for now, before in zip(self._sums(), self._start, strict=True)
        )
        counts = all(side.info.returns_usage for side in self._sides)
        requests = answers if grown.num_requests == answers else replies
        return ClientCounts(
            requests, failed, prompt if counts else None, output if counts else None, num_chunks=0
        )

    def _moves(self) -> bool:
        """Whether the counters move while this audit sends nothing."""
        first, _ = read_counters(self._address)
        time.sleep(_EVERY_S * 2)
        return read_counters(self._address)[0] != first


def _drafted(where: str, grown: Counters) -> list[str]:
    """What the counters say of speculation: an audit of a server that never drafted has seen none of it."""
    if grown.num_draft_tokens is None:
        return []
    if not grown.num_draft_tokens:
        return [f"{where} counts no draft tokens meanwhile: nothing of speculation was seen there"]
    accepted = (
        "" if grown.num_accepted_tokens is None else f", of which {grown.num_accepted_tokens:,} accepted"
    )
    return [f"{where} counts {grown.num_draft_tokens:,} draft tokens meanwhile{accepted}"]


def _excuse(counts: ClientCounts, grown: Counters) -> str:
    """Why counters that disagree say nothing of an audit's answers; empty where they do."""
    if counts.num_failed:
        return "requests failed, whose tokens a server may count"
    if grown.num_requests is not None and grown.num_requests > counts.num_requests:
        return "the server answered other requests too"
    return ""
