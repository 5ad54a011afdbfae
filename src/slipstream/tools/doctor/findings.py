"""Findings of an examination."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckOutcome(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    """Usable, but probably misconfigured."""
    FAULT = "fault"
    """Not usable as it is."""


@dataclass(frozen=True)
class Finding:
    """A check with its outcome and explanation."""

    check: str
    verdict: CheckOutcome
    text: str


def ok(check: str, text: str) -> Finding:
    """A passed check."""
    return Finding(check, CheckOutcome.OK, text)


def warning(check: str, text: str) -> Finding:
    """A check with a probable problem."""
    return Finding(check, CheckOutcome.WARNING, text)


def fault(check: str, text: str) -> Finding:
    """A failed check."""
    return Finding(check, CheckOutcome.FAULT, text)
