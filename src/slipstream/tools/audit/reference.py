"""Answers of a server against a local target that gives logits: token for token, or by their distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.stats.paired import sign_test
from slipstream.tools.audit.answering import answer_params
from slipstream.tools.audit.decision import level_of_tests
from slipstream.tools.audit.findings import AuditCheck, AuditTest
from slipstream.tools.audit.identity import AnswerComparison, FirstDifference
from slipstream.tools.audit.records import AuditAnswer, AuditReply, AuditRequest
from slipstream.tools.audit.replaying import Floats, ReplayedAnswer, Replayer
from slipstream.tools.audit.statistics.likelihood import TEMPERATURES, ReferenceTest
from slipstream.tools.audit.statistics.power import smallest_temperature

DISTRIBUTION = "distribution"


def distribution_tests(
    replayer: Replayer,
    requests: Seq[AuditRequest],
    replies: Mapping[int, AuditReply],
    confidence: float,
    rounding: float,
) -> list[AuditTest]:
    """Whether every sampled token was drawn from the reference's processed distribution. No test without a token.

    `rounding` is the margin of near-ties in nats, within which a filter may keep one of two tokens or the other.
    """
    confidence = 1 - level_of_tests(1 - confidence)
    bets = ReferenceTest(confidence)
    for request in requests:
        reply = replies.get(request.number)
        params = answer_params(request)
        if reply is None or params.greedy or request.token_ids is None:
            continue
        for answer in reply.answers:
            if answer.token_ids:
                bets.add(replayer.scores(request.token_ids, answer.token_ids, params, rounding))
    if not bets.num_tokens:
        return []
    size = smallest_temperature(
        bets.information, confidence, TEMPERATURES, bets.num_alternatives, bets.favour
    )
    factor = math.exp(size) if size < math.log(max(TEMPERATURES)) else math.inf  # beyond that no bet is made
    test = AuditTest(
        DISTRIBUTION,
        "every sampled token was drawn from the target's own processed distribution",
        bets.wealth.p_value,
        {
            "num_tokens": bets.num_tokens,
            "log_wealth": min(bets.wealth.highest, 1e6),
            "impossible_tokens": bets.num_impossible,
            "best_alternative": bets.best,
            "score_z": bets.score_z,
            "rejected_after_answers": bets.rejected_after,
            "smallest_temperature_factor": factor if math.isfinite(factor) else None,
        },
        smallest=f"a temperature that is wrong by a factor of {factor:.3f}" if math.isfinite(factor) else "",
    )
    return [test]


SHARED_NOISE = 0.75
"""Share of telling tokens that the reference must choose too, for a server to count as drawing with its noise."""
MAX_DIAGNOSED = 100
"""Differences whose margin is computed. Whether rounding explains the number of the others is left to a test."""


@dataclass
class ReferenceComparison:
    """Tokens of a server's answers next to those that the reference chooses behind the same text."""

    identity: AnswerComparison
    gaps: list[Floats] = field(default_factory=list)
    log_prob_differences: list[Floats] = field(default_factory=list)
    """The server's log-probabilities less the reference's, before any processing."""


def draws_alike(
    replayer: Replayer, requests: Seq[AuditRequest], replies: Mapping[int, AuditReply], level: float
) -> bool:
    """Whether the server draws with the noise that the reference computes from its seeds.

    Only those tokens tell at which the noise of another seed would choose otherwise. A server with noise of its own
    agrees with the right seed at most as often as with the other one, so at most at half of them, however certain the
    model is: it passes with a probability of at most `level`.
    """
    same, telling = 0, 0
    for request in requests:
        reply = replies.get(request.number)
        if reply is None or reply.error is not None or request.is_greedy:
            continue
        for answer in reply.answers:
            seed = request.answer_seed(answer.index)
            chosen, unrelated = (_replayed(replayer, request, answer, one).chosen for one in (seed, seed ^ 1))
            for own, one, other in zip(answer.token_ids or (), chosen, unrelated, strict=True):
                telling += one != other
                same += own == one != other
    return same >= SHARED_NOISE * telling and sign_test(same, telling) <= level


def compare_with_reference(
    replayer: Replayer,
    requests: Seq[AuditRequest],
    replies: Mapping[int, AuditReply],
    check: AuditCheck,
    on_answer: Callable[[], None] = lambda: None,
) -> ReferenceComparison:
    """Replay the requests' answers: those of temperature 0, or all where the noise is shared. Every token is compared,
    also behind a difference. Margins are not judged yet; see `judge`."""
    found = ReferenceComparison(AnswerComparison(check, []))
    for request in requests:
        reply = replies.get(request.number)
        if reply is None or reply.error is not None:
            continue
        for answer in reply.answers:
            if not answer.token_ids:
                continue
            replayed = _replayed(replayer, request, answer, request.answer_seed(answer.index))
            found.gaps.append(replayed.gaps)
            found.identity.num_tokens += len(replayed.chosen)
            found.identity.num_told_tokens += len(replayed.chosen)
            found.identity.num_told += 1
            check.num_compared += 1
            tops = answer.tops or []
            if len(tops) == len(answer.token_ids):
                reported = np.array([np.nan if top.is_filled_in else top.logprob for top in tops])
                finite = np.isfinite(reported)
                found.log_prob_differences.append((reported - replayed.raw_log_probs)[finite])
            for place, (own, chosen) in enumerate(zip(answer.token_ids, replayed.chosen, strict=True)):
                if own != chosen:
                    diagnosed = len(found.identity.differences) < MAX_DIAGNOSED
                    found.identity.differences.append(
                        _difference(replayer, request, answer, place, chosen, diagnosed)
                    )
            on_answer()
    return found


def judge(identity: AnswerComparison, tie_margin: float) -> AnswerComparison:
    """The same with every difference judged by its margin. One without a margin violates nothing by itself."""
    judged = replace(identity, differences=[])
    for one in identity.differences:
        is_tie = one.margin is not None and one.margin <= tie_margin
        judged.differences.append(
            FirstDifference(
                one.request, one.index, one.profile, one.position, one.first, one.second, one.margin, is_tie
            )
        )
        if one.margin is not None and not is_tie:
            identity.check.violate(str(one), one.request, one.as_json())
    return judged


def _replayed(replayer: Replayer, request: AuditRequest, answer: AuditAnswer, seed: int) -> ReplayedAnswer:
    return replayer.replay(request.token_ids or (), answer.token_ids or (), answer_params(request), seed)


def _difference(
    replayer: Replayer, request: AuditRequest, answer: AuditAnswer, place: int, chosen: int, diagnosed: bool
) -> FirstDifference:
    ids, margin = answer.token_ids or [], None
    if diagnosed:
        params, seed = answer_params(request), request.answer_seed(answer.index)
        margin = replayer.margin(request.token_ids or (), ids[:place], chosen, ids[place], params, seed)
    return FirstDifference(
        request.number, answer.index, request.profile, place, ids[place], chosen, margin, is_tie=False
    )
