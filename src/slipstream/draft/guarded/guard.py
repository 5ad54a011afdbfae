"""Calling a drafter for proposals without having to trust it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypeVar

from slipstream.core.pending import PendingNumbers
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.guarded.call_thread import CallThread, CallTimeout
from slipstream.draft.guarded.copies import SequenceCopies, copies_of_proposals, copy_of_observation
from slipstream.kv.cache import KVCache, ReadOnlyCache

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_FAILURES = 16
"""In a row, without a proposal between them: then the drafter is retired for good."""
FIRST_PAUSE_S = 30.0
"""How long a drafter is paused after its first late answer; after each further one twice as long."""
MAX_TIMEOUTS = 5
"""Late answers: with the last of them the drafter is retired for good."""

_INTS = {int}

T = TypeVar("T")


class Guard:
    """Guards a drafter: one that raises or breaks its contract is retired for the sequences it failed, no more.

    After a call that takes longer than `timeout_s` the drafter is paused, at least until that call has returned; every
    sequence is released before its next call. After `MAX_TIMEOUTS` late calls, or `MAX_FAILURES` failures in a row, it
    is retired for good. `retired` says why a drafter is not called. Failures are counted in `num_failures` and logged
    once. Drafters of other packages are called in a thread of their own, so that one that never returns blocks no
    request, and exchange copies only (`draft.guarded.copies`), so that a late call cannot change the engine's objects.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        kinds: frozenset[ProposalKind],
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kinds` are the proposal kinds that the verifier can judge."""
        self.drafter = drafter
        self.num_failures = 0
        self._vocab_size = vocab_size
        self._kinds = kinds
        self.timeout_s = math.inf if drafter.traits.guards_itself else timeout_s
        self._retired: set[int] = set()
        self._failures_in_a_row = 0
        self.clock = clock
        self._why = ""
        self._until_s = 0.0
        self._num_timeouts = 0
        self._met: dict[int, Sequence] = {}
        """Sequences that the drafter may keep state of, where it gets the sequences themselves."""
        self._owed: list[Sequence] = []
        """Sequences to release before its next call."""
        self._worker = None if _is_ours(drafter) else CallThread()
        self._copies = SequenceCopies()

    @classmethod
    def of(cls, drafter: Drafter, context: DraftContext) -> Guard:
        """A guard as the drafter's context says."""
        return cls(drafter, context.vocab_size, context.verifier.kinds, context.draft_timeout_s)

    @property
    def retired(self) -> str:
        """Why the drafter is not called now; empty while it is."""
        if self._why and self.clock() >= self._until_s and not (self._worker and self._worker.hangs):
            self._why = ""
            logger.info("drafter %s is called again", type(self.drafter).__name__)
        return self._why

    @property
    def num_retired(self) -> int:
        """Sequences under way that go without this drafter because it failed them."""
        return len(self._retired)

    def serves(self, sequence: Sequence) -> bool:
        """False once the drafter has failed the sequence, and while it is paused or retired."""
        return sequence.id not in self._retired and not (self._why and self.retired)

    def attach(self, cache: KVCache) -> None:
        """Give the drafter its target's cache; one of another package gets a read-only view."""
        self.drafter.attach(cache if self._worker is None else ReadOnlyCache(cache))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One proposal a sequence that it `serves`, within its budget; the empty one where the drafter fails."""
        if not sequences:
            return []
        try:
            proposals = self._propose(sequences, budgets)
        except Exception as error:  # which sequence caused it is unknown: call again one by one
            self._note_timeout(error)
            proposals = [self._propose_alone(*each) for each in zip(sequences, budgets, strict=True)]
        return proposals

    def observe(self, observations: Seq[Observation]) -> None:
        """Tell the drafter the verdicts of the sequences that it still serves."""
        drafter = self.drafter
        if type(drafter).observe is Drafter.observe or (self._why and self.retired):
            return  # it does not observe, or not now
        retired = self._retired
        served = (
            [seen for seen in observations if seen.sequence.id not in retired] if retired else observations
        )
        if not served:
            return
        try:
            shown = served if self._worker is None else self._copied(served)
            if self._worker is None:
                met = self._met
                for seen in served:
                    met[seen.sequence.id] = seen.sequence
            self._call(lambda: drafter.observe(shown))
        except Exception as error:
            self._note_timeout(error)
            for seen in served:
                self._retire(seen.sequence, error)
            self._count_failure(error)

    def let_pend(self, device: torch.device) -> None:
        """See `Drafter.let_pend`; drafters of other packages hand out copies."""
        if self._worker is None:
            self.drafter.let_pend(device)

    def runs_ahead(self, sequence: Sequence) -> bool:
        """See `Drafter.runs_ahead`; drafters of other packages get copies of texts that are known."""
        return self._worker is None and self.drafter.runs_ahead(sequence)

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
        self._met.pop(sequence.id, None)
        self._copies.drop(sequence)
        if sequence.finished:
            self._retired.discard(sequence.id)

    def num_held(self) -> int:
        """Sequences for which the drafter keeps state; 0 while it is paused or retired, or has sequences to release."""
        return 0 if self.retired or self._owed else self.drafter.num_held()

    def _call(self, function: Callable[[], T]) -> T:
        """In the drafter's own thread if it has one; raises `CallTimeout` where that takes too long."""
        if self._owed:
            drafter, owed = self.drafter, self._owed

            def forget() -> None:
                for sequence in owed:
                    drafter.release(sequence)

            self._timed(forget)
            self._owed = []
        return self._timed(function)

    def _timed(self, function: Callable[[], T]) -> T:
        if self._worker is not None:
            result: T = self._worker.call(function, self.timeout_s)
            return result
        clock = self.clock
        started_s = clock()
        result = function()
        if (took_s := clock() - started_s) > self.timeout_s:
            raise CallTimeout(f"an answer after {took_s:.1f} s, later than {self.timeout_s:g} s")
        return result

    def _propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        drafter = self.drafter
        if self._worker is None:
            met = self._met
            for sequence in sequences:
                met[sequence.id] = sequence
            proposals = self._call(lambda: drafter.propose(sequences, budgets))
        else:
            shown, limits = [self._copies.of(sequence) for sequence in sequences], list(budgets)
            proposals = self._call(lambda: copies_of_proposals(drafter.propose(shown, limits)))
        if len(proposals) != len(sequences):
            raise ValueError(f"{len(proposals)} proposals for {len(sequences)} sequences")
        for proposal, budget in zip(proposals, budgets, strict=True):
            if proposal is not EMPTY_PROPOSAL:
                self._check(proposal, budget)
        self._failures_in_a_row = 0
        return proposals

    def _shown(self, sequence: Sequence) -> Sequence:
        """The sequence, or its copy, that the drafter gets."""
        return sequence if self._worker is None else self._copies.of(sequence)

    def _copied(self, observations: Seq[Observation]) -> list[Observation]:
        """Copies of the observations, for a drafter of another package."""
        return [copy_of_observation(seen, self._copies.of(seen.sequence)) for seen in observations]

    def _propose_alone(self, sequence: Sequence, budget: int) -> Proposal:
        if self._why:
            return EMPTY_PROPOSAL
        try:
            return self._propose([sequence], [budget])[0]
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
        token_ids = proposal.token_ids
        if len(token_ids) > budget:
            raise ValueError(f"{len(token_ids)} draft tokens for a budget of {budget}")
        if isinstance(token_ids, PendingNumbers) and token_ids.is_pending:
            return  # an executor of ours has drawn them, for a verifier that takes any
        if token_ids:
            ints = {*map(type, token_ids)} == _INTS
            if not ints or min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
                raise ValueError(f"a draft token must be an int from 0 to {self._vocab_size - 1}")
            if {*map(type, proposal.parents)} != _INTS:
                raise ValueError("the parent of a draft token must be an int")
            if proposal.kind not in self._kinds:
                raise ValueError(f"the verifier cannot judge a {proposal.kind} proposal")
        if proposal.draft_probs is not None:
            self._check_probs(proposal, proposal.draft_probs)

    def _check_probs(self, proposal: Proposal, probs: object) -> None:
        import torch

        if not isinstance(probs, torch.Tensor) or not probs.is_floating_point():
            raise TypeError(f"draft_probs must be a tensor of floats, got {type(probs).__name__}")
        if probs.ndim != 2 or len(probs) != len(proposal) or not 0 < probs.shape[1] <= self._vocab_size:
            raise ValueError(f"draft_probs must be [{len(proposal)}, at most {self._vocab_size}]")
        if self._worker is not None:  # of another package, so not tested with ours
            sums = probs.double().sum(dim=1)
            if not bool((probs >= 0).all()) or not bool(((sums - 1).abs() < 1e-3).all()):
                raise ValueError("draft_probs must be distributions: none negative, each row's sum 1")

    def _note_timeout(self, error: Exception) -> None:
        """Pause the drafter after a late call, and retire it after several; any other error is ignored here."""
        if not isinstance(error, CallTimeout):
            return
        self.num_failures += 1
        self._num_timeouts += 1
        why = f"a call ended with {error}"
        if self._num_timeouts >= MAX_TIMEOUTS:
            self._retire_for_good(f"{why}, and {self._num_timeouts - 1} did before")
            return
        pause_s = FIRST_PAUSE_S * 2 ** (self._num_timeouts - 1)
        logger.warning("drafter %s is not called for %g s: %s", type(self.drafter).__name__, pause_s, why)
        self._leave_out(why, pause_s)

    def _retire(self, sequence: Sequence, error: Exception) -> None:
        if self.num_failures == 0:
            name = type(self.drafter).__name__
            logger.warning("drafter %s failed and is retired for the sequences it fails: %r", name, error)
            logger.debug("the drafter's failure", exc_info=error)
        if self._why:
            return
        self.num_failures += 1
        self._retired.add(sequence.id)

    def _count_failure(self, error: Exception) -> None:
        """Count the failure of a call, however many sequences it was for."""
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES:
            self._retire_for_good(f"it failed {MAX_FAILURES} times in a row, last with {error!r}")

    def _retire_for_good(self, why: str) -> None:
        if self._why:
            return
        self._leave_out(why, math.inf)
        self._owed = []
        if self._worker is not None:
            self._worker.close()
        logger.warning("drafter %s is retired for good: %s", type(self.drafter).__name__, why)

    def _leave_out(self, why: str, pause_s: float) -> None:
        """Do not call the drafter for `pause_s`. It misses what happens meanwhile, so it releases all sequences."""
        self._why, self._until_s = why, self.clock() + pause_s
        self._retired.clear()
        self._owed += [*self._met.values(), *self._copies.drop_all()]
        self._met.clear()


def _is_ours(drafter: Drafter) -> bool:
    return type(drafter).__module__.split(".")[0] == __name__.split(".")[0]
