"""Asking a drafter for proposals without having to trust it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

from slipstream.core import EMPTY_PROPOSAL, Proposal, ProposalKind, Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.copies import SequenceCopies, copies_of_proposals, copy_of_observation
from slipstream.draft.worker import CallTimeout, Worker
from slipstream.kv.cache import KVCache, ReadOnlyCache

logger = logging.getLogger(__name__)

MAX_FAILURES = 16
"""In a row, without a proposal between them: then the drafter is retired for good."""

T = TypeVar("T")


class Guard:
    """Guards a drafter: one that raises or breaks its contract is retired for the sequences it failed, no more.

    One that does nothing but fail, or takes longer than `timeout_s` for a call, is retired for good: `retired` says
    why. Failures are counted in `num_failures` and logged once. Drafters that are not Slipstream's own are called in a
    thread of their own, so that one that never returns harms nobody, and see and give copies only (`draft.copies`), so
    that one that goes on after its time can change nothing.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        kinds: frozenset[ProposalKind],
        timeout_s: float = 30.0,
    ) -> None:
        """`kinds` are the proposal kinds that the verifier can judge."""
        self.drafter = drafter
        self.num_failures = 0
        self.retired = ""
        """Why the drafter is never asked again; empty while it is."""
        self._vocab_size = vocab_size
        self._kinds = kinds
        self._timeout_s = math.inf if drafter.guards_itself else timeout_s
        self._retired: set[int] = set()
        self._failures_in_a_row = 0
        self._worker = None if _is_ours(drafter) else Worker()
        self._copies = SequenceCopies()

    @property
    def num_retired(self) -> int:
        """Sequences under way that go without this drafter because it failed them."""
        return len(self._retired)

    def serves(self, sequence: Sequence) -> bool:
        """False once the drafter has failed the sequence, or is retired for good."""
        return not self.retired and sequence.id not in self._retired

    def attach(self, cache: KVCache) -> None:
        """Introduce the drafter to its target's cache, as far as it is trusted with it."""
        self.drafter.attach(cache if self._worker is None else ReadOnlyCache(cache))

    def ask(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One proposal a sequence that it `serves`, within its budget; the empty one where the drafter fails."""
        if not sequences:
            return []
        try:
            proposals = self._ask(sequences, budgets)
        except Exception as error:  # a batch hides who is to blame: ask again one by one
            self._note_timeout(error)
            proposals = [self._ask_alone(*asked) for asked in zip(sequences, budgets, strict=True)]
        return proposals

    def observe(self, observations: Seq[Observation]) -> None:
        """Tell the drafter the verdicts of the sequences that it still serves."""
        served = [seen for seen in observations if self.serves(seen.sequence)]
        if not served or type(self.drafter).observe is Drafter.observe:
            return  # nobody listens
        try:
            shown = served if self._worker is None else self._copied(served)
            self._call(lambda: self.drafter.observe(shown))
        except Exception as error:
            self._note_timeout(error)
            for seen in served:
                self._retire(seen.sequence, error)
            self._count_failure(error)

    def rewind(self, sequence: Sequence) -> None:
        """Tokens of the sequence were taken back: it ends earlier than at the last call."""
        if not self.serves(sequence):
            return
        try:
            if self._worker is not None:
                self._copies.rewind(sequence)
            shown = self._shown(sequence)
            self._call(lambda: self.drafter.rewind(shown))
        except Exception as error:
            self._note_timeout(error)
            self._retire(sequence, error)
            self._count_failure(error)

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted or preempted."""
        if not self.retired:
            try:
                shown = self._shown(sequence)
                self._call(lambda: self.drafter.release(shown))
            except Exception as error:
                self._note_timeout(error)
                self._retire(sequence, error)
        self._copies.drop(sequence)
        if sequence.finished:
            self._retired.discard(sequence.id)

    def num_held(self) -> int:
        """Sequences for which the drafter keeps state; what a retired one keeps is lost with it."""
        return 0 if self.retired else self.drafter.num_held()

    def _call(self, function: Callable[[], T]) -> T:
        """In the drafter's own thread if it has one; raises `CallTimeout` where that takes too long."""
        if self._worker is not None:
            result: T = self._worker.call(function, self._timeout_s)
            return result
        started_s = time.monotonic()
        result = function()
        if (took_s := time.monotonic() - started_s) > self._timeout_s:
            raise CallTimeout(f"an answer after {took_s:.1f} s, later than {self._timeout_s:g} s")
        return result

    def _ask(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        drafter = self.drafter
        if self._worker is None:
            proposals = self._call(lambda: drafter.propose(sequences, budgets))
        else:
            shown, limits = [self._copies.of(sequence) for sequence in sequences], list(budgets)
            proposals = self._call(lambda: copies_of_proposals(drafter.propose(shown, limits)))
        if len(proposals) != len(sequences):
            raise ValueError(f"{len(proposals)} proposals for {len(sequences)} sequences")
        for proposal, budget in zip(proposals, budgets, strict=True):
            self._check(proposal, budget)
        self._failures_in_a_row = 0
        return proposals

    def _shown(self, sequence: Sequence) -> Sequence:
        """The sequence as the drafter knows it."""
        return sequence if self._worker is None else self._copies.of(sequence)

    def _copied(self, observations: Seq[Observation]) -> list[Observation]:
        """What is told of a step to a drafter that is not trusted."""
        return [copy_of_observation(seen, self._copies.of(seen.sequence)) for seen in observations]

    def _ask_alone(self, sequence: Sequence, budget: int) -> Proposal:
        if self.retired:
            return EMPTY_PROPOSAL
        try:
            return self._ask([sequence], [budget])[0]
        except Exception as error:
            self._note_timeout(error)
            self._retire(sequence, error)
            self._count_failure(error)
            return EMPTY_PROPOSAL

    def _check(self, proposal: Proposal, budget: int) -> None:
        if not isinstance(proposal, Proposal) or not isinstance(proposal.kind, ProposalKind):
            raise TypeError(
                f"a proposal must be a Proposal of some ProposalKind, got {type(proposal).__name__}"
            )
        if len(proposal) > budget:
            raise ValueError(f"{len(proposal)} draft tokens for a budget of {budget}")
        if any(type(token) is not int or not 0 <= token < self._vocab_size for token in proposal.token_ids):
            raise ValueError(f"a draft token must be an int below {self._vocab_size}")
        if any(type(parent) is not int for parent in proposal.parents):
            raise ValueError("the parent of a draft token must be an int")
        if proposal.draft_probs is not None:
            self._check_probs(proposal, proposal.draft_probs)
        if len(proposal) and proposal.kind not in self._kinds:
            raise ValueError(f"the verifier cannot judge a {proposal.kind} proposal")

    def _check_probs(self, proposal: Proposal, probs: object) -> None:
        import torch

        if not isinstance(probs, torch.Tensor) or not probs.is_floating_point():
            raise TypeError(f"draft_probs must be a tensor of floats, got {type(probs).__name__}")
        if probs.ndim != 2 or len(probs) != len(proposal) or not 0 < probs.shape[1] <= self._vocab_size:
            raise ValueError(f"draft_probs must be [{len(proposal)}, at most {self._vocab_size}]")
        if self._worker is not None:  # ours are tested; these may say anything
            sums = probs.double().sum(dim=1)
            if not bool((probs >= 0).all()) or not bool(((sums - 1).abs() < 1e-3).all()):
                raise ValueError("draft_probs must be distributions: none negative, each row's sum 1")

    def _note_timeout(self, error: Exception) -> None:
        """A drafter that hung once would hang everyone again."""
        if isinstance(error, CallTimeout):
            self.num_failures += 1
            self._retire_for_good(f"a call ended with {error}")

    def _retire(self, sequence: Sequence, error: Exception) -> None:
        if self.num_failures == 0:
            name = type(self.drafter).__name__
            logger.warning("drafter %s failed and is retired for the sequences it fails: %r", name, error)
            logger.debug("the drafter's failure", exc_info=error)
        if self.retired:
            return
        self.num_failures += 1
        self._retired.add(sequence.id)

    def _count_failure(self, error: Exception) -> None:
        """Of a call, however many sequences it was for."""
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES:
            self._retire_for_good(f"it failed {MAX_FAILURES} times in a row, last with {error!r}")

    def _retire_for_good(self, why: str) -> None:
        if not self.retired:
            self.retired = why
            self._retired.clear()
            if self._worker is not None:
                self._worker.close()
            logger.warning("drafter %s is retired for good: %s", type(self.drafter).__name__, why)


def _is_ours(drafter: Drafter) -> bool:
    return type(drafter).__module__.split(".")[0] == __name__.split(".")[0]
