"""What the router has its callers do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """Give the request to the replica, with what was passed on of it before."""

    request: str
    replica: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The replica need not go on with the request."""

    request: str
    replica: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SetPaused:
    """The replica makes no more tokens of the request, because they are not read, or goes on with it."""

    request: str
    replica: str
    attempt: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with an error: it was over for the router when this was said."""

    request: str
    message: str
    is_deadline: bool = False


Order = Start | Cancel | SetPaused | Fail
