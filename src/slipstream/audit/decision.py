"""From checks and tests to one of three decisions."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.audit.findings import AuditCheck, AuditTest

MAX_TESTS = 4
"""At most so many tests share the chance of a false alarm: near-ties, differences of unknown margin, two of samples."""


class AuditDecision(StrEnum):
    """What an audit concludes."""

    CERTIFIED = "certified"
    NOT_CERTIFIED = "not certified"
    COULD_NOT_TELL = "could not tell"

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return {"certified": 0, "not certified": 1}.get(self.value, 2)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a decision depends on."""

    checks: Seq[AuditCheck]
    tests: Seq[AuditTest]
    lossy: Seq[str] = ()
    """Settings of the audited side that change the text, a sentence each."""
    doubts: Seq[str] = ()
    """Why an audit without findings would say too little, a sentence each."""
    decided_by: Seq[str] = field(default_factory=tuple)
    """Names of the checks and tests of which at least one must have run."""


def decide(evidence: Evidence, alpha: float) -> tuple[AuditDecision, list[str]]:
    """(decision, its reasons). Each test may reject with `alpha` over the number of tests."""
    reasons = list(evidence.lossy)
    for check in evidence.checks:
        if check.num_violations:
            example = f", the first: {check.findings[0].text}" if check.findings else ""
            reasons.append(f"{check.name}: {check.num_violations} of {check.num_compared} violated{example}")
    level = alpha / max(1, len(evidence.tests))
    for test in evidence.tests:
        if test.p_value < level:
            reasons.append(f"{test.name}: p = {test.p_value:.2g}, below {level:.2g}; rejected: {test.what}")
    if reasons:
        return AuditDecision.NOT_CERTIFIED, reasons
    doubts = list(evidence.doubts)
    ran = {check.name for check in evidence.checks if check.num_compared} | {
        test.name for test in evidence.tests
    }
    if not ran & set(evidence.decided_by):
        doubts.append(f"none of these could run: {', '.join(evidence.decided_by)}")
    if doubts:
        return AuditDecision.COULD_NOT_TELL, doubts
    return AuditDecision.CERTIFIED, []
