"""Asking a drafter for proposals without having to trust it."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from slipstream.core import EMPTY_PROPOSAL, Proposal, ProposalKind, Sequence
from slipstream.draft.base import Drafter, Observation

logger = logging.getLogger(__name__)


class Guard:
    """Guards a drafter: one that raises or breaks its contract is retired for the sequences it failed, no more.

    Failures are counted in `num_failures` and logged once.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, kinds: frozenset[ProposalKind]) -> None:
        """`kinds` are the proposal kinds that the verifier can judge."""
        self.drafter = drafter
        self.num_failures = 0
        self._vocab_size = vocab_size
        self._kinds = kinds
        self._retired: set[int] = set()

    @property
    def num_retired(self) -> int:
        """Sequences under way that go without this drafter because it failed them."""
        return len(self._retired)

    def serves(self, sequence: Sequence) -> bool:
        """False once the drafter has failed the sequence."""
        return sequence.id not in self._retired

    def ask(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One proposal a sequence that it `serves`, within its budget; the empty one where the drafter fails."""
        if not sequences:
            return []
        try:
            return self._ask(sequences, budgets)
        except Exception:  # a batch hides who is to blame: ask again one by one
            return [self._ask_alone(*asked) for asked in zip(sequences, budgets, strict=True)]

    def observe(self, observations: Seq[Observation]) -> None:
        """Tell the drafter the verdicts of the sequences that it still serves."""
        served = [seen for seen in observations if self.serves(seen.sequence)]
        try:
            self.drafter.observe(served)
        except Exception as error:
            for seen in served:
                self._retire(seen.sequence, error)

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted or preempted."""
        try:
            self.drafter.release(sequence)
        except Exception as error:
            self._retire(sequence, error)
        if sequence.finished:
            self._retired.discard(sequence.id)

    def _ask(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        proposals = self.drafter.propose(sequences, budgets)
        if len(proposals) != len(sequences):
            raise ValueError(f"{len(proposals)} proposals for {len(sequences)} sequences")
        for proposal, budget in zip(proposals, budgets, strict=True):
            self._check(proposal, budget)
        return proposals

    def _ask_alone(self, sequence: Sequence, budget: int) -> Proposal:
        try:
            return self._ask([sequence], [budget])[0]
        except Exception as error:
            self._retire(sequence, error)
            return EMPTY_PROPOSAL

    def _check(self, proposal: Proposal, budget: int) -> None:
        if len(proposal) > budget:
            raise ValueError(f"{len(proposal)} draft tokens for a budget of {budget}")
        if any(type(token) is not int or not 0 <= token < self._vocab_size for token in proposal.token_ids):
            raise ValueError(f"a draft token must be an int below {self._vocab_size}")
        probs = proposal.draft_probs
        if probs is not None and (probs.ndim != 2 or not 0 < probs.shape[1] <= self._vocab_size):
            raise ValueError(f"draft_probs must be [{len(proposal)}, at most {self._vocab_size}]")
        if len(proposal) and proposal.kind not in self._kinds:
            raise ValueError(f"the verifier cannot judge a {proposal.kind} proposal")

    def _retire(self, sequence: Sequence, error: Exception) -> None:
        if self.num_failures == 0:
            name = type(self.drafter).__name__
            logger.warning("drafter %s failed and is retired for the sequences it fails: %r", name, error)
            logger.debug("the drafter's failure", exc_info=error)
        self.num_failures += 1
        self._retired.add(sequence.id)
