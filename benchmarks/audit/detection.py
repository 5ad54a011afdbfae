"""After how many answers each kind of audit finds a fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.audit.faults import Answered
from benchmarks.audit.reference import Reference
from slipstream.tools.audit.decision import MAX_TESTS
from slipstream.tools.audit.statistics.hamming import mmd_test
from slipstream.tools.audit.statistics.likelihood import ReferenceTest, TokenScores
from slipstream.tools.audit.statistics.samples import padded
from slipstream.tools.audit.statistics.sequential import SequentialTest

CONFIDENCE = 0.99
TEST_CONFIDENCE = 1 - (1 - CONFIDENCE) / MAX_TESTS
"""Confidence of each test, as in the command: its tests share what a false alarm may cost."""
LENGTH = 64


@dataclass(frozen=True, slots=True)
class Found:
    """What one audit came to."""

    after: int | None
    """Answers of the audited side that it took; None where nothing was found."""
    how: str
    """The sign by which it was found."""


def by_usage(answers: Iterable[Answered]) -> Found:
    """Usage against the answer's own tokens."""
    for number, one in enumerate(answers, 1):
        if one.num_output_tokens != len(one.token_ids):
            return Found(number, "usage differs from the tokens")
    return Found(None, "")


def by_seeds(answers: Iterable[Answered], without: Iterable[Answered]) -> Found:
    """Token for token against the same seeds without speculation; our kernels leave no rounding to explain."""
    for number, (one, other) in enumerate(zip(answers, without, strict=True), 1):
        if one.token_ids != other.token_ids:
            ends = one.token_ids == other.token_ids[: len(one.token_ids)]
            return Found(number, "shorter than its replay" if ends else "other tokens than its replay")
        if one.finish_reason != other.finish_reason:
            return Found(number, "another finish reason")
    return Found(None, "")


def by_reference(answers: Iterable[Answered], reference: Reference) -> Found:
    """Sampled tokens against the distributions that a local target gives."""
    return of_scores(map(reference.score, answers))


def of_scores(scores: Iterable[TokenScores]) -> Found:
    """As `by_reference`, for answers that are scored already."""
    test = ReferenceTest(TEST_CONFIDENCE)
    for each in scores:
        test.add(each)
        if test.rejects:
            how = "a token that is impossible" if test.num_impossible else str(test.best)
            return Found(test.rejected_after, how)
    return Found(None, "")


def by_samples(answers: Iterable[Answered], without: Iterable[Answered]) -> Found:
    """Pairs of answers to the same prompts under other seeds: the sequential test, then MMD over all of them."""
    test = SequentialTest(TEST_CONFIDENCE, LENGTH)
    by_prompt: dict[int, tuple[list[list[int]], list[list[int]]]] = {}
    for one, other in zip(answers, without, strict=True):
        test.add(one.prompt, one.token_ids, other.token_ids)
        if test.rejects:
            sign = max(test.weights, key=lambda name: abs(test.weights[name]))
            return Found(test.rejected_after, f"sequential test ({sign})")
        sides = by_prompt.setdefault(one.prompt, ([], []))
        sides[0].append(one.token_ids)
        sides[1].append(other.token_ids)
    strata = [(padded(first, LENGTH), padded(second, LENGTH)) for first, second in by_prompt.values()]
    differs = mmd_test(strata).p_value < 1 - TEST_CONFIDENCE
    return Found(test.num_pairs, "MMD with a Hamming kernel") if differs else Found(None, "")
