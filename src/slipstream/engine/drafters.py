"""An engine's drafters, each behind a guard: one is asked for each sequence, and learns what became of its draft."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import compress

from slipstream.control.types import NOBODY, Call, Choice, Drafted
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.combine.auto import AutoDrafter
from slipstream.draft.combine.merging import share_of, text_of
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.lookup.prediction import METHOD, PredictionDrafter, PredictionOptions
from slipstream.kv.cache import KVCache


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter has proposed for a sequence, until it is known what became of it."""

    sequence: Sequence
    drafter: int
    proposal: Proposal
    length: int
    """Tokens of the text then."""
    budget: int = 0
    """The most draft tokens that were asked for; 0 announces a prompt."""


Wanted = tuple[Sequence, int, Choice]
"""A sequence, the most draft tokens that it may have, and which drafters to call."""


class Drafters:
    """Calls the drafter that was chosen for each sequence, and passes to each the verdicts on its own draft tokens.

    Drafters that learn from all text observe all that is committed, so one that was not asked for a while is up to
    date. Nothing here raises: each drafter is guarded. The last of them drafts what callers expect; it is no choice of
    requests or policies.
    """

    def __init__(self, drafter: Drafter, method: str) -> None:
        """The members of `auto`, or the `drafter` of this `method` alone; and a drafter of predictions."""
        self._group = drafter if isinstance(drafter, AutoDrafter) else None
        members = [Guard.of(drafter, drafter.context)] if self._group is None else self._group.members
        names = [method] if self._group is None else self._group.names
        methods = [method] if self._group is None else self._group.methods
        prediction = PredictionDrafter(PredictionOptions(), drafter.context)
        self.guards = [*members, Guard.of(prediction, drafter.context)]
        self.names, self.methods = [*names, METHOD], [*methods, METHOD]
        """Methods; of the names, those that occur more than once have a number behind them."""
        self.prediction = len(self.guards) - 1
        """The number of the one that drafts what callers expect."""
        self.made: dict[int, Draft] = {}
        """Sequence id to the draft whose verdict is awaited."""
        self.found: dict[int, Proposal] = {}
        """Sequence id to what a lookup that was asked first proposed in the last `ask`, used or not."""
        self.calls: list[Call] = []
        """Those of the last `ask`."""
        self._most = [guard.drafter.max_nodes() for guard in self.guards]
        self._is_chain = [guard.drafter.chain_length() is not None for guard in self.guards]
        self._learns = [type(guard.drafter).observe is not Drafter.observe for guard in self.guards]
        self._listens = any(
            learns and guard.drafter.observes_all
            for learns, guard in zip(self._learns, self.guards, strict=True)
        )
        """Whether some drafter learns from sequences that it was not asked for."""

    def serves(self, number: int, sequence: Sequence) -> bool:
        """Whether a drafter may be asked for a sequence: its caller names no other one, and it has not failed it."""
        wanted = sequence.options.draft_method in (None, self.names[number], self.methods[number])
        return wanted and self.guards[number].serves(sequence)

    # --- a step -----------------------------------------------------------------------------------------------

    def ask(self, wanted: Seq[Wanted]) -> dict[int, Proposal]:
        """Sequence id to proposal; absent where no drafter was called."""
        # What is left was made for a prompt, which has no verdict.
        self.calls, self.found, self.made = [], {}, {}
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
            answers = self._call(number, [each[0] for each in asked], [each[1] for each in asked])
            for each in asked:
                sequence, _, choice = each
                proposal = self.found[sequence.id] = answers.get(sequence.id, EMPTY_PROPOSAL)
                if len(proposal) >= choice.min_tokens:
                    proposals[sequence.id] = proposal
                    continue
                self.made.pop(sequence.id, None)
                if choice.drafter != NOBODY:
                    then.setdefault(choice.drafter, []).append(each)
        for number, asked in sorted(then.items()):
            limits = [min(choice.depth, budget) for _, budget, choice in asked]
            proposals |= self._call(number, [each[0] for each in asked], limits)
        return proposals

    def _call(self, number: int, sequences: Seq[Sequence], limits: Seq[int]) -> dict[int, Proposal]:
        """One drafter's proposals, by sequence id, for those that it serves."""
        guard, most = self.guards[number], self._most[number]
        budgets = [min(limit, most) for limit in limits]
        if guard.num_failures:
            served = [guard.serves(sequence) for sequence in sequences]
            sequences, budgets = list(compress(sequences, served)), list(compress(budgets, served))
        if not sequences:
            return {}
        started_s = time.perf_counter()
        answers = guard.ask(sequences, budgets)
        seconds = time.perf_counter() - started_s
        self.calls.append(Call(number, _drafted(budgets, self._is_chain[number]), seconds))
        proposals: dict[int, Proposal] = {}
        for sequence, budget, proposal in zip(sequences, budgets, answers, strict=True):
            self.made[sequence.id] = Draft(sequence, number, proposal, len(sequence.token_ids), budget)
            proposals[sequence.id] = proposal
        return proposals

    def observe(self, observations: Seq[Observation]) -> None:
        """Pass to each drafter the verdicts on its own draft tokens, and what was committed of the other texts."""
        if not self.made and not self._listens:
            return
        made = [self.made.pop(seen.sequence.id, None) for seen in observations]
        for number, guard in enumerate(self.guards):
            if not self._learns[number]:
                continue
            own = [draft is not None and draft.drafter == number for draft in made]
            guard.observe(
                [
                    _of_draft(seen, draft) if is_own and draft is not None else text_of(seen)
                    for seen, draft, is_own in zip(observations, made, own, strict=True)
                    if is_own or guard.drafter.observes_all
                ]
            )

    def own(self, seen: Observation) -> Observation:
        """What of an observation is about the draft tokens that the chosen drafter proposed."""
        made = self.made.get(seen.sequence.id)
        if made is None or made.drafter == self.prediction:
            return seen if not len(seen.proposal) else text_of(seen)
        return _of_draft(seen, made)

    def drafted_by(self, sequence: Sequence) -> int:
        """Who made the sequence's draft in this step, until it is observed; `NOBODY` where it has none, or one of
        its prediction."""
        made = self.made.get(sequence.id)
        return NOBODY if made is None or made.drafter == self.prediction else made.drafter

    def name_of(self, sequence: Sequence) -> str:
        """The drafter called for a sequence in this step, until it is observed; `off` where none was chosen."""
        if (made := self.made.get(sequence.id)) is not None:
            return self.names[made.drafter]
        return self.names[0] if self._group is None else "off"

    # --- all of them ------------------------------------------------------------------------------------------

    @property
    def choices(self) -> list[str]:
        """The names and methods that a request may name."""
        own = slice(self.prediction)
        return list(dict.fromkeys([*self.names[own], *self.methods[own]]))

    @property
    def num_failures(self) -> int:
        """How often drafters, and drafters within drafters, have been retired for a sequence that they failed."""
        return sum(guard.num_failures + guard.drafter.num_failures for guard in self.guards)

    @property
    def has_failed(self) -> bool:
        """True once some drafter but the one of predictions has been retired for a sequence."""
        return any(guard.num_failures for guard in self.guards[: self.prediction])

    @property
    def retired(self) -> tuple[str, ...]:
        """Drafters that are paused or retired."""
        guards = zip(self.names[: self.prediction], self.guards, strict=False)
        return tuple(name for name, guard in guards if guard.retired)

    def serve(self, sequence: Sequence) -> bool:
        """Whether some drafter but the one of predictions has not failed the sequence."""
        return any(guard.serves(sequence) for guard in self.guards[: self.prediction])

    def ends_early(self, number: int) -> bool:
        """See `Drafter.ends_early`."""
        return self.guards[number].drafter.ends_early()

    def attach(self, cache: KVCache) -> None:
        """Introduce the drafters to their target's cache."""
        if self._group is None:
            self.guards[0].attach(cache)
        else:
            self._group.attach(cache)

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted or preempted."""
        self.made.pop(sequence.id, None)
        self.found.pop(sequence.id, None)
        for guard in self.guards:
            guard.release(sequence)

    def num_held(self) -> int:
        """Sequences for which anything is kept."""
        held = (max(guard.num_held(), guard.num_retired) for guard in self.guards)
        return max(len(self.made), *held)

    def integrity(self) -> list[str]:
        """Violated invariants of the drafters' own state, without those that are paused or retired."""
        return [
            fault if self._group is None else f"{name}: {fault}"
            for name, guard in zip(self.names, self.guards, strict=True)
            if not guard.retired
            for fault in guard.drafter.integrity()
        ]


def _of_draft(seen: Observation, made: Draft) -> Observation:
    """The observation for the drafter of a draft; the tree that was checked may hold only a part of it."""
    if seen.proposal is made.proposal or not (len(seen.proposal) or len(made.proposal)):
        return seen
    return share_of(seen, made.proposal, made.length)


def _drafted(budgets: Seq[int], is_chain: bool) -> Drafted:
    """How much a call was for; announced prompts have no budget."""
    wanted = [budget for budget in budgets if budget]
    if is_chain:
        return Drafted(len(wanted), max(wanted, default=0), sum(wanted))
    return Drafted(len(wanted), 1, len(wanted))
