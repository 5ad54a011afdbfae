"""Verifiers as a third party would write them: on the public contract alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

from slipstream.core.proposal import ROOT, ProposalKind, Verdict
from slipstream.sampling.noise import Stream
from slipstream.verify.base import Judgement, Verifier


class DrawingVerifier(Verifier):
    """Draws the target's token at each node, whatever was drafted, and descends where a child holds it."""

    name: ClassVar[str] = "drawing"
    kinds: ClassVar[frozenset[ProposalKind]] = frozenset(ProposalKind) - {ProposalKind.COUPLED}

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        return [self._verdict(judgement) for judgement in judgements]

    def _verdict(self, judgement: Judgement) -> Verdict:
        proposal, noise = judgement.proposal, judgement.noise
        node, accepted = ROOT, list[int]()
        while True:
            row = judgement.log_probs[node + 1]
            token = noise.draw(row, noise.root_position + len(accepted), Stream.NEXT_TOKEN)
            children = proposal.children.get(node, [])
            node = next((child for child in children if proposal.token_ids[child] == token), ROOT)
            if node == ROOT:
                return Verdict(tuple(accepted), token)
            accepted.append(node)


class OneHotVerifier(DrawingVerifier):
    """The same, for chosen draft tokens only."""

    name: ClassVar[str] = "one_hot"
    kinds: ClassVar[frozenset[ProposalKind]] = frozenset({ProposalKind.ONE_HOT})


class TrustingVerifier(DrawingVerifier):
    """Accepts the first draft token unseen: biased."""

    name: ClassVar[str] = "trusting"

    def _verdict(self, judgement: Judgement) -> Verdict:
        if not len(judgement.proposal):
            return super()._verdict(judgement)
        position = judgement.noise.root_position + 1
        return Verdict((0,), judgement.noise.draw(judgement.log_probs[1], position, Stream.NEXT_TOKEN))
