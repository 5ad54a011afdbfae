"""The certificate: what was compared, with what result, and how to repeat it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.tools.audit.decision import AuditDecision
from slipstream.tools.audit.findings import AuditCheck, AuditTest

SCHEMA = 1
"""Version of the JSON."""


@dataclass(frozen=True)
class AuditData:
    """What was asked and how much came back."""

    source: str
    sha256: str
    """Digest of all prompts, parameters and seeds."""
    num_prompts: int
    num_requests: int
    num_answers: int
    """Answers of the audited side that came."""
    num_tokens: int
    """Their tokens; characters where the server tells no tokens."""
    profiles: dict[str, int]
    """Requests by set of sampling parameters."""
    max_tokens: int
    seed: int
    concurrency: int


@dataclass(frozen=True)
class Certificate:
    """The result of an audit."""

    decision: AuditDecision
    reasons: list[str]
    """Why it is not certified, or why it could not be told; empty for a certificate."""
    claim: str
    """What is certified, and the smallest deviation that would have been found; no more is claimed."""
    audited: dict[str, Any]
    """The audited side: model or URL, versions, hashes, configuration."""
    compared_with: dict[str, Any]
    data: AuditData
    confidence: float
    checks: list[AuditCheck]
    tests: list[AuditTest]
    ties: dict[str, Any]
    """Near-ties: the margin below which a difference is one, how many were seen and how many expected."""
    smallest_deviations: dict[str, Any]
    differences: list[dict[str, Any]]
    """First differences between the two sides, near-ties included."""
    notes: list[str]
    provenance: dict[str, Any]
    complete: bool = True
    interrupted: bool = False
    """Ended by Ctrl-C, and therefore not complete."""
    schema: int = SCHEMA
    kind: str = field(default="audit")

    @property
    def exit_code(self) -> int:
        return self.decision.exit_code

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        found = asdict(self)
        found["decision"] = str(self.decision)
        for entry, check in zip(found["checks"], self.checks, strict=True):
            entry["outcome"] = check.outcome
        return {"schema": found.pop("schema"), "kind": found.pop("kind"), **found}
