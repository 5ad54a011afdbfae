"""Judging proposals: logits in, verdicts out. Knows nothing of who drafted."""

from __future__ import annotations

from slipstream.verify.base import Judgement, Verifier
from slipstream.verify.registry import VERIFIERS, create_verifier

__all__ = ["VERIFIERS", "Judgement", "Verifier", "create_verifier"]
