"""What the checks of an audit found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_SHOWN_FINDINGS = 20
"""Findings of a check that a certificate lists; all are counted."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One deviation."""

    text: str
    request: int | None = None
    """Number of the request at which it showed."""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class AuditCheck:
    """One thing that was compared: how often, and where it was violated. A violation needs no statistics."""

    name: str
    what: str
    """What was compared with what, in one sentence."""
    num_compared: int = 0
    num_violations: int = 0
    findings: list[AuditFinding] = field(default_factory=list)
    """The first of the violations."""
    skipped: str = ""
    """Why nothing could be compared."""

    def violate(self, text: str, request: int | None = None, detail: dict[str, Any] | None = None) -> None:
        """Count a violation."""
        self.num_violations += 1
        if len(self.findings) < MAX_SHOWN_FINDINGS:
            self.findings.append(AuditFinding(text, request, detail or {}))

    @property
    def outcome(self) -> str:
        """`violated`, `held` or `not checked`."""
        if self.num_violations:
            return "violated"
        return "held" if self.num_compared else "not checked"

    def expect(
        self, holds: bool, text: str, request: int | None = None, detail: dict[str, Any] | None = None
    ) -> None:
        """Count a comparison, and a violation where it does not hold."""
        self.num_compared += 1
        if not holds:
            self.violate(text, request, detail)


@dataclass(frozen=True, slots=True)
class AuditTest:
    """One statistical test."""

    name: str
    what: str
    """The hypothesis that it would reject, in one sentence."""
    p_value: float
    """Under an honest server at most this probable; for a test by betting the reciprocal of its wealth."""
    figures: dict[str, Any]
    """The statistics that led to it."""
    smallest: str = ""
    """The smallest deviation that it could have found; empty where it could have found none."""
