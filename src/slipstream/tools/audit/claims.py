"""What a certificate may claim: the smallest deviation that would have been found, and no more."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from slipstream.tools.audit.findings import AuditTest
from slipstream.tools.audit.identity import AnswerComparison
from slipstream.tools.audit.statistics.power import smallest_rate
from slipstream.tools.audit.ties import Rounding


@dataclass
class SmallestDeviations:
    """Collected from the comparisons that ran."""

    confidence: float
    max_tokens: int
    _sentences: list[str] = field(default_factory=list)
    _figures: dict[str, Any] = field(default_factory=dict)

    def add_identity(self, identity: AnswerComparison, rounding: Rounding) -> None:
        """Answers that were compared token for token, up to near-ties.

        Where rounding may excuse differences of unknown margin, answers that tell no margins could hide a fault: they
        are left to the test of such differences.
        """
        answers, tokens = identity.check.num_compared, identity.num_tokens
        which = "answers that were compared token for token"
        if rounding.unknown_chance and identity.num_told < answers:
            answers, tokens = identity.num_told, identity.num_told_tokens
            which = f"{answers:,} {which} and tell margins"
        if not tokens:
            return
        rate, by_token = smallest_rate(answers, self.confidence), smallest_rate(tokens, self.confidence)
        self._figures["share_of_answers"] = rate
        self._figures["share_of_tokens"] = by_token
        margin = rounding.tie_margin
        ties = f" (near-ties are margins up to {margin:.2g} nats)" if margin else ""
        self._sentences.append(
            f"a fault that changes at random {rate:.2%} of the {which}, or "
            f"{by_token:.3%} of their tokens, would have shown at least once with a probability of "
            f"{self.confidence:g}{ties}"
        )

    def add_tests(self, tests: Seq[AuditTest]) -> None:
        """What the tests could have detected."""
        for test in tests:
            if test.smallest:
                self._figures[test.name] = test.smallest
                self._sentences.append(f"the test {test.name!r} could have found {test.smallest}")
            else:
                self._sentences.append(f"the test {test.name!r} had too few answers to find anything")

    def claim(self, certified: bool, compared_with: str) -> str:
        """Return the claim in words."""
        if not certified:
            return "Nothing is certified."
        found = "; ".join(self._sentences)
        return (
            f"No deviation from {compared_with} was found in answers of at most {self.max_tokens} tokens. "
            f"{found[:1].upper()}{found[1:]}. Smaller deviations, and other prompts and parameters, are not covered."
        )

    def as_json(self) -> dict[str, Any]:
        return dict(self._figures)
