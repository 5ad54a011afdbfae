"""From checks and tests to one of three decisions."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.tools.audit.findings import AuditCheck, AuditTest

MAX_TESTS = 4
"""At most so many tests share the chance of a false alarm: near-ties, differences of unknown margin, two of samples."""
PROBE_SHARE = 0.1
"""Share of that chance for taking different noises of servers for one; the tests share what is left."""


def probe_level(alpha: float) -> float:
    """The chance that servers with noises of their own may have to pass for drawing alike."""
    return PROBE_SHARE * alpha


def level_of_tests(alpha: float) -> float:
    """The chance of a false alarm that each test has, of `alpha` over all."""
    return (1 - PROBE_SHARE) * alpha / MAX_TESTS


class AuditDecision(StrEnum):
    """What an audit concludes."""

    CERTIFIED = "certified"
    NOT_CERTIFIED = "not certified"
    COULD_NOT_TELL = "could not tell"

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
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
    """Names of the checks and tests of which at least one must have run, and could have found something."""


def decide(evidence: Evidence, alpha: float) -> tuple[AuditDecision, list[str]]:
    """(decision, its reasons). Each test may reject with its share of `alpha`."""
    reasons = list(evidence.lossy)
    for check in evidence.checks:
        if check.num_violations:
            example = f", the first: {check.findings[0].text}" if check.findings else ""
            reasons.append(f"{check.name}: {check.num_violations} of {check.num_compared} violated{example}")
    level = level_of_tests(alpha)
    for test in evidence.tests:
        if test.p_value < level:
            reasons.append(f"{test.name}: p = {test.p_value:.2g}, below {level:.2g}; rejected: {test.what}")
    if reasons:
        return AuditDecision.NOT_CERTIFIED, reasons
    doubts = list(evidence.doubts)
    ran = {check.name for check in evidence.checks if check.num_compared}
    ran |= {test.name for test in evidence.tests if test.smallest}
    if not ran & set(evidence.decided_by):
        powerless = [test.name for test in evidence.tests if test.name in evidence.decided_by]
        doubts.append(
            f"there are too few answers: whatever they were, these could have found nothing: {', '.join(powerless)}"
            if powerless
            else f"none of these could run: {', '.join(evidence.decided_by)}"
        )
    if doubts:
        return AuditDecision.COULD_NOT_TELL, doubts
    return AuditDecision.CERTIFIED, []
