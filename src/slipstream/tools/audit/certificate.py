"""The certificate: what was compared, with what result, and how to repeat it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.tools.audit.decision import AuditDecision
from slipstream.tools.audit.findings import AuditCheck, AuditTest

SCHEMA = 1
"""Version of the JSON."""
_HASHED = (".json", ".safetensors", ".gguf", ".jinja", ".model")


@dataclass(frozen=True)
class AuditData:
    """What was sent and how much came back."""

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
    """Why it is not certified, or why that is not known; empty for a certificate."""
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


def file_hashes(model: str | None) -> dict[str, str]:
    """File name to SHA-256 of a checkpoint's files; empty where `model` is not a local folder or file."""
    if model is None:
        return {}
    path = Path(model).expanduser()
    if path.is_file():
        return {path.name: _sha256(path)}
    if not path.is_dir():
        return {}
    return {
        file.name: _sha256(file)
        for file in sorted(path.iterdir())
        if file.suffix in _HASHED and file.is_file()
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
