"""Rejection sampling, the classical rule, for chains and trees."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence as Seq
from typing import ClassVar

import torch

from slipstream.core.proposal import ROOT, Proposal, ProposalKind, Verdict
from slipstream.sampling.noise import Stream
from slipstream.verify.base import Judgement, Verifier

CLASSICAL_KINDS = frozenset(ProposalKind) - {ProposalKind.COUPLED}


class RejectionVerifier(Verifier):
    """Accept a draft token with min(1, p/q), else go on with the residual of p over q; siblings take turns.

    For chains: Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding"
    (ICML 2023), and Chen et al., "Accelerating large language model decoding with speculative sampling"
    (2023). For siblings: the multi-round rule of SpecInfer (Miao et al., ASPLOS 2024), without replacement as
    in Sequoia (Chen et al., NeurIPS 2024). A token that was chosen, not drawn, has q = 1 and is accepted with
    probability p.

    Lossless only if q is what the draft was really drawn from, and if no draft was dropped for the token that
    it turned out to be. A node whose row of q is not finite is rejected, whatever p says of it. Raises
    `ValueError` for coupled proposals, which depend on the target's noise.
    """

    name: ClassVar[str] = "rejection"
    kinds: ClassVar[frozenset[ProposalKind]] = CLASSICAL_KINDS

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        return [verify_tree(judgement) for judgement in judgements]


def verify_tree(judgement: Judgement) -> Verdict:
    """Walk one tree from the root; every node's row of p is used once at most."""
    proposal, noise = judgement.proposal, judgement.noise
    refuse_coupled(proposal)
    node, accepted = ROOT, list[int]()
    while True:
        position = noise.root_position + len(accepted)
        target = judgement.log_probs[node + 1].double().exp()  # [V]
        rejected: list[int] = []
        for child in proposal.children.get(node, ()):
            token = proposal.token_ids[child]
            draft = draft_row(proposal, child, rejected, like=target)
            if not is_finite(draft):
                continue  # no distribution: the node is rejected, and p stays as it is
            if noise.accepts(min(1.0, likelihood_ratio(target, draft, token)), position, child):
                accepted.append(child)
                node = child
                break
            target = residual(target, draft)
            rejected.append(token)
        else:
            return Verdict(tuple(accepted), noise.draw(target.log(), position, Stream.NEXT_TOKEN))


def refuse_coupled(proposal: Proposal) -> None:
    if len(proposal) and proposal.kind is ProposalKind.COUPLED:
        raise ValueError(
            "a coupled proposal depends on the target's noise; only the coupled verifier can judge it"
        )


def draft_row(proposal: Proposal, node: int, rejected: Seq[int], like: torch.Tensor) -> torch.Tensor:
    """The distribution q, float64 [V], from which `node` came, after its siblings with the tokens `rejected`."""
    if proposal.kind is ProposalKind.ONE_HOT:
        draft = torch.zeros_like(like)
        draft[proposal.token_ids[node]] = 1.0
        return draft
    assert proposal.draft_probs is not None  # Proposal has checked it
    row = proposal.draft_probs[node].to(like)  # [V'], V' <= V: a draft may know fewer tokens
    draft = torch.nn.functional.pad(row, (0, len(like) - len(row)))
    if proposal.kind is ProposalKind.SAMPLED_WITHOUT_REPLACEMENT and rejected:
        draft[list(rejected)] = 0.0
        draft /= draft.sum().clamp(min=torch.finfo(draft.dtype).tiny)
    return draft


def is_finite(draft: torch.Tensor) -> bool:
    """False for a row of q, [V], where a draft model's arithmetic overflowed."""
    return bool(draft.isfinite().all())


def likelihood_ratio(target: torch.Tensor, draft: torch.Tensor, token: int) -> float:
    """p/q of one token; 0, a rejection, where that is not a finite number.

    q = 0 comes from underflow only; the result stays finite even then.
    """
    ratio = float(target[token]) / max(float(draft[token]), sys.float_info.min)
    return ratio if math.isfinite(ratio) else 0.0  # min(1.0, nan) would be 1.0


def residual(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """norm(max(p - q, 0)), [V]: the distribution that follows the rejection of a draft token from q.

    Where nothing is left, p equals q up to rounding, and only rounding caused the rejection: then it is p.
    """
    left = (target - draft).clamp_(min=0.0)
    mass = left.sum()
    return torch.where(mass > 0, left / mass, target)
