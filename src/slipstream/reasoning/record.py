"""The log of an answer's steps: who wrote each, what mark it got, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class StepAuthor(StrEnum):
    """Who wrote a step. The first token of a drafted step is the target's own too."""

    TARGET = "target"
    DRAFT = "draft"


class StepVerdict(StrEnum):
    """What became of a step."""

    KEPT = "kept"
    """Drafted, and kept by the judge: the text may differ from the target's own."""
    REWRITTEN = "rewritten"
    """Drafted, and refused by the judge: written by the target."""
    LAST = "last"
    """Drafted, but the target ends its thinking behind it: written by the target."""
    PROTECTED = "protected"
    """One of the first steps."""
    OWN = "own"
    """Written by the target for another reason, which the record gives."""


@dataclass(frozen=True, slots=True)
class StepScore:
    """What a judge made of a step."""

    value: float
    """A mark from 0 to 9, or a mean log-probability in nats."""
    entropy: float | None = None
    """The target's mean entropy along the step, in nats, where the judge looks at it."""
    is_sure: bool = True
    """False where the target did not answer the question."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an answer."""

    number: int
    """From 0."""
    author: StepAuthor
    verdict: StepVerdict
    num_tokens: int
    num_drafted: int = 0
    """Draft tokens that were written for it, kept or not."""
    score: StepScore | None = None
    reason: str = ""
    """Why it is the target's own, in words; empty where the verdict says all."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; keys that say nothing are left out."""
        values: dict[str, Any] = {
            "step": self.number,
            "author": self.author.value,
            "verdict": self.verdict.value,
            "tokens": self.num_tokens,
        }
        if self.num_drafted:
            values["drafted"] = self.num_drafted
        if self.score is not None:
            values["score"] = round(self.score.value, 4)
            if self.score.entropy is not None:
                values["entropy"] = round(self.score.entropy, 4)
        if self.reason:
            values["reason"] = self.reason
        return values
