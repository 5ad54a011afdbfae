"""Judging proposals: logits in, verdicts out. Knows nothing of who drafted."""

from __future__ import annotations

from slipstream.config import VERIFIERS, reject_unknown
from slipstream.verify.base import Judgement, Verifier
from slipstream.verify.block import BlockVerifier
from slipstream.verify.coupled import CoupledVerifier
from slipstream.verify.rejection import RejectionVerifier

__all__ = [
    "BlockVerifier",
    "CoupledVerifier",
    "Judgement",
    "RejectionVerifier",
    "Verifier",
    "create_verifier",
]

_VERIFIERS: dict[str, type[Verifier]] = {
    verifier.name: verifier for verifier in (CoupledVerifier, RejectionVerifier, BlockVerifier)
}


def create_verifier(name: str) -> Verifier:
    """The verifier called `name`; an unknown name raises `ConfigError` with the nearest valid one."""
    reject_unknown([name], VERIFIERS, "verifier")
    return _VERIFIERS[name]()
