"""Honest audits, drawn from large pools of honest answers: how many end with an accusation."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence as Seq

from benchmarks.audit.detection import Found, by_samples, of_scores
from benchmarks.audit.faults import Answered
from slipstream.tools.audit.statistics.likelihood import TokenScores


def reference_audits(scores: Seq[TokenScores], num_audits: int, num_answers: int) -> list[Found]:
    """Each audit has its own draw of answers from the pool."""
    chance = random.Random(1)
    return [of_scores(chance.sample(scores, num_answers)) for _ in range(num_audits)]


def samples_audits(on: Seq[Answered], off: Seq[Answered], num_audits: int, num_pairs: int) -> list[Found]:
    """Each audit has its own draw of both sides' answers to every prompt, in rounds over the prompts."""
    chance = random.Random(2)
    pools = [_by_prompt(answers) for answers in (on, off)]
    rounds = num_pairs // len(pools[0])
    audits = []
    for _ in range(num_audits):
        drawn = [{prompt: chance.sample(found, rounds) for prompt, found in pool.items()} for pool in pools]
        first, second = (
            [answers[prompt][lap] for lap in range(rounds) for prompt in answers] for answers in drawn
        )
        audits.append(by_samples(first, second))
    return audits


def _by_prompt(answers: Seq[Answered]) -> dict[int, list[Answered]]:
    found: dict[int, list[Answered]] = defaultdict(list)
    for one in answers:
        found[one.prompt].append(one)
    return dict(sorted(found.items()))
