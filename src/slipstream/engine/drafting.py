"""Who is drafted for in a step, by whom and how deep, and what becomes of drafts under a grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter

from slipstream.control.choice import NOTHING, Asked, Choice
from slipstream.control.controller import Controller
from slipstream.control.facts import Call, Outcome, StepFacts
from slipstream.control.knowledge import MAX_LEARNED
from slipstream.control.plan import NOBODY
from slipstream.control.realised import Gain
from slipstream.control.report import ControlReport, MethodReport
from slipstream.control.step_cost import Drafted
from slipstream.core import EMPTY_PROPOSAL, Proposal, ProposalKind, ScheduledSequence, Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.combine.auto import AutoDrafter, Selection, Wish
from slipstream.draft.combine.merging import depth_along, share_of
from slipstream.draft.forced import under_grammar
from slipstream.draft.guard import Guard
from slipstream.metrics.step import StepReport

SCORED_EVERY = 4
"""Steps between two looks at what a lookup would have guessed."""


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
    """What a lookup would have guessed, until the text has grown past it."""

    sequence: Sequence
    member: int
    proposal: Proposal
    length: int


class Drafting(Guard):
    """The engine's guarded drafter and its controller. An answer that it fails still comes, decoded without drafts."""

    def __init__(
        self,
        drafter: Drafter,
        method: str,
        vocab_size: int,
        kinds: frozenset[ProposalKind],
        timeout_s: float,
        controller: Controller | None = None,
    ) -> None:
        """Without a controller everybody is drafted for as far as the scheduler allows."""
        super().__init__(drafter, vocab_size, kinds, timeout_s)
        self.controller = controller
        self.task_of: Callable[[Sequence], str] = attrgetter("task")
        """What the controller keeps the statistics of a sequence under; a server keeps its accounts' tasks apart."""
        self._method = method
        self._group = drafter if isinstance(drafter, AutoDrafter) else None
        drafters = [drafter] if self._group is None else [member.drafter for member in self._group.members]
        self._ends_early = [getattr(each.options, "confidence_threshold", 0.0) > 0 for each in drafters]
        self._step: _Step | None = None
        """The one under way; None where it only repeats what was decided."""
        self._unchecked: list[_Unchecked] = []
        self._turn = 0
        self._learning_s = 0.0
        """What telling the controller of a step took, the last time."""
        self._changed: dict[int, tuple[Proposal, int]] = {}
        """Sequence id to the drafter's own proposal, where another one is checked, and the text's length then."""

    # --- before the pass --------------------------------------------------------------------------------------

    def propose(self, scheduled: Seq[ScheduledSequence]) -> dict[int, Proposal]:
        """Sequence id to proposal; sequences without one are absent.

        Where the target is still computing the prompt, the drafter is asked with a budget of 0, so that it can
        compute it meanwhile; a sequence whose caller wants no drafts costs nothing. An answer under a grammar gets
        the grammar's forced tokens too, and no guesses that the grammar refuses.
        """
        if self.controller is None:
            asked = [
                (item.sequence, item.max_draft_tokens)
                for item in scheduled
                if (item.max_draft_tokens > 0 or not item.decodes) and self._may_draft(item.sequence)
            ]
            answers = self.ask([sequence for sequence, _ in asked], [budget for _, budget in asked])
            proposals = {sequence.id: answer for (sequence, _), answer in zip(asked, answers, strict=True)}
        else:
            proposals = self._ask_wishes(self._wishes(self.controller, scheduled))
        if self.controller is None or not self.controller.in_probe:
            for item in scheduled:
                if item.sequence.grammar is not None and item.max_draft_tokens > 0:
                    proposals[item.sequence.id] = self._under_grammar(item, proposals)
        return {key: proposal for key, proposal in proposals.items() if len(proposal)}

    def _may_draft(self, sequence: Sequence) -> bool:
        return sequence.max_draft_tokens != 0 and self.serves(sequence)

    def _wishes(self, controller: Controller, scheduled: Seq[ScheduledSequence]) -> list[Wish]:
        """Whom the controller has drafted for, by whom, and how deep."""
        decoding = [item for item in scheduled if item.decodes]
        num_others = sum(item.num_rows for item in scheduled) - len(decoding)
        insists = any(item.sequence.draft_method is not None for item in decoding)
        may_repeat = bool(decoding) and not (insists and controller.rests)
        if may_repeat and controller.repeats(len(decoding), num_others > 0):
            self._step = _Step(num_others=num_others) if controller.wants_books else None
            return [] if controller.rests else self._again(controller, decoding)
        started_s = time.perf_counter()
        self._turn += 1
        step = self._step = _Step(num_others=num_others)
        wishes: list[Wish] = []
        choices = controller.choose([self._asked(item) for item in decoding], step.num_others)
        for item, choice in zip(decoding, choices, strict=True):
            if item.sequence.draft_method is not None and choice == NOTHING:
                choice = self._insisted(item)
            step.choices[item.sequence.id] = choice
            if choice != NOTHING:
                wishes.append((item.sequence, item.max_draft_tokens, _selection(choice)))
        if num_others:
            wishes += self._announced(controller, scheduled)
        scores = controller.rests or self._turn % SCORED_EVERY == 0  # who rests is asked seldom
        if self._group is not None and decoding and scores:
            self._look_up(controller, step, decoding[self._turn // SCORED_EVERY % len(decoding)])
        step.books_s = time.perf_counter() - started_s - controller.planning_s
        return wishes

    def _again(self, controller: Controller, decoding: Seq[ScheduledSequence]) -> list[Wish]:
        """What was decided before."""
        wishes: list[Wish] = []
        anyone = self._group is not None or not (self.retired or self.num_retired)
        for item in decoding:
            sequence, limit = item.sequence, item.max_draft_tokens
            choice = controller.standing(sequence.id, self.task_of(sequence))
            if sequence.draft_method is not None or not anyone:
                choice = controller.bounded(choice, self._asked(item))
                if choice == NOTHING and sequence.draft_method is not None:
                    choice = self._insisted(item)
            if choice[0] != choice[2] and limit > 0:  # not `NOTHING`
                wishes.append((sequence, limit, _selection(choice)))
        return wishes

    def _insisted(self, item: ScheduledSequence) -> Choice:
        """Whoever names a drafter gets it, though nobody would be asked for their request."""
        controller, sequence = self.controller, item.sequence
        if controller is None or controller.in_probe or self._group is None or not item.max_draft_tokens:
            return NOTHING
        for number, member in enumerate(controller.members):
            if self._allows(sequence, number):
                return Choice(number, min(member.max_depth, item.max_draft_tokens))
        return NOTHING

    def _announced(self, controller: Controller, scheduled: Seq[ScheduledSequence]) -> Iterator[Wish]:
        """Drafters that begin with a prompt while the target computes it."""
        for item in scheduled:
            sequence = item.sequence
            if item.decodes or not self._may_draft(sequence) or controller.in_probe:
                continue
            length = sequence.num_computed + item.num_rows
            member = controller.announce(
                sequence.id, self.task_of(sequence), item.num_rows, length, sequence.max_output_tokens
            )
            if member != NOBODY and self._allows(sequence, member):
                yield sequence, 0, Selection(member)

    def _ask_wishes(self, wishes: Seq[Wish]) -> dict[int, Proposal]:
        """Sequence id to proposal; keeps what the calls took."""
        assert self.controller is not None
        if not wishes:
            return {}
        if self._group is not None:
            answers = self._group.ask_chosen(wishes)
            for asking in self._group.asked:
                if self._step is not None or not self.controller.members[asking.member].looks_up:
                    self._note_call(*asking)
            return answers
        sequences = [sequence for sequence, _, _ in wishes]
        budgets = [budget if s.budget is None else min(budget, s.budget) for _, budget, s in wishes]
        started_s = time.perf_counter()
        proposals = self.ask(sequences, budgets)
        self._note_call(0, sequences, budgets, time.perf_counter() - started_s)
        return {sequence.id: answer for sequence, answer in zip(sequences, proposals, strict=True)}

    def _look_up(self, controller: Controller, step: _Step, item: ScheduledSequence) -> None:
        """Ask a lookup that was not chosen what it would have guessed, to see later whether it was right.

        It costs no pass of the target, so the choice among lookups learns from requests that they did not draft for.
        """
        assert self._group is not None
        sequence = item.sequence
        asked_first = step.choices[sequence.id].lookup
        for member, guard in enumerate(self._group.members):
            if member == asked_first or not guard.drafter.looks_up or not self._allows(sequence, member):
                continue
            limit = min(item.max_draft_tokens, guard.drafter.max_nodes())
            if limit and controller.may_score(member):
                [proposal] = guard.ask([sequence], [limit])
                self._unchecked.append(_Unchecked(sequence, member, proposal, len(sequence.token_ids)))
                return

    def _asked(self, item: ScheduledSequence) -> Asked:
        sequence = item.sequence
        limit = item.max_draft_tokens if self._may_draft(sequence) else 0
        members = None
        if self._group is not None and (sequence.draft_method is not None or self._group.num_failures):
            members = frozenset(m for m in range(len(self._group.members)) if self._allows(sequence, m))
        length = len(sequence.token_ids)
        num_output = length - sequence.num_prompt_tokens
        return Asked(sequence.id, self.task_of(sequence), limit, length, num_output, members)

    def _allows(self, sequence: Sequence, member: int) -> bool:
        """Whether a drafter may be asked for a sequence: its caller wants no other, and it has not failed it."""
        if self._group is None:
            return True
        wanted = sequence.draft_method in (None, self._group.names[member], self._group.methods[member])
        return wanted and self._group.members[member].serves(sequence)

    def _note_call(self, member: int, sequences: Seq[Sequence], budgets: Seq[int], seconds: float) -> None:
        controller = self.controller
        assert controller is not None
        if not controller.members[member].looks_up:
            for sequence, budget in zip(sequences, budgets, strict=True):
                if budget:
                    controller.meet(member, sequence.id, len(sequence.token_ids))
        if self._step is not None:
            self._step.calls.append(Call(member, self._drafted(member, budgets), seconds))

    def _drafted(self, member: int, budgets: Seq[int]) -> Drafted:
        assert self.controller is not None
        wanted = [budget for budget in budgets if budget]
        if self.controller.members[member].is_chain:
            return Drafted(len(wanted), max(wanted, default=0), sum(wanted))
        return Drafted(len(wanted), 1, len(wanted))

    def _under_grammar(self, item: ScheduledSequence, proposals: dict[int, Proposal]) -> Proposal:
        sequence = item.sequence
        assert sequence.grammar is not None
        own = proposals.get(sequence.id, EMPTY_PROPOSAL)
        checked = under_grammar(own, sequence.grammar, sequence.output_token_ids, item.max_draft_tokens)
        self._changed.pop(sequence.id, None)
        if checked is not own:
            self._changed[sequence.id] = own, len(sequence.token_ids)
        return checked

    # --- after the verdicts -----------------------------------------------------------------------------------

    def observe(self, observations: Seq[Observation]) -> None:
        """Tell the drafter the verdicts on its own guesses, and the controller what they were worth."""
        own = [self._own(seen) for seen in observations] if self._changed else observations
        if self.controller is not None and self._step is not None:
            self._step.gains = [
                Gain(self.task_of(seen.sequence), len(seen.sequence.token_ids) - seen.length_before)
                for seen in observations
            ]
            self._prepare(self.controller, self._step, own)
        if self._group is not None:
            self._group.observe(own)
        else:
            super().observe(own)

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
        """Who was asked for a sequence in this step, until it is observed; `off` where `auto` asked nobody."""
        if self._group is None:
            return self._method
        member = self._group.drafted_by(sequence)
        return "off" if member is None else self._group.names[member]

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
        self._changed.pop(sequence.id, None)
        if self.controller is not None and self._unchecked:
            self._score(self.controller)
            self._unchecked = [each for each in self._unchecked if each.sequence is not sequence]
        super().release(sequence)
        if self.controller is not None:
            num_tokens = sequence.num_output_tokens if sequence.finished else None
            self.controller.release(sequence.id, self.task_of(sequence), num_tokens)

    def report(self) -> ControlReport:
        """What is known of the drafter's worth."""
        guards = [self] if self._group is None else self._group.members
        if self.controller is None:
            inner = getattr(
                self.drafter, "num_failures", 0
            )  # of an ensemble's members, a cascade's inner drafter
            alone = MethodReport(self._method, None, (), 0, self.num_failures + inner, bool(self.retired))
            methods = (alone,) if self.drafter.max_nodes() else ()
            speculating = bool(methods) and not self.retired
            return ControlReport(False, speculating, False, None, None, 0.0, methods, (), ())
        return self.controller.report(
            [guard.num_failures + getattr(guard.drafter, "num_failures", 0) for guard in guards]
            if self._group is not None
            else [self.num_failures + getattr(self.drafter, "num_failures", 0)],
            [bool(guard.retired) for guard in guards],
        )

    def num_held(self) -> int:
        controlled = 0 if self.controller is None else self.controller.num_held
        return max(super().num_held(), controlled, len(self._changed))

    def _own(self, seen: Observation) -> Observation:
        changed = self._changed.pop(seen.sequence.id, None)
        return seen if changed is None else share_of(seen, *changed)

    def _outcome(self, step: _Step, own: Observation) -> Outcome:
        sequence = own.sequence
        choice = step.choices.get(sequence.id, NOTHING)
        member = choice.member
        if self._group is not None and choice is not NOTHING:
            made_by = self._group.drafted_by(sequence)
            member = NOBODY if made_by is None else made_by
        checked, accepted = len(own.proposal), own.num_accepted
        cut = sequence.finished and own.was_cut  # what follows was not looked at
        depth = max(own.proposal.depths, default=0)
        if member == choice.member != NOBODY and depth < choice.depth and self._ends_early[member]:
            depth += 1  # not confident enough to go on: no better than a token that does not stand
        reached = min(accepted + (not cut), depth)
        emitted = len(sequence.token_ids) - own.length_before
        lookup = choice.lookup
        if lookup not in (NOBODY, member) and len(found := self._found(sequence)):
            lookup = NOBODY  # its guess was too short to be taken: time will tell
            self._unchecked.append(_Unchecked(sequence, choice.lookup, found, own.length_before))
        task = self.task_of(sequence)
        return Outcome(sequence.id, task, member, choice.depth, checked, reached, accepted, emitted, lookup)

    def _found(self, sequence: Sequence) -> Proposal:
        """What the lookup that was asked first guessed."""
        assert self._group is not None
        return self._group.found.get(sequence.id, EMPTY_PROPOSAL)

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
                controller.score(unchecked.member, self.task_of(sequence), len(proposal), accepted)
        self._unchecked = waiting


@cache
def _selection(choice: Choice) -> Selection:
    """The same in the words of `auto`."""
    member = None if choice.member == NOBODY else choice.member
    lookup = None if choice.lookup == NOBODY else choice.lookup
    return Selection(member, choice.depth, lookup, choice.min_tokens)
