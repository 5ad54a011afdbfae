"""Verifiers with named faults, which claim to be exact."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

from slipstream.core.proposal import Verdict
from slipstream.verify.base import Judgement
from slipstream.verify.coupled import CoupledVerifier
from slipstream.verify.rejection import RejectionVerifier


class TrustingCoupled(CoupledVerifier):
    """Accepts a first draft token that is among the three most probable ones, whatever the noise says."""

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        verdicts = super().verify(judgements)
        for number, judgement in enumerate(judgements):
            proposal, probable = judgement.proposal, judgement.log_probs[0].topk(3).indices.tolist()
            if len(proposal) and proposal.token_ids[0] in probable and not verdicts[number].accepted:
                verdicts[number] = Verdict((0,), int(judgement.log_probs[1].argmax()))
        return verdicts


class LossyCoupled(CoupledVerifier):
    """Exact, but says that it is not meant to be."""

    lossy: ClassVar[bool] = True


class TrustingRejection(RejectionVerifier):
    """Accepts every first draft token unseen: drafts verified as if they had been sampled."""

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        verdicts = super().verify(judgements)
        for number, judgement in enumerate(judgements):
            if len(judgement.proposal) and not verdicts[number].accepted:
                verdicts[number] = Verdict((0,), int(judgement.log_probs[1].argmax()))
        return verdicts
