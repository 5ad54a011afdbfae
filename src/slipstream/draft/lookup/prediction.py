"""Drafts the text that the caller expects: OpenAI's `prediction`."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.config import check_at_least
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.lookup.alignment import Alignment
from slipstream.draft.traits import DrafterTraits
from slipstream.text.prediction import MAX_PREDICTED_TOKENS

METHOD = "prediction"
"""Its name in metrics."""
LEAST_CHANCE = 0.4
"""A chain is as long as it is accepted whole with this chance, by what was accepted before."""
BRANCH_TOKENS = 5, 3
"""The length of each branch while it is not certain where the text goes on, the likeliest first."""
FIRST_CREDIT = 16.0
"""Draft tokens that may be rejected before any was accepted."""
RESERVE = 8
"""Part of the credit that is kept for an answer that is followed: places that are only likely do not use it."""
MOST_CREDIT = 192.0
EARNED_BY_ACCEPTED = 3.0
EARNED_BY_TEXT = 1 / 32
"""Credit for each token of the answer, so that a text that becomes as expected late is found."""


@dataclass(frozen=True)
class PredictionOptions:
    """Its key."""

    num_speculative_tokens: int = MAX_PREDICTED_TOKENS
    """The most draft tokens in a step."""

    def __post_init__(self) -> None:
        check_at_least(METHOD, 1, num_speculative_tokens=self.num_speculative_tokens)


class _Followed:
    """One answer and its credit."""

    def __init__(self, sequence: Sequence) -> None:
        assert sequence.expected is not None
        self.alignment = Alignment(sequence.expected)
        self.credit = FIRST_CREDIT


class PredictionDrafter(Drafter):
    """Drafts `Sequence.expected` from where the answer is in it; a sequence without one gets nothing.

    While the answer is as expected a chain follows, which is the longer the longer that holds. After a difference the
    places where the text may go on are drafted as the branches of a tree (`Alignment.places`). Rejected draft tokens
    cost credit and accepted ones earn it, so a text that is wholly wrong costs next to nothing.
    """

    Options = PredictionOptions
    traits = DrafterTraits(looks_up=True, observes_all=False, reads_logits=False)

    def __init__(self, options: PredictionOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._followed: dict[int, _Followed] = self.by_sequence()

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """A chain, or a tree after a difference; nothing where the expected text is not found."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        budget = min(budget, self.options.num_speculative_tokens)
        if budget <= 0 or sequence.expected is None:
            return EMPTY_PROPOSAL
        followed = self._followed.get(sequence.id)
        if followed is None:
            followed = self._followed[sequence.id] = _Followed(sequence)
        alignment = followed.alignment
        alignment.read(sequence.output_token_ids)
        num_earned = alignment.num_read * EARNED_BY_TEXT
        reserve = 0 if alignment.followed else RESERVE
        budget = min(budget, int(followed.credit + num_earned) - reserve)
        expected, places = sequence.expected, alignment.places()
        if budget <= 0 or not places:
            return EMPTY_PROPOSAL
        if alignment.followed:
            wanted = int(math.log(LEAST_CHANCE) / math.log(alignment.chance)) + 1
            return Proposal.chain(expected.tokens_from(places[0].offset, min(wanted, budget)))
        branches = [
            expected.tokens_from(place.offset, num) for place, num in zip(places, BRANCH_TOKENS, strict=False)
        ]
        return _tree(branches, budget)

    def observe(self, observations: Seq[Observation]) -> None:
        """Keep the credit."""
        for seen in observations:
            followed = self._followed.get(seen.sequence.id)
            if followed is not None and len(seen.proposal):
                num_rejected = len(seen.proposal) - seen.num_accepted
                credit = followed.credit + EARNED_BY_ACCEPTED * seen.num_accepted - num_rejected
                followed.credit = min(credit, MOST_CREDIT)

    def memory_bytes(self) -> int:
        """Return 0: the texts belong to the requests, and nothing is kept of them."""
        return sum(len(followed.alignment.expected) for followed in self._followed.values())


def _tree(branches: Seq[Seq[int]], max_nodes: int) -> Proposal:
    """The branches from one root, equal beginnings once; level by level, so that a small budget cuts their ends."""
    token_ids: list[int] = []
    parents: list[int] = []
    places: dict[tuple[int, int], int] = {}
    ends = [ROOT] * len(branches)
    for depth in range(max(map(len, branches), default=0)):
        for number, branch in enumerate(branches):
            if depth >= len(branch) or (depth and ends[number] == ROOT):
                continue
            key = ends[number], branch[depth]
            at = places.get(key)
            if at is None:
                if len(token_ids) == max_nodes:
                    ends[number] = ROOT
                    continue
                at = places[key] = len(token_ids)
                token_ids.append(branch[depth])
                parents.append(ends[number])
            ends[number] = at
    return Proposal(tuple(token_ids), tuple(parents))
