"""One or more drafters, each behind a guard, of which one is asked for each sequence."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from itertools import compress
from typing import NamedTuple

from slipstream.core.types import EMPTY_PROPOSAL, Proposal, Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.choice import NOBODY, Choice
from slipstream.draft.combine.merging import share_of
from slipstream.draft.guard import Guard
from slipstream.kv.cache import KVCache

Wanted = tuple[Sequence, int, Choice]
"""A sequence, the most draft tokens that it may have, and which drafters to call."""


class DraftCall(NamedTuple):
    """One drafter's call in a step."""

    drafter: int
    sequences: Seq[Sequence]
    budgets: Seq[int]
    seconds: float


class _Open(NamedTuple):
    """A proposal whose verdict is awaited."""

    drafter: int
    proposal: Proposal
    length: int
    """Tokens of the text then."""


class Drafters:
    """Calls the drafter that was chosen for each sequence, and passes to each the verdicts on its own draft tokens.

    Drafters that learn from all text observe all that is committed, so one that was not asked for a while is up to
    date. Nothing here raises: each drafter is guarded.
    """

    def __init__(self, guards: Seq[Guard], methods: Seq[str]) -> None:
        """`methods` name the drafters, in the order of their `guards`."""
        self.guards = list(guards)
        self.methods = list(methods)
        self.names = _numbered(self.methods)
        """Methods, with a number behind those that occur more than once."""
        self.calls: list[DraftCall] = []
        """Those of the last `ask`."""
        self.found: dict[int, Proposal] = {}
        """Sequence id to what a lookup that was asked first proposed in the last `ask`, used or not."""
        self._most = [guard.drafter.max_nodes() for guard in self.guards]
        self._learns = [type(guard.drafter).observe is not Drafter.observe for guard in self.guards]
        self._listens = any(
            learns and guard.drafter.observes_all
            for learns, guard in zip(self._learns, self.guards, strict=True)
        )
        """Whether some drafter learns from sequences that it was not asked for."""
        self._open: dict[int, _Open] = {}
        """By sequence id."""

    # --- a step -----------------------------------------------------------------------------------------------

    def ask(self, wanted: Seq[Wanted]) -> dict[int, Proposal]:
        """Sequence id to proposal; absent where no drafter was called."""
        # What is open still was asked for a prompt, which has no verdict.
        self.calls, self.found, self._open = [], {}, {}
        proposals: dict[int, Proposal] = {}
        first: dict[int, list[Wanted]] = {}
        then: dict[int, list[Wanted]] = {}
        for each in wanted:
            choice = each[2]
            if choice.lookup != NOBODY:
                first.setdefault(choice.lookup, []).append(each)
            elif choice.drafter != NOBODY:
                then.setdefault(choice.drafter, []).append(each)
        for number, asked in sorted(first.items()):
            answers = self._ask(number, asked, [budget for _, budget, _ in asked])
            for each in asked:
                sequence, _, choice = each
                proposal = self.found[sequence.id] = answers.get(sequence.id, EMPTY_PROPOSAL)
                if len(proposal) >= choice.min_tokens:
                    proposals[sequence.id] = proposal
                    continue
                self._open.pop(sequence.id, None)
                if choice.drafter != NOBODY:
                    then.setdefault(choice.drafter, []).append(each)
        for number, asked in sorted(then.items()):
            proposals |= self._ask(number, asked, [min(choice.depth, budget) for _, budget, choice in asked])
        return proposals

    def _ask(self, number: int, wanted: Seq[Wanted], limits: Seq[int]) -> dict[int, Proposal]:
        """One drafter's proposals, by sequence id, for those that it serves."""
        guard, most = self.guards[number], self._most[number]
        sequences, budgets = [each[0] for each in wanted], [min(limit, most) for limit in limits]
        if guard.num_failures:
            served = [guard.serves(sequence) for sequence in sequences]
            sequences, budgets = list(compress(sequences, served)), list(compress(budgets, served))
            if not sequences:
                return {}
        started_s = time.perf_counter()
        answers = guard.ask(sequences, budgets)
        self.calls.append(DraftCall(number, sequences, budgets, time.perf_counter() - started_s))
        proposals: dict[int, Proposal] = {}
        for sequence, proposal in zip(sequences, answers, strict=True):
            self._open[sequence.id] = _Open(number, proposal, len(sequence.token_ids))
            proposals[sequence.id] = proposal
        return proposals

    def drafted_by(self, sequence: Sequence) -> int:
        """Who made the sequence's last proposal, until it is observed; `NOBODY` where it has none."""
        made = self._open.get(sequence.id)
        return NOBODY if made is None else made.drafter

    def own(self, seen: Observation) -> Observation:
        """What of an observation is about the draft tokens that the sequence's drafter proposed."""
        made = self._open.get(seen.sequence.id)
        if made is None:
            return seen if not len(seen.proposal) else _of_text(seen)
        return _of_proposal(seen, made)

    def observe(self, observations: Seq[Observation]) -> None:
        """Pass to each drafter the verdicts on its own draft tokens, and what was committed of the other texts."""
        if not self._open and not self._listens:
            return
        opened = [self._open.pop(seen.sequence.id, None) for seen in observations]
        for number, guard in enumerate(self.guards):
            if not self._learns[number]:
                continue
            everyone = guard.drafter.observes_all
            shares = [
                _of_proposal(seen, made) if made is not None and made.drafter == number else _of_text(seen)
                for seen, made in zip(observations, opened, strict=True)
                if everyone or (made is not None and made.drafter == number)
            ]
            guard.observe(shares)

    def serves(self, number: int, sequence: Sequence) -> bool:
        """Whether a drafter may be asked for a sequence: its caller names no other one, and it has not failed it."""
        wanted = sequence.options.draft_method in (None, self.names[number], self.methods[number])
        return wanted and self.guards[number].serves(sequence)

    # --- all of them ------------------------------------------------------------------------------------------

    @property
    def num_failures(self) -> int:
        """How often drafters have been retired for a sequence."""
        return sum(guard.num_failures for guard in self.guards)

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted or preempted."""
        self._open.pop(sequence.id, None)
        self.found.pop(sequence.id, None)
        self.calls = []
        for guard in self.guards:
            guard.release(sequence)

    def feature_layers(self) -> Seq[int]:
        """What one drafter reads, in its own order; of several, every layer that some of them reads, once."""
        if len(self.guards) == 1:
            return self.guards[0].drafter.feature_layers()
        layers = (layer for guard in self.guards for layer in guard.drafter.feature_layers())
        return tuple(dict.fromkeys(layers))

    def attach(self, cache: KVCache) -> None:
        """Give each drafter the cache with the features that it asked for, in its own order."""
        layers = tuple(self.feature_layers())
        width = cache.feature_width // max(len(layers), 1)
        for guard in self.guards:
            own = tuple(guard.drafter.feature_layers())
            starts = [layers.index(layer) * width for layer in own]
            columns = [column for start in starts for column in range(start, start + width)]
            guard.attach(cache if own == layers else cache.view(columns))

    def num_held(self) -> int:
        """Sequences for which anything is kept."""
        held = (max(guard.num_held(), guard.num_retired) for guard in self.guards)
        return max(len(self._open), *held)

    def integrity(self) -> list[str]:
        """Violated invariants of the drafters' own state, without those that are paused or retired."""
        several = len(self.guards) > 1
        return [
            f"{name}: {fault}" if several else fault
            for name, guard in zip(self.names, self.guards, strict=True)
            if not guard.retired
            for fault in guard.drafter.integrity()
        ]


def _of_proposal(seen: Observation, made: _Open) -> Observation:
    """The observation for the drafter of a proposal; the tree that was checked may hold only a part of it."""
    if seen.proposal is made.proposal or not (len(seen.proposal) or len(made.proposal)):
        return seen
    return share_of(seen, made.proposal, made.length)


def _of_text(seen: Observation) -> Observation:
    """The observation for a drafter that did not propose for the sequence: the text alone."""
    return Observation(seen.sequence, EMPTY_PROPOSAL, 0, seen.logits[:1], seen.num_before, seen.was_cut)


def _numbered(methods: list[str]) -> list[str]:
    return [
        method if methods.count(method) == 1 else f"{method}-{methods[:place].count(method) + 1}"
        for place, method in enumerate(methods)
    ]
