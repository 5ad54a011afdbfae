"""Parts of an engine that are wrong on purpose, each in one way that has been seen in real engines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import ClassVar

import torch

from slipstream.core.proposal import ROOT, Proposal, ProposalKind, Verdict
from slipstream.core.sequence import Sequence
from slipstream.draft.model.draft_model import DraftModelDrafter
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.sampling.noise import Noise, Stream
from slipstream.sampling.processors import LogitsProcessor
from slipstream.verify.base import Judgement, Verifier
from slipstream.verify.coupled import CoupledVerifier
from slipstream.verify.rejection import CLASSICAL_KINDS, draft_row, likelihood_ratio

TIE_NATS = 0.01
"""Margins below this count as ties for `OtherTies`."""


class MostProbable(Noise):
    """Draws the most probable token and says nothing of it."""

    def draw(self, log_probs: torch.Tensor, position: int, stream: Stream, index: int = 0) -> int:
        return int(log_probs.argmax())


class GreedyCalledSampled(DraftModelDrafter):
    """Greedy draft tokens, handed over as samples from the draft's distribution.

    The verifier then accepts them with min(1, p/q) for a q from which they were not drawn.
    """

    summary = "greedy drafts that are declared as samples"

    def _begin(self, sequence: Sequence, budget: int) -> DraftTree:
        tree = super()._begin(sequence, budget)
        if not tree.noise.greedy:
            tree.noise = MostProbable(tree.noise.seed, tree.noise.root_position)
        return tree


class UnnormalisedResidual(Verifier):
    """Rejection sampling that draws the recovered token from max(p - q, 0) without dividing by its sum.

    A uniform number beyond the sum runs past the end of the cumulated row, and the last token that has any mass is
    taken.
    """

    name: ClassVar[str] = "unnormalised residual"
    kinds: ClassVar[frozenset[ProposalKind]] = CLASSICAL_KINDS  # of which it is given chains

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        return [self._walk(judgement) for judgement in judgements]

    def _walk(self, judgement: Judgement) -> Verdict:
        proposal, noise = judgement.proposal, judgement.noise
        for node in range(len(proposal)):  # a chain
            position = noise.root_position + node
            target = judgement.log_probs[node].double().exp()  # [V]
            draft = draft_row(proposal, node, (), like=target)
            if not noise.accepts(
                min(1.0, likelihood_ratio(target, draft, proposal.token_ids[node])), position, node
            ):
                left = (target - draft).clamp_(min=0.0)
                return Verdict(tuple(range(node)), self._drawn(left, noise.key(position, Stream.NEXT_TOKEN)))
        last = noise.root_position + len(proposal)
        token = noise.draw(judgement.log_probs[len(proposal)], last, Stream.NEXT_TOKEN)
        return Verdict(tuple(range(len(proposal))), token)

    @staticmethod
    def _drawn(row: torch.Tensor, key: int) -> int:
        place = int(torch.searchsorted(row.cumsum(0), random.Random(key).random()))
        return min(place, int(row.nonzero()[-1]))


class OtherTies(CoupledVerifier):
    """Takes the second of two tokens that are nearly tied."""

    name: ClassVar[str] = "other ties"

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        return [self._walk(judgement) for judgement in judgements]

    @staticmethod
    def _walk(judgement: Judgement) -> Verdict:
        proposal, noise = judgement.proposal, judgement.noise
        positions = [noise.root_position + depth for depth in (0, *proposal.depths)]
        best = noise.perturb(judgement.log_probs, positions).topk(2, dim=-1)
        tied = best.values[:, 0] - best.values[:, 1] < TIE_NATS
        chosen = torch.where(tied, best.indices[:, 1], best.indices[:, 0]).tolist()
        return walk(proposal, chosen)


def walk(proposal: Proposal, chosen: Seq[int]) -> Verdict:
    """Follow the chosen tokens down the tree; chosen[0] is the root's, chosen[i + 1] node i's."""
    node, accepted = ROOT, list[int]()
    while True:
        token = chosen[node + 1]
        children = proposal.children.get(node, ())
        node = next((child for child in children if proposal.token_ids[child] == token), ROOT)
        if node == ROOT:
            return Verdict(tuple(accepted), token)
        accepted.append(node)


@contextmanager
def unprocessed_bonus_rows() -> Iterator[None]:
    """While it lasts, the row behind a whole draft is the target's raw distribution, whatever was asked for."""
    right = LogitsProcessor.log_probs

    def faulty(
        self: LogitsProcessor, logits: torch.Tensor, output_token_ids: Seq[int], paths: Seq[Seq[int]]
    ) -> torch.Tensor:
        rows = right(self, logits, output_token_ids, paths)
        deepest = max(range(len(paths)), key=lambda row: len(paths[row]))
        if len(paths[0]) == 0 and deepest > 0:  # the target's rows: the root's is the first
            rows[deepest] = logits[deepest].float().log_softmax(-1)
        return rows

    LogitsProcessor.log_probs = faulty  # type: ignore[method-assign]
    try:
        yield
    finally:
        LogitsProcessor.log_probs = right  # type: ignore[method-assign]
