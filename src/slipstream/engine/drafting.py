"""The draft step: the policy is asked, the drafters are asked, a grammar has its say, and both learn what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import attrgetter

from slipstream.control.choice import Asked
from slipstream.control.controller import Controller
from slipstream.control.facts import Call, Outcome, StepFacts
from slipstream.control.knowledge import MAX_LEARNED
from slipstream.control.realised import Gain
from slipstream.control.report import ControlReport, MethodReport
from slipstream.control.step_cost import Drafted
from slipstream.core import EMPTY_PROPOSAL, Proposal, ProposalKind, Sequence, StepItem
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.choice import NOBODY, NOTHING, Choice
from slipstream.draft.combine.auto import AutoDrafter
from slipstream.draft.combine.merging import depth_along
from slipstream.draft.drafters import Drafters, Wanted
from slipstream.draft.forced import under_grammar
from slipstream.draft.guard import Guard
from slipstream.kv.cache import KVCache
from slipstream.metrics.step import StepReport

SCORED_EVERY = 4
"""Steps between two looks at what a lookup would have proposed."""


@dataclass(slots=True)
class _Step:
    """What the controller decided for a step, and what it is to be told of it."""

    choices: dict[int, Choice] = field(default_factory=dict)
    """Sequence id to choice, for those that decode."""
    num_others: int = 0
    calls: list[Call] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    num_drafted: int = 0
    books_s: float = 0.0
    """Asking the controller and preparing what it is told."""


@dataclass(frozen=True, slots=True)
class _Unchecked:
    """What a lookup would have proposed, until the text has grown past it."""

    sequence: Sequence
    drafter: int
    proposal: Proposal
    length: int


class Drafting:
    """An engine's guarded drafters and what chooses among them. Where one fails, decoding goes on without drafts."""

    def __init__(
        self,
        drafter: Drafter,
        method: str,
        vocab_size: int,
        kinds: frozenset[ProposalKind],
        timeout_s: float,
        controller: Controller | None = None,
    ) -> None:
        """`kinds` are what the verifier can judge. Without a controller everybody is drafted for as far as the
        scheduler allows."""
        self.drafters = (
            drafter.drafters
            if isinstance(drafter, AutoDrafter)
            else Drafters([Guard(drafter, vocab_size, kinds, timeout_s)], [method])
        )
        self.controller = controller
        self.task_of: Callable[[Sequence], str] = attrgetter("task")
        """What the controller keeps the statistics of a sequence under; a server keeps its accounts' tasks apart."""
        self._chooses = isinstance(drafter, AutoDrafter)
        self._most = Choice(0, drafter.max_nodes())
        self._step: _Step | None = None
        """The one under way; None where it only repeats what was decided."""
        self._unchecked: list[_Unchecked] = []
        self._turn = 0
        self._learning_s = 0.0
        """What telling the controller of a step took, the last time."""

    @property
    def methods(self) -> list[str]:
        """The drafters that a request may name as its own."""
        return list(dict.fromkeys([*self.drafters.names, *self.drafters.methods]))

    @property
    def num_failures(self) -> int:
        """How often drafters, and drafters within drafters, have been retired for a sequence that they failed."""
        return sum(guard.num_failures + guard.drafter.num_failures for guard in self.drafters.guards)

    @property
    def retired(self) -> tuple[str, ...]:
        """Drafters that are not asked again."""
        guards = zip(self.drafters.names, self.drafters.guards, strict=True)
        return tuple(name for name, guard in guards if guard.retired)

    def attach(self, cache: KVCache) -> None:
        """Introduce the drafters to their target's cache."""
        self.drafters.attach(cache)

    # --- before the pass --------------------------------------------------------------------------------------

    def propose(self, scheduled: Seq[StepItem]) -> dict[int, Proposal]:
        """Sequence id to proposal; sequences without one are absent.

        Where the target is still computing the prompt, the drafter is asked with a budget of 0, so that it can
        compute it meanwhile; a sequence whose caller wants no drafts costs nothing. An answer under a grammar gets
        the grammar's forced tokens too, and no draft tokens that the grammar refuses.
        """
        controller = self.controller
        if controller is None:
            proposals = self.drafters.ask(self._everyone(scheduled))
        else:
            proposals = self._ask(controller, self._wanted(controller, scheduled))
        if controller is None or not controller.in_probe:
            for item in scheduled:
                sequence = item.sequence
                if sequence.grammar is not None and item.max_draft_tokens > 0:
                    own = proposals.get(sequence.id, EMPTY_PROPOSAL)
                    proposals[sequence.id] = under_grammar(
                        own, sequence.grammar, sequence.output_token_ids, item.max_draft_tokens
                    )
        return {key: proposal for key, proposal in proposals.items() if len(proposal)}

    def _everyone(self, scheduled: Seq[StepItem]) -> list[Wanted]:
        return [
            (item.sequence, item.max_draft_tokens, self._most)
            for item in scheduled
            if (item.max_draft_tokens > 0 or not item.decodes) and self._may_draft(item.sequence)
        ]

    def _may_draft(self, sequence: Sequence) -> bool:
        return sequence.options.max_draft_tokens != 0 and any(
            guard.serves(sequence) for guard in self.drafters.guards
        )

    def _wanted(self, controller: Controller, scheduled: Seq[StepItem]) -> list[Wanted]:
        """Whom the controller has drafted for, by whom, and how deep."""
        decoding = [item for item in scheduled if item.decodes]
        num_others = sum(item.num_rows for item in scheduled) - len(decoding)
        insists = any(item.sequence.options.draft_method is not None for item in decoding)
        may_repeat = bool(decoding) and not (insists and controller.rests)
        if may_repeat and controller.repeats(len(decoding), num_others > 0):
            self._step = _Step(num_others=num_others) if controller.wants_books else None
            return [] if controller.rests else self._again(controller, decoding)
        started_s = time.perf_counter()
        self._turn += 1
        step = self._step = _Step(num_others=num_others)
        wanted: list[Wanted] = []
        choices = controller.choose([self._asked(item) for item in decoding], step.num_others)
        for item, choice in zip(decoding, choices, strict=True):
            if item.sequence.options.draft_method is not None and choice == NOTHING:
                choice = self._insisted(item)
            step.choices[item.sequence.id] = choice
            if choice.drafts:
                wanted.append((item.sequence, item.max_draft_tokens, choice))
        if num_others:
            wanted += self._announced(controller, scheduled)
        scores = controller.rests or self._turn % SCORED_EVERY == 0  # who rests is asked seldom
        if self._chooses and decoding and scores:
            self._look_up(controller, step, decoding[self._turn // SCORED_EVERY % len(decoding)])
        step.books_s = time.perf_counter() - started_s - controller.planning_s
        return wanted

    def _again(self, controller: Controller, decoding: Seq[StepItem]) -> list[Wanted]:
        """What was decided before."""
        wanted: list[Wanted] = []
        anyone = self._chooses or not self.drafters.num_failures
        for item in decoding:
            sequence, limit = item.sequence, item.max_draft_tokens
            choice = controller.standing(sequence.id, self.task_of(sequence))
            if sequence.options.draft_method is not None or not anyone:
                choice = controller.bounded(choice, self._asked(item))
                if choice == NOTHING and sequence.options.draft_method is not None:
                    choice = self._insisted(item)
            if choice.drafts and limit > 0:
                wanted.append((sequence, limit, choice))
        return wanted

    def _insisted(self, item: StepItem) -> Choice:
        """Whoever names a drafter gets it, though nobody would be asked for their request."""
        controller, sequence = self.controller, item.sequence
        if controller is None or controller.in_probe or not item.max_draft_tokens:
            return NOTHING
        for number, member in enumerate(controller.members):
            if self.drafters.serves(number, sequence):
                return Choice(number, min(member.max_depth, item.max_draft_tokens))
        return NOTHING

    def _announced(self, controller: Controller, scheduled: Seq[StepItem]) -> Iterator[Wanted]:
        """Drafters that begin with a prompt while the target computes it."""
        for item in scheduled:
            sequence = item.sequence
            if item.decodes or not self._may_draft(sequence) or controller.in_probe:
                continue
            length = sequence.num_computed + item.num_rows
            member = controller.announce(
                sequence.id, self.task_of(sequence), item.num_rows, length, sequence.max_output_tokens
            )
            if member != NOBODY and self.drafters.serves(member, sequence):
                yield sequence, 0, Choice(member)

    def _ask(self, controller: Controller, wanted: Seq[Wanted]) -> dict[int, Proposal]:
        """Sequence id to proposal; keeps what the calls took."""
        if not wanted:
            return {}
        proposals = self.drafters.ask(wanted)
        for number, sequences, budgets, seconds in self.drafters.calls:
            if not controller.members[number].looks_up:
                for sequence, budget in zip(sequences, budgets, strict=True):
                    if budget:
                        controller.meet(number, sequence.id, len(sequence.token_ids))
            elif self._step is None:
                continue
            if self._step is not None:
                drafted = _drafted(budgets, controller.members[number].is_chain)
                self._step.calls.append(Call(number, drafted, seconds))
        return proposals

    def _look_up(self, controller: Controller, step: _Step, item: StepItem) -> None:
        """Ask a lookup that was not chosen what it would have proposed, to see later whether it was right.

        It costs no pass of the target, so the choice among lookups learns from requests that they did not draft for.
        """
        sequence = item.sequence
        asked_first = step.choices[sequence.id].lookup
        for number, guard in enumerate(self.drafters.guards):
            if (
                number == asked_first
                or not guard.drafter.looks_up
                or not self.drafters.serves(number, sequence)
            ):
                continue
            limit = min(item.max_draft_tokens, guard.drafter.max_nodes())
            if limit and controller.may_score(number):
                [proposal] = guard.ask([sequence], [limit])
                self._unchecked.append(_Unchecked(sequence, number, proposal, len(sequence.token_ids)))
                return

    def _asked(self, item: StepItem) -> Asked:
        sequence, drafters = item.sequence, self.drafters
        limit = item.max_draft_tokens if self._may_draft(sequence) else 0
        members = None
        if sequence.options.draft_method is not None or drafters.num_failures:
            members = frozenset(n for n in range(len(drafters.guards)) if drafters.serves(n, sequence))
        length = len(sequence.token_ids)
        num_output = length - sequence.num_prompt_tokens
        return Asked(sequence.id, self.task_of(sequence), limit, length, num_output, members)

    # --- after the verdicts -----------------------------------------------------------------------------------

    def observe(self, observations: Seq[Observation]) -> None:
        """Tell the drafters the verdicts on their own draft tokens, and the controller what they were worth."""
        if self.controller is not None and self._step is not None:
            self._step.gains = [
                Gain(self.task_of(seen.sequence), len(seen.sequence.token_ids) - seen.length_before)
                for seen in observations
            ]
            self._prepare(self.controller, self._step, [self.drafters.own(seen) for seen in observations])
        self.drafters.observe(observations)

    def _prepare(self, controller: Controller, step: _Step, own: Seq[Observation]) -> None:
        """What the controller is told of the step."""
        started_s = time.perf_counter()
        step.num_drafted = sum(len(seen.proposal) > 0 for seen in own)
        every = max(1, -(-len(own) // MAX_LEARNED))
        turn, tried = self._turn % every, controller.tried
        step.outcomes = [
            self._outcome(step, seen)
            for number, seen in enumerate(own)
            if number % every == turn or seen.sequence.id == tried
        ]
        if self._unchecked:
            self._score(controller)
        step.books_s += time.perf_counter() - started_s

    def method_of(self, sequence: Sequence) -> str:
        """Who was asked for a sequence in this step, until it is observed; `off` where the policy asked nobody."""
        drafter = self.drafters.drafted_by(sequence)
        if drafter == NOBODY:
            return "off" if self._chooses else self.drafters.names[0]
        return self.drafters.names[drafter]

    def finish(self, report: StepReport) -> None:
        """The step is over; `report` says what it took."""
        controller, step = self.controller, self._step
        if controller is None:
            return
        seconds = report.draft_s + report.verify_s + report.other_s
        if step is None:
            controller.pass_by(seconds)
            return
        draft_s = sum(call.seconds for call in step.calls)
        started_s = time.perf_counter()
        controller.learn(
            StepFacts(
                num_rows=report.num_rows + report.num_draft_tokens,
                num_others=step.num_others,
                undrafted_s=seconds - draft_s - step.books_s - controller.planning_s,
                calls=step.calls,
                outcomes=step.outcomes,
                num_drafted=step.num_drafted,
                num_checked=report.num_draft_tokens,
                gains=step.gains,
                books_s=step.books_s + self._learning_s,
            )
        )
        self._learning_s = time.perf_counter() - started_s

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted or preempted."""
        if self.controller is not None and self._unchecked:
            self._score(self.controller)
            self._unchecked = [each for each in self._unchecked if each.sequence is not sequence]
        self.drafters.release(sequence)
        if self.controller is not None:
            num_tokens = sequence.num_output_tokens if sequence.finished else None
            self.controller.release(sequence.id, self.task_of(sequence), num_tokens)

    def report(self) -> ControlReport:
        """What is known of the drafters' worth."""
        guards = self.drafters.guards
        failures = [guard.num_failures + guard.drafter.num_failures for guard in guards]
        retired = [bool(guard.retired) for guard in guards]
        if self.controller is not None:
            return self.controller.report(failures, retired)
        alone = MethodReport(self.drafters.names[0], None, (), 0, failures[0], retired[0])
        methods = (alone,) if guards[0].drafter.max_nodes() else ()
        return ControlReport(False, bool(methods) and not retired[0], False, None, None, 0.0, methods, (), ())

    def num_held(self) -> int:
        """Sequences for which anything is kept."""
        return max(self.drafters.num_held(), 0 if self.controller is None else self.controller.num_held)

    def integrity(self) -> list[str]:
        """What is wrong in the drafters' own accounting (empty when nothing is)."""
        return self.drafters.integrity()

    def _outcome(self, step: _Step, own: Observation) -> Outcome:
        sequence = own.sequence
        choice = step.choices.get(sequence.id, NOTHING)
        member = self.drafters.drafted_by(sequence) if choice.drafts else NOBODY
        checked, accepted = len(own.proposal), own.num_accepted
        cut = sequence.finished and own.was_cut  # what follows was not looked at
        depth = max(own.proposal.depths, default=0)
        if member == choice.drafter != NOBODY and depth < choice.depth and self._ends_early(member):
            depth += 1  # not confident enough to go on: no better than a rejected token
        reached = min(accepted + (not cut), depth)
        emitted = len(sequence.token_ids) - own.length_before
        lookup = choice.lookup
        if lookup not in (NOBODY, member):
            found = self.drafters.found.get(sequence.id, EMPTY_PROPOSAL)
            if len(found):  # too short to be used: what the text becomes says what it was worth
                lookup = NOBODY
                self._unchecked.append(_Unchecked(sequence, choice.lookup, found, own.length_before))
        task = self.task_of(sequence)
        return Outcome(sequence.id, task, member, choice.depth, checked, reached, accepted, emitted, lookup)

    def _ends_early(self, number: int) -> bool:
        return self.drafters.guards[number].drafter.ends_early()

    def _score(self, controller: Controller) -> None:
        """See whether what was looked up came true; a text that has not grown past it yet is waited for."""
        waiting: list[_Unchecked] = []
        for unchecked in self._unchecked:
            sequence, proposal = unchecked.sequence, unchecked.proposal
            depth = max(proposal.depths, default=0)
            grown = sequence.token_ids[unchecked.length : unchecked.length + depth]
            accepted = depth_along(proposal, grown)
            if accepted == len(grown) < depth and not sequence.finished:
                waiting.append(unchecked)
            else:
                controller.score(unchecked.drafter, self.task_of(sequence), len(proposal), accepted)
        self._unchecked = waiting


def _drafted(budgets: Seq[int], is_chain: bool) -> Drafted:
    """How much a call was for; announced prompts have no budget."""
    wanted = [budget for budget in budgets if budget]
    if is_chain:
        return Drafted(len(wanted), max(wanted, default=0), sum(wanted))
    return Drafted(len(wanted), 1, len(wanted))
