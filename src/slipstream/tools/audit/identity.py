"""Answers compared token for token, with a diagnosis of every first difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.tools.audit.findings import AuditCheck
from slipstream.tools.audit.records import AuditAnswer, AuditReply, AuditRequest
from slipstream.tools.bench.statistics import first_difference


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first place at which two answers to one request differ."""

    request: int
    index: int
    """Index among the request's answers."""
    profile: str
    position: int
    """Tokens before it; characters where only text is known."""
    first: int | str | None
    """What the audited side has there; None where its answer has ended."""
    second: int | str | None
    margin: float | None
    """Nats that separate the two choices; None where nothing tells them."""
    is_tie: bool
    """Whether the margin is within what rounding changes."""
    is_cut: bool = False
    """Whether the audited answer ends there though nothing ended it."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"margin": _finite(self.margin)}

    def __str__(self) -> str:
        margin = "unknown" if self.margin is None else f"{self.margin:.3g} nats"
        return (
            f"request {self.request} ({self.profile}): {self.first!r} instead of {self.second!r} at position "
            f"{self.position}, margin {margin}"
        )


MarginOf = Callable[[AuditRequest, AuditAnswer, AuditAnswer, int], float | None]
"""(request, audited answer, other answer, position) to the margin of the first difference, in nats."""

Tells = Callable[[AuditRequest, AuditAnswer, AuditAnswer], bool]
"""Whether the margin of a difference between the two answers to a request would be known."""

MOST_CHARACTERS = 8
"""Characters of a token, at most on average: texts whose tokens nothing counts have at least one for so many."""


@dataclass(slots=True)
class AnswerComparison:
    """How two sides' answers compare."""

    check: AuditCheck
    differences: list[FirstDifference]
    num_tokens: int = 0
    """Compared tokens: those up to each first difference. Where only text is known, those that it stands for."""
    num_told: int = 0
    """Compared answers of which any difference would have a known margin."""
    num_told_tokens: int = 0
    """Their compared tokens."""

    @property
    def num_ties(self) -> int:
        return sum(difference.is_tie for difference in self.differences)

    @property
    def num_unknown(self) -> int:
        """Differences whose margin nothing tells. Statistics decide how many of them are too many."""
        return sum(difference.margin is None and not difference.is_cut for difference in self.differences)


def compare(
    requests: Mapping[int, AuditRequest],
    audited: Mapping[int, AuditReply],
    other: Mapping[int, AuditReply],
    margin_of: MarginOf,
    tie_margin: float,
    check: AuditCheck,
    tells: Tells = lambda request, mine, theirs: True,
) -> AnswerComparison:
    """Compare the answers to each request that both sides answered. A first difference whose margin is at most
    `tie_margin` is a near-tie. One with a larger margin violates `check`, and so does an answer that was cut."""
    result = AnswerComparison(check, [])
    for number in sorted(audited.keys() & other.keys() & requests.keys()):
        request = requests[number]
        pairs = list(zip(audited[number].answers, other[number].answers, strict=False))
        if len(audited[number].answers) != len(other[number].answers):
            sizes = len(audited[number].answers), len(other[number].answers)
            check.violate(f"request {number} has {sizes[0]} answers, the other side {sizes[1]}", number)
        for mine, theirs in pairs:
            difference = _difference(request, mine, theirs, margin_of, tie_margin)
            first, second = _sequences(mine, theirs)
            is_any = bool(first or second)  # two empty answers compare nothing
            end = (
                len(first)
                if difference is None
                else min(difference.position + 1, max(len(first), len(second)))
            )
            num_tokens = _num_tokens(mine, first, end)
            check.num_compared += is_any
            result.num_tokens += num_tokens
            if tells(request, mine, theirs):
                result.num_told += is_any
                result.num_told_tokens += num_tokens
            if difference is None:
                if mine.finish_reason != theirs.finish_reason:
                    check.violate(
                        f"request {number} ended with {mine.finish_reason!r} instead of {theirs.finish_reason!r} "
                        "after the same tokens",
                        number,
                    )
                elif mine.text != theirs.text:
                    check.violate(f"request {number} has another text of the same tokens", number)
                continue
            result.differences.append(difference)
            if difference.is_cut or (difference.margin is not None and not difference.is_tie):
                check.violate(str(difference), number, difference.as_json())
    return result


def _sequences(mine: AuditAnswer, theirs: AuditAnswer) -> tuple[list[int] | str, list[int] | str]:
    """Token ids where both have them, else texts."""
    if mine.token_ids is not None and theirs.token_ids is not None:
        return mine.token_ids, theirs.token_ids
    return mine.text, theirs.text


def _num_tokens(answer: AuditAnswer, sequence: list[int] | str, end: int) -> int:
    """How many tokens the first `end` entries of an answer's ids or text are; of text no more than are known."""
    if not isinstance(sequence, str):
        return end
    if not sequence:
        return min(end, 1)
    total = len(sequence) / MOST_CHARACTERS if answer.num_tokens is None else answer.num_tokens
    return math.ceil(total * min(end / len(sequence), 1.0))


def _difference(
    request: AuditRequest, mine: AuditAnswer, theirs: AuditAnswer, margin_of: MarginOf, tie_margin: float
) -> FirstDifference | None:
    first, second = _sequences(mine, theirs)
    place = first_difference(first, second)
    if place is None:
        return None
    margin = margin_of(request, mine, theirs, place)
    return FirstDifference(
        request=request.number,
        index=mine.index,
        profile=request.profile,
        position=place,
        first=first[place] if place < len(first) else None,
        second=second[place] if place < len(second) else None,
        margin=margin,
        is_tie=margin is not None and margin <= tie_margin,
        is_cut=place == len(first) and (mine.token_ids is not None or mine.finish_reason == "length"),
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
