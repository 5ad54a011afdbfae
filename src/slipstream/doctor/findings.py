"""What an examination says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckOutcome(StrEnum):
    """How a check went."""

    OK = "ok"
    WARNING = "warning"
    """It works, but something is probably not as meant."""
    FAULT = "fault"
    """It cannot be used as it is."""


@dataclass(frozen=True)
class Finding:
    """One check and its outcome."""

    check: str
    verdict: CheckOutcome
    text: str


def ok(check: str, text: str) -> Finding:
    """The check found nothing wrong."""
    return Finding(check, CheckOutcome.OK, text)


def warning(check: str, text: str) -> Finding:
    """The check found something odd."""
    return Finding(check, CheckOutcome.WARNING, text)


def fault(check: str, text: str) -> Finding:
    """The check found what is wrong."""
    return Finding(check, CheckOutcome.FAULT, text)
