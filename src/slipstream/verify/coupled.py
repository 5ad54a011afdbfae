"""Verification by shared noise: the target's token is a pure function of distribution, seed and position."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

from slipstream.core.proposal import ROOT, Proposal, ProposalKind, Verdict
from slipstream.verify.base import Judgement, Verifier


class CoupledVerifier(Verifier):
    """Take the target's own token at each node; descend into the child that holds it, stop where no child does.

    The target's token at a position is `argmax(log p + g(seed, position))`, whatever was drafted, so the text
    is the one that plain decoding gives with the same seed, for any proposal of any kind. Against drafts that
    were made with the same noise this is the Gumbel coupling of Daliri, Musco and Suresh, "Coupling without
    communication and drafter-invariant speculative decoding" (2024).
    """

    name: ClassVar[str] = "coupled"
    kinds: ClassVar[frozenset[ProposalKind]] = frozenset(ProposalKind)
    reproducible: ClassVar[bool] = True
    needs_distributions: ClassVar[bool] = False
    walks: ClassVar[bool] = True

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        if not judgements:
            return []
        choices = type(judgements[0].noise).choose_all(
            [(judgement.noise, judgement.log_probs, _positions(judgement)) for judgement in judgements]
        )
        return [
            walk(judgement.proposal, chosen) for judgement, chosen in zip(judgements, choices, strict=True)
        ]


def _positions(judgement: Judgement) -> list[int]:
    """The absolute position that each row decides."""
    root = judgement.noise.root_position
    return [root, *(root + depth for depth in judgement.proposal.depths)]


def walk(proposal: Proposal, chosen: Seq[int]) -> Verdict:
    """Follow the target's tokens down the tree; chosen[0] is the root's, chosen[i + 1] node i's."""
    node, accepted = ROOT, list[int]()
    while True:
        token = chosen[node + 1]
        children = proposal.children.get(node, ())
        node = next((child for child in children if proposal.token_ids[child] == token), ROOT)
        if node == ROOT:
            return Verdict(tuple(accepted), token)
        accepted.append(node)
