"""Block verification: judge a chain as a whole, never worse than token by token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from typing import ClassVar

from slipstream.core.proposal import ProposalKind, Verdict
from slipstream.sampling.noise import Stream
from slipstream.verify.base import Judgement, Verifier
from slipstream.verify.rejection import (
    CLASSICAL_KINDS,
    draft_row,
    is_finite,
    likelihood_ratio,
    refuse_coupled,
    residual,
    verify_tree,
)


class BlockVerifier(Verifier):
    """Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami and Suresh, "Block verification accelerates speculative
    decoding" (ICLR 2025).

    Chains only: a tree with siblings is judged by `rejection`'s rule, node by node, which is exact as well.
    For chains of chosen tokens (one-hot q) the two rules have the same law. Raises `ValueError` for coupled
    proposals.
    """

    name: ClassVar[str] = "block"
    kinds: ClassVar[frozenset[ProposalKind]] = CLASSICAL_KINDS

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        return [
            verify_chain(judgement) if judgement.proposal.is_chain else verify_tree(judgement)
            for judgement in judgements
        ]


def verify_chain(judgement: Judgement) -> Verdict:
    """Keep the longest prefix whose own random draw accepts it; a rejection early on does not end the search.

    With x_1 .. x_n the draft, p_i and q_i the distributions after x_1 .. x_i, and w_0 = 1 (Algorithm 2 of the
    paper):

        w_i = min(1, w_(i-1) * p_(i-1)(x_i) / q_(i-1)(x_i))    likelihood ratio of the prefix, capped
        z_i = sum over x of max(w_i * p_i(x) - q_i(x), 0)      mass of the residual after it
        h_i = z_i / (z_i + 1 - w_i), and h_n = w_n             probability that prefix i is accepted

    The longest accepted prefix is kept, and the next token drawn from norm(max(w_i * p_i - q_i, 0)), or from p_n.
    """
    proposal, noise = judgement.proposal, judgement.noise
    refuse_coupled(proposal)
    target = judgement.log_probs.double().exp()  # [1 + n, V]
    draft = [draft_row(proposal, node, (), like=target[0]) for node in range(len(proposal))]
    draft = list(itertools.takewhile(is_finite, draft))  # n rows, [V]: the chain ends before any other row
    weight, num_accepted = 1.0, 0
    next_row = residual(target[0], draft[0]) if draft else target[0]
    for i, token in enumerate(proposal.token_ids[: len(draft)], start=1):
        weight = min(1.0, weight * likelihood_ratio(target[i - 1], draft[i - 1], token))
        if i == len(draft):
            chance, row = weight, target[i]
        else:
            left = float((weight * target[i] - draft[i]).clamp_(min=0.0).sum())
            chance = left / (left + 1 - weight) if weight < 1 else 1.0
            row = residual(weight * target[i], draft[i])
        if noise.accepts(chance, noise.root_position + i - 1, candidate=i - 1):
            num_accepted, next_row = i, row
    next_token = noise.draw(next_row.log(), noise.root_position + num_accepted, Stream.NEXT_TOKEN)
    return Verdict(tuple(range(num_accepted)), next_token)
