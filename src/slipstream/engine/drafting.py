"""The draft step: the policy chooses, guarded drafters propose, a grammar constrains; then all learn the verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING

from slipstream.control.policy import Policy
from slipstream.control.report import control_report
from slipstream.control.types import (
    NO_DRAFTER,
    NOTHING,
    Choice,
    ControlReport,
    DraftCall,
    MethodReport,
    StepRequest,
)
from slipstream.core.metrics.step import StepReport
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.core.request import RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.combine.auto import AutoDrafter
from slipstream.draft.combine.merging import text_of
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.lookup.prediction import METHOD, PredictionDrafter, PredictionOptions
from slipstream.engine.draft_record import DraftRecord, UncheckedDrafts, own_share
from slipstream.engine.forced import under_grammar
from slipstream.kv.cache import KVCache
from slipstream.text.prediction import MAX_PREDICTED_TOKENS

if TYPE_CHECKING:
    import torch

STEPS = "reasoning"
"""The name in metrics of whole steps that were drafted ahead (`engine.reasoning`)."""
SCORED_EVERY = 4
"""Steps between two looks at what a lookup would have proposed."""

Wanted = list[tuple[StepItem, Choice]]
"""For whom which drafters are called."""


class Drafting:
    """An engine's drafters, each behind a guard, and what chooses among them.

    One drafts for each sequence in a step, and learns what became of its draft. Drafters that learn from all text
    observe all that is committed, so one that was not called for a while is up to date. Where one fails, decoding goes
    on without its drafts. The last of them drafts what callers expect; it is no choice of requests or policies.
    """

    def __init__(self, drafter: Drafter, method: str, policy: Policy | None = None) -> None:
        """`method` names the drafter; `auto` has its members called. Without a policy each sequence is drafted for as
        far as the scheduler allows."""
        self._drafter = drafter
        self._group = drafter if isinstance(drafter, AutoDrafter) else None
        members = [Guard.of(drafter, drafter.context)] if self._group is None else self._group.members
        names = [method] if self._group is None else self._group.names
        methods = [method] if self._group is None else self._group.methods
        self.methods = list(dict.fromkeys([*names, *methods]))
        """The drafters that a request may name as its own."""
        prediction = PredictionDrafter(PredictionOptions(), drafter.context)
        self.guards = [*members, Guard.of(prediction, drafter.context)]
        self.names, self._methods = [*names, METHOD], [*methods, METHOD]
        """By drafter; those of the names that occur twice are numbered."""
        self._prediction = len(members)
        """The number of the one that drafts what callers expect."""
        self.policy = policy
        self.task_of: Callable[[Sequence], str] = attrgetter("task")
        """What the policy keeps the statistics of a sequence under; a server keeps its accounts' tasks apart."""
        self.record = DraftRecord()
        """Of the step that was launched last."""
        self._unchecked = UncheckedDrafts()
        self._num_steps = 0
        self._everything = Choice(0, drafter.traits.max_nodes)
        self._most = [guard.drafter.traits.max_nodes for guard in self.guards]
        self._is_chain = [guard.drafter.traits.chain_length is not None for guard in self.guards]
        self._learns = [type(guard.drafter).observe is not Drafter.observe for guard in self.guards]
        self._listens = any(
            learns and guard.drafter.traits.observes_all
            for learns, guard in zip(self._learns, self.guards, strict=True)
        )
        """Whether some drafter learns from sequences that it was not called for."""

    def group_tasks_by(self, name: Callable[[RequestOptions], str], task: Callable[[str], str]) -> None:
        """Keep the statistics of a request under `name` of its options, from which `task` tells its task."""
        self.task_of = lambda sequence: name(sequence.options)
        if self.policy is not None:
            self.policy.read_tasks_by(task)

    # --- before the pass --------------------------------------------------------------------------------------

    def propose(
        self,
        scheduled: Seq[StepItem],
        given: Mapping[int, Proposal] | None = None,
        repeated: DraftRecord | None = None,
    ) -> DraftRecord:
        """Set what is proposed for each sequence, and who proposed it. What is `given`, by sequence id, is drafted
        already: it is proposed whole, or not at all. A step ahead of the policy does as the `repeated` one chose.

        Where the target is still computing the prompt, the drafter is called with a budget of 0, so that it can
        compute it meanwhile; a sequence whose caller wants no drafts costs nothing. An answer under a grammar gets
        the grammar's forced tokens too, and no draft tokens that the grammar refuses. Where an answer is followed in
        what its caller expects, that is the proposal, and no drafter is called.
        """
        policy = self.policy
        self.record = DraftRecord() if repeated is None else repeated.repeated()
        self._draft_expected(scheduled, given or {})
        wanted = self._wanted(scheduled, repeated is not None)
        in_probe = policy is not None and repeated is None and policy.in_probe
        if in_probe:
            for item in scheduled:
                if item.drafter == self._prediction:
                    item.drafter, item.proposal = None, EMPTY_PROPOSAL
        self.call_drafters(wanted)
        for item in scheduled:
            sequence = item.sequence
            if sequence.grammar is not None and item.max_draft_tokens > 0 and not in_probe:
                drafted = item.proposal
                item.proposal = under_grammar(
                    drafted, sequence.grammar, sequence.output_token_ids, item.max_draft_tokens
                )
                item.is_forced = not len(drafted) and len(item.proposal) > 0
            item.method = item.method or self._name_of(item)
            sequence.metrics.draft_version = self._drafter.version_of(sequence)
        return self.record

    def _draft_expected(self, scheduled: Seq[StepItem], given: Mapping[int, Proposal]) -> None:
        """Propose what is given, and what follows in predictions; one that is not followed drafts nothing."""
        expecting: list[StepItem] = []
        for item in scheduled:
            steps = given.get(item.sequence.id)
            if steps is not None and item.max_draft_tokens >= len(steps):
                item.proposal, item.method = steps, STEPS
            elif item.sequence.expected is not None and item.decodes and item.max_draft_tokens > 0:
                expecting.append(item)
        limits = [min(MAX_PREDICTED_TOKENS, item.max_draft_tokens) for item in expecting]
        self._call(self._prediction, expecting, limits)
        for item in expecting:
            if not len(item.proposal):
                item.drafter = None

    def _wanted(self, scheduled: Seq[StepItem], repeats: bool) -> Wanted:
        """For whom to draft; with `repeats` by the choices that are there."""
        if self.policy is not None and not repeats:
            return self._chosen(self.policy, scheduled)
        if self.policy is not None:
            choices = [(item, self.record.requests[item.sequence.id].choice) for item in scheduled]
            return [(item, choice) for item, choice in choices if choice.drafts and item.max_draft_tokens]
        return [
            (item, self._everything)
            for item in scheduled
            if (item.max_draft_tokens > 0 or not item.decodes)
            and self.may_draft(item.sequence)
            and not len(item.proposal)
        ]

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether its caller wants drafts, and some drafter has not failed it."""
        if sequence.options.max_draft_tokens == 0 or not self._everything.depth:
            return False
        return any(guard.serves(sequence) for guard in self.guards[: self._prediction])

    def _chosen(self, policy: Policy, scheduled: Seq[StepItem]) -> Wanted:
        """For whom to draft, with the policy's choices."""
        decoding, record = [item for item in scheduled if item.decodes], self.record
        self._num_steps += 1
        record.num_prompt_rows = sum(item.num_rows for item in scheduled) - len(decoding)
        record.requests = {item.sequence.id: self._request(item) for item in decoding}
        requests = list(record.requests.values())
        wanted: Wanted = []
        for item, request, choice in zip(
            decoding, requests, policy.choose(requests, record.num_prompt_rows), strict=True
        ):
            if len(item.proposal):
                continue
            if item.sequence.options.draft_method is not None and not choice.drafts:
                choice = self._named(policy, item)
            request.choice = choice
            if choice.drafts:
                wanted.append((item, choice))
        if record.num_prompt_rows:
            wanted += self._announced(policy, scheduled)
        if self._num_steps % SCORED_EVERY == 0 and decoding:
            self._look_up(policy, decoding[self._num_steps // SCORED_EVERY % len(decoding)])
        return wanted

    def _named(self, policy: Policy, item: StepItem) -> Choice:
        """A request's explicit drafter overrides the policy, except in a probe."""
        if policy.in_probe or not item.max_draft_tokens:
            return NOTHING
        for number, traits in enumerate(policy.drafters):
            if self.serves(number, item.sequence):
                return Choice(number, min(traits.max_depth, item.max_draft_tokens))
        return NOTHING

    def _announced(self, policy: Policy, scheduled: Seq[StepItem]) -> Iterator[tuple[StepItem, Choice]]:
        """Drafters that begin with a prompt while the target computes it."""
        for item in scheduled:
            sequence = item.sequence
            if item.decodes or not self.may_draft(sequence):
                continue
            num_computed = sequence.num_computed + item.num_rows
            drafter = policy.announce(
                self._request(item), item.num_rows, num_computed, sequence.max_output_tokens
            )
            if drafter != NO_DRAFTER:
                yield item, Choice(drafter)

    def _look_up(self, policy: Policy, item: StepItem) -> None:
        """Call a lookup that was not chosen for what it would have proposed, to see later whether it was right.

        It costs no pass of the target, so the choice among lookups learns from requests that they did not draft for.
        """
        sequence = item.sequence
        asked_first = self.record.requests[sequence.id].choice.lookup
        for number, traits in enumerate(policy.drafters):
            if number == asked_first or not traits.looks_up or not self.serves(number, sequence):
                continue
            limit = min(item.max_draft_tokens, traits.max_depth)
            if limit and policy.may_score(number):
                [proposal] = self.guards[number].propose([sequence], [limit])
                self._unchecked.add(sequence, number, proposal, item.length_before)
                return

    def _request(self, item: StepItem) -> StepRequest:
        sequence = item.sequence
        limit = 0 if len(item.proposal) else item.max_draft_tokens  # it may have its draft already
        members, allowed = range(self._prediction), None
        if sequence.options.draft_method is not None or any(self.guards[n].num_failures for n in members):
            allowed = frozenset(n for n in members if self.serves(n, sequence))
        length = item.length_before
        num_output = length - sequence.num_prompt_tokens
        return StepRequest(sequence.id, self.task_of(sequence), limit, length, num_output, allowed)

    def serves(self, number: int, sequence: Sequence) -> bool:
        """Whether a drafter may be called for a sequence: its caller names no other one, and it has not failed it."""
        wanted = sequence.options.draft_method in (None, self.names[number], self._methods[number])
        return wanted and self.guards[number].serves(sequence)

    def runs_ahead(self, item: StepItem, record: DraftRecord) -> bool:
        """Whether the next step of a sequence can be drafted for, or has no drafts, before this one is read, of which
        `record` says what was drafted."""
        sequence, choice = item.sequence, NOTHING
        if sequence.expected is not None:
            return False
        if self.policy is not None:
            if not record.may_be_repeated(self.policy):
                return False
            choice = record.requests[sequence.id].choice
        elif self.may_draft(sequence):
            choice = self._everything
        if not choice.drafts:
            return not len(item.proposal)
        if choice.lookup != NO_DRAFTER or item.drafter != choice.drafter:
            return False
        return self.guards[choice.drafter].runs_ahead(sequence)

    # --- the drafters' calls ----------------------------------------------------------------------------------

    def call_drafters(self, wanted: Wanted) -> None:
        """Call the drafters that are wanted, each once: the lookups, and then those whose drafts are still needed."""
        self.record.calls = []  # what predictions take is the step's own time
        first: dict[int, Wanted] = {}
        then: dict[int, Wanted] = {}
        for item, choice in wanted:
            if choice.lookup != NO_DRAFTER:
                first.setdefault(choice.lookup, []).append((item, choice))
            elif choice.drafter != NO_DRAFTER:
                then.setdefault(choice.drafter, []).append((item, choice))
        for number, pairs in sorted(first.items()):
            self._call(number, [item for item, _ in pairs], [item.max_draft_tokens for item, _ in pairs])
            for item, choice in pairs:
                item.found = item.proposal
                if len(item.found) >= choice.min_tokens:
                    continue
                item.drafter, item.drafted, item.proposal = None, EMPTY_PROPOSAL, EMPTY_PROPOSAL
                if choice.drafter != NO_DRAFTER:
                    then.setdefault(choice.drafter, []).append((item, choice))
        for number, pairs in sorted(then.items()):
            limits = [min(choice.depth, item.max_draft_tokens) for item, choice in pairs]
            self._call(number, [item for item, _ in pairs], limits)

    def _call(self, number: int, items: Seq[StepItem], limits: Seq[int]) -> None:
        """Set what one drafter proposes, for those that it serves."""
        guard, most = self.guards[number], self._most[number]
        budgets = [min(limit, most) for limit in limits]
        if guard.num_failures:
            served = [guard.serves(item.sequence) for item in items]
            items, budgets = list(compress(items, served)), list(compress(budgets, served))
        if not items:
            return
        started_s = time.perf_counter()
        proposals = guard.propose([item.sequence for item in items], budgets)
        seconds = time.perf_counter() - started_s
        for item, proposal in zip(items, proposals, strict=True):
            item.drafter = number
            item.proposal = item.drafted = proposal if len(proposal) else EMPTY_PROPOSAL
        self._record_call(number, items, budgets, seconds)

    def _record_call(self, number: int, items: Seq[StepItem], budgets: Seq[int], seconds: float) -> None:
        """Keep what a call was for, and say who was called: but for lookups, which have nothing to catch up with.
        Announced prompts have no budget."""
        drafting = [budget for budget in budgets if budget]
        levels, num_tokens = max(drafting, default=0), sum(drafting)
        if not self._is_chain[number]:
            levels, num_tokens = 1, len(drafting)
        self.record.calls.append(DraftCall(len(drafting), levels, num_tokens, number, seconds))
        policy = self.policy
        if policy is None or number == self._prediction or policy.drafters[number].looks_up:
            return
        for item, budget in zip(items, budgets, strict=True):
            if budget and self.record.num_repeats:
                self.record.called.append((number, item))
            elif budget:
                policy.note_called(number, item.sequence.id, item.length_before)

    def _name_of(self, item: StepItem) -> str:
        """The drafter that was called for it; `off` where the policy chose none."""
        if item.drafter is not None:
            return self.names[item.drafter]
        return self.names[0] if self._group is None else "off"

    # --- after the verdicts -----------------------------------------------------------------------------------

    def observe(self, items: Seq[StepItem], record: DraftRecord) -> None:
        """Pass to each drafter the verdicts on its own draft tokens, and keep for the policy what became of them."""
        if self.policy is not None:
            record.tell_begin(self.policy, items)
            if record.speculates:
                for item in items:
                    self._note_outcome(item, record.requests[item.sequence.id])
            self._unchecked.score(self.policy, self.task_of)
        if not self._listens and all(item.drafter is None for item in items):
            return
        verdicts = [Observation.of(item) for item in items]
        for number, guard in enumerate(self.guards):
            if not self._learns[number]:
                continue
            guard.observe(
                [
                    own_share(item, seen) if item.drafter == number else text_of(seen)
                    for item, seen in zip(items, verdicts, strict=True)
                    if item.drafter == number or guard.drafter.traits.observes_all
                ]
            )

    def _note_outcome(self, item: StepItem, request: StepRequest) -> None:
        """What the step made of a request, by the draft tokens that the chosen drafter proposed."""
        sequence = item.sequence
        choice, request.lookup = request.choice, request.choice.lookup
        request.num_tokens = len(sequence.token_ids) - item.length_before
        if item.method == STEPS or item.drafter == self._prediction:
            request.num_tokens = 1  # what was expected says nothing of what drafters gain
        elif item.drafter is not None:
            request.drafter = item.drafter
            own = own_share(item, Observation.of(item))
            request.num_checked, request.num_accepted = len(own.proposal), own.num_accepted
            depth = own.proposal.depth
            if choice.drafter == item.drafter and depth < choice.depth:
                # A chain that ends early lacks the confidence to go on: no better than a rejected token.
                depth += self.guards[item.drafter].drafter.traits.ends_early
            cut = sequence.finished and item.was_cut  # what follows was not looked at
            request.num_reached = min(own.num_accepted + (not cut), depth)
        if request.lookup not in (NO_DRAFTER, request.drafter) and len(item.found):
            # Too short to be used: what the text becomes says what it was worth.
            self._unchecked.add(sequence, request.lookup, item.found, item.length_before)
            request.lookup = NO_DRAFTER

    def finish(self, report: StepReport, step_s: float, record: DraftRecord) -> None:
        """The step is over; `report` says what it did, and `step_s` what it took without its extension."""
        if self.policy is None:
            return
        draft_s = sum(call.seconds for call in record.calls)
        self.policy.observe(
            list(record.requests.values()),
            record.calls,
            num_rows=report.num_rows + report.num_draft_tokens,
            num_prompt_rows=record.num_prompt_rows,
            num_checked=report.num_draft_tokens,
            undrafted_s=step_s - draft_s - self.policy.planning_s,
        )

    # --- all of them ------------------------------------------------------------------------------------------

    def attach(self, cache: KVCache) -> None:
        """Introduce the drafters to their target's cache."""
        if self._group is None:
            self.guards[0].attach(cache)
        else:
            self._group.attach(cache)

    def let_pend(self, device: torch.device) -> None:
        """Drafts may be pending on the target's `device`; but for those that a group makes of several."""
        for guard in self.guards:
            guard.let_pend(device)

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted or preempted."""
        if self.policy is not None:
            self._unchecked.score(self.policy, self.task_of)
            self._unchecked.forget(sequence)
        for guard in self.guards:
            guard.release(sequence)
        if self.policy is not None:
            num_tokens = sequence.num_output_tokens if sequence.finished else None
            self.policy.release(sequence.id, self.task_of(sequence), num_tokens)

    @property
    def num_failures(self) -> int:
        """How often drafters, and drafters within drafters, have been retired for a sequence that they failed."""
        return sum(guard.num_failures + guard.drafter.num_failures for guard in self.guards)

    @property
    def retired(self) -> tuple[str, ...]:
        """Drafters that are paused or retired."""
        guards = zip(self.names[: self._prediction], self.guards, strict=False)
        return tuple(name for name, guard in guards if guard.retired)

    def report(self) -> ControlReport:
        """What is known of the drafters' worth."""
        guards = self.guards[: self._prediction]
        failures = [guard.num_failures + guard.drafter.num_failures for guard in guards]
        retired = [bool(guard.retired) for guard in guards]
        if self.policy is not None:
            return control_report(self.policy, failures, retired)
        alone = MethodReport(self.names[0], None, (), 0, failures[0], retired[0])
        methods = (alone,) if guards[0].drafter.traits.max_nodes else ()
        return ControlReport(False, bool(methods) and not retired[0], False, None, None, 0.0, methods, (), ())

    def num_held(self) -> int:
        """Sequences for which anything is kept."""
        held = max(max(guard.num_held(), guard.num_retired) for guard in self.guards)
        return max(held, 0 if self.policy is None else self.policy.num_held)

    def integrity(self) -> list[str]:
        """Violated invariants of the drafters' own state, without those that are paused or retired."""
        return [
            fault if self._group is None else f"{name}: {fault}"
            for name, guard in zip(self.names, self.guards, strict=True)
            if not guard.retired
            for fault in guard.drafter.integrity()
        ]
