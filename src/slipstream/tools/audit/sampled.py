"""Sampled answers whose seeds nothing repeats, against the distributions that a reference says they came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from slipstream.tools.audit.answering import answer_params
from slipstream.tools.audit.decision import level_of_tests
from slipstream.tools.audit.findings import AuditTest
from slipstream.tools.audit.records import AuditReply, AuditRequest
from slipstream.tools.audit.replaying import Replayer
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
    factor = math.exp(size) if size < math.log(max(TEMPERATURES)) else math.inf  # beyond that nobody bets
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
