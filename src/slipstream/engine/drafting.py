"""The draft step: the policy chooses, drafters propose, a grammar constrains; then all of them learn the verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter

from slipstream.control.policy import Policy
from slipstream.control.types import (
    NOBODY,
    NOTHING,
    Choice,
    ControlReport,
    MethodReport,
    ObservedStep,
    Outcome,
    StepRequest,
)
from slipstream.core.metrics.step import StepReport
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.core.request import RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.combine.merging import depth_along
from slipstream.engine.drafters import Draft, Drafters, Wanted
from slipstream.engine.forced import under_grammar
from slipstream.kv.cache import KVCache
from slipstream.text.prediction import MAX_PREDICTED_TOKENS

STEPS = "reasoning"
"""The name in metrics of whole steps that were drafted ahead (`engine.reasoning`)."""
SCORED_EVERY = 4
"""Steps between two looks at what a lookup would have proposed."""


class Drafting:
    """An engine's drafters and what chooses among them. Where one fails, decoding goes on without its drafts."""

    def __init__(self, drafter: Drafter, method: str, policy: Policy | None = None) -> None:
        """`method` names the drafter. Without a policy each sequence is drafted for as far as the scheduler allows."""
        self.drafters = Drafters(drafter, method)
        self.policy = policy
        self.task_of: Callable[[Sequence], str] = attrgetter("task")
        """What the policy keeps the statistics of a sequence under; a server keeps its accounts' tasks apart."""
        self._most = Choice(0, drafter.max_nodes())
        self._num_steps = 0
        self._num_sequences = 0
        """Sequences that decode in the step under way."""
        self._num_prompt_rows = 0
        self._given: Mapping[int, Proposal] = {}
        """By sequence, what others have drafted for the step under way."""
        self._expected: dict[int, Proposal] = {}
        """By sequence, that and what is drafted of its prediction: no other drafter is asked."""
        self._choices: dict[int, Choice] = {}
        """By sequence, where a drafter is called in the step under way."""
        self._outcomes: list[Outcome] = []
        self._num_drafted = 0
        self._unchecked: list[Draft] = []
        """What lookups would have proposed, until the text has grown past it."""

    @property
    def methods(self) -> list[str]:
        """The drafters that a request may name as its own."""
        return self.drafters.choices

    @property
    def num_failures(self) -> int:
        """How often drafters, and drafters within drafters, have been retired for a sequence that they failed."""
        return self.drafters.num_failures

    @property
    def retired(self) -> tuple[str, ...]:
        """Drafters that are paused or retired."""
        return self.drafters.retired

    def attach(self, cache: KVCache) -> None:
        """Introduce the drafters to their target's cache."""
        self.drafters.attach(cache)

    def group_tasks_by(self, name: Callable[[RequestOptions], str], task: Callable[[str], str]) -> None:
        """Keep the statistics of a request under `name` of its options, from which `task` tells its task."""
        self.task_of = lambda sequence: name(sequence.options)
        if self.policy is not None:
            self.policy.read_tasks_by(task)

    # --- before the pass --------------------------------------------------------------------------------------

    def propose(
        self, scheduled: Seq[StepItem], given: Mapping[int, Proposal] | None = None
    ) -> dict[int, Proposal]:
        """Sequence id to proposal; sequences without one are absent. `given` are drafted already, and not asked for;
        they are proposed whole, or not at all.

        Where the target is still computing the prompt, the drafter is asked with a budget of 0, so that it can
        compute it meanwhile; a sequence whose caller wants no drafts costs nothing. An answer under a grammar gets
        the grammar's forced tokens too, and no draft tokens that the grammar refuses. Where an answer is followed in
        what its caller expects, that is the proposal, and no drafter is asked.
        """
        policy = self.policy
        given = given or {}
        self._given = {
            item.sequence.id: given[item.sequence.id]
            for item in scheduled
            if item.sequence.id in given and item.max_draft_tokens >= len(given[item.sequence.id])
        }
        expected = self._ask_expected(scheduled)
        self._expected = {key: draft.proposal for key, draft in expected.items()} | self._given
        wanted = self._everyone(scheduled) if policy is None else self._chosen(policy, scheduled)
        if policy is not None and policy.in_probe:
            self._expected, expected = dict(self._given), {}
        proposals = self.drafters.ask(wanted) | self._expected
        if policy is not None:
            self._note_asked(policy)
        self.drafters.made |= expected
        if policy is None or not policy.in_probe:
            for item in scheduled:
                sequence = item.sequence
                if sequence.grammar is not None and item.max_draft_tokens > 0:
                    own = proposals.get(sequence.id, EMPTY_PROPOSAL)
                    proposals[sequence.id] = under_grammar(
                        own, sequence.grammar, sequence.output_token_ids, item.max_draft_tokens
                    )
                    item.is_forced = not own and len(proposals[sequence.id]) > 0
        return {key: proposal for key, proposal in proposals.items() if len(proposal)}

    def _ask_expected(self, scheduled: Seq[StepItem]) -> dict[int, Draft]:
        """Sequence id to what is drafted of its prediction; absent where that has nothing to go on with."""
        whole = Choice(self.drafters.prediction, MAX_PREDICTED_TOKENS)
        self.drafters.ask(
            [
                (item.sequence, item.max_draft_tokens, whole)
                for item in scheduled
                if item.sequence.expected is not None
                and item.decodes
                and item.max_draft_tokens > 0
                and item.sequence.id not in self._given
            ]
        )
        return {key: draft for key, draft in self.drafters.made.items() if len(draft.proposal)}

    def _note_asked(self, policy: Policy) -> None:
        """Say who was asked to draft, but for lookups, which have nothing to catch up with."""
        for draft in self.drafters.made.values():
            if draft.budget and not policy.drafters[draft.drafter].looks_up:
                policy.note_asked(draft.drafter, draft.sequence.id, draft.length)

    def _everyone(self, scheduled: Seq[StepItem]) -> list[Wanted]:
        return [
            (item.sequence, item.max_draft_tokens, self._most)
            for item in scheduled
            if (item.max_draft_tokens > 0 or not item.decodes)
            and self._may_draft(item.sequence)
            and item.sequence.id not in self._expected
        ]

    def _may_draft(self, sequence: Sequence) -> bool:
        return sequence.options.max_draft_tokens != 0 and self.drafters.serve(sequence)

    def _chosen(self, policy: Policy, scheduled: Seq[StepItem]) -> list[Wanted]:
        """The sequences to draft for, with the policy's choices."""
        decoding = [item for item in scheduled if item.decodes]
        self._num_steps += 1
        self._num_sequences = len(decoding)
        self._num_prompt_rows = sum(item.num_rows for item in scheduled) - len(decoding)
        self._choices, self._outcomes, self._num_drafted = {}, [], 0
        wanted: list[Wanted] = []
        choices = policy.choose([self._request(item) for item in decoding], self._num_prompt_rows)
        for item, choice in zip(decoding, choices, strict=True):
            sequence = item.sequence
            if sequence.id in self._expected:
                continue
            if sequence.options.draft_method is not None and not choice.drafts:
                choice = self._named(policy, item)
            if choice.drafts:
                self._choices[sequence.id] = choice
                wanted.append((sequence, item.max_draft_tokens, choice))
        if self._num_prompt_rows:
            wanted += self._announced(policy, scheduled)
        if self._num_steps % SCORED_EVERY == 0 and decoding:
            self._look_up(policy, decoding[self._num_steps // SCORED_EVERY % len(decoding)])
        return wanted

    def _named(self, policy: Policy, item: StepItem) -> Choice:
        """A request's explicit drafter overrides the policy, except in a probe."""
        if policy.in_probe or not item.max_draft_tokens:
            return NOTHING
        for number, traits in enumerate(policy.drafters):
            if self.drafters.serves(number, item.sequence):
                return Choice(number, min(traits.max_depth, item.max_draft_tokens))
        return NOTHING

    def _announced(self, policy: Policy, scheduled: Seq[StepItem]) -> Iterator[Wanted]:
        """Drafters that begin with a prompt while the target computes it."""
        for item in scheduled:
            sequence = item.sequence
            if item.decodes or not self._may_draft(sequence):
                continue
            num_computed = sequence.num_computed + item.num_rows
            drafter = policy.announce(
                self._request(item), item.num_rows, num_computed, sequence.max_output_tokens
            )
            if drafter != NOBODY:
                yield sequence, 0, Choice(drafter)

    def _look_up(self, policy: Policy, item: StepItem) -> None:
        """Ask a lookup that was not chosen what it would have proposed, to see later whether it was right.

        It costs no pass of the target, so the choice among lookups learns from requests that they did not draft for.
        """
        sequence = item.sequence
        asked_first = self._choices.get(sequence.id, NOTHING).lookup
        for number, traits in enumerate(policy.drafters):
            if number == asked_first or not traits.looks_up or not self.drafters.serves(number, sequence):
                continue
            limit = min(item.max_draft_tokens, traits.max_depth)
            if limit and policy.may_score(number):
                [proposal] = self.drafters.guards[number].ask([sequence], [limit])
                self._unchecked.append(Draft(sequence, number, proposal, len(sequence.token_ids)))
                return

    def _request(self, item: StepItem) -> StepRequest:
        sequence = item.sequence
        limit, allowed = item.max_draft_tokens, None
        if sequence.id in self._expected:
            limit = 0  # it has its draft
        if sequence.options.draft_method is not None or self.drafters.has_failed:
            allowed = frozenset(
                n for n in range(self.drafters.prediction) if self.drafters.serves(n, sequence)
            )
        length = len(sequence.token_ids)
        num_output = length - sequence.num_prompt_tokens
        return StepRequest(sequence.id, self.task_of(sequence), limit, length, num_output, allowed)

    # --- after the verdicts -----------------------------------------------------------------------------------

    def observe(self, observations: Seq[Observation]) -> None:
        """Pass to each drafter the verdicts on its own draft tokens, and keep the outcomes for the policy."""
        if self.policy is not None:
            if self._choices:
                own = [self.drafters.own(seen) for seen in observations]
                self._num_drafted = sum(len(seen.proposal) > 0 for seen in own)
                self._outcomes = [self._outcome(seen) for seen in own]
            if self._unchecked:
                self._score(self.policy)
        self.drafters.observe(observations)

    def method_of(self, sequence: Sequence) -> str:
        """The drafter called for a sequence in this step, until it is observed; `off` where the policy chose none."""
        if sequence.id in self._given:
            return STEPS
        return self.drafters.name_of(sequence)

    def choice_of(self, sequence: Sequence) -> Choice:
        """The policy's choice for a sequence in the step that was made last."""
        return self._choices.get(sequence.id, NOTHING)

    def finish(self, report: StepReport, step_s: float) -> None:
        """The step is over; `report` says what it did, and `step_s` what it took without its extension."""
        if self.policy is None:
            return
        self.policy.observe(
            ObservedStep(
                num_sequences=self._num_sequences,
                num_rows=report.num_rows + report.num_draft_tokens,
                num_prompt_rows=self._num_prompt_rows,
                undrafted_s=step_s
                - sum(call.seconds for call in self.drafters.calls)
                - self.policy.planning_s,
                calls=self.drafters.calls,
                outcomes=self._outcomes,
                num_drafted=self._num_drafted,
                num_checked=report.num_draft_tokens,
            )
        )

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted or preempted."""
        if self.policy is not None and self._unchecked:
            self._score(self.policy)
            self._unchecked = [each for each in self._unchecked if each.sequence is not sequence]
        self.drafters.release(sequence)
        self._expected.pop(sequence.id, None)
        if self.policy is not None:
            num_tokens = sequence.num_output_tokens if sequence.finished else None
            self.policy.release(sequence.id, self.task_of(sequence), num_tokens)

    def report(self) -> ControlReport:
        """What is known of the drafters' worth."""
        guards = self.drafters.guards[: self.drafters.prediction]
        failures = [guard.num_failures + guard.drafter.num_failures for guard in guards]
        retired = [bool(guard.retired) for guard in guards]
        if self.policy is not None:
            return self.policy.report(failures, retired)
        alone = MethodReport(self.drafters.names[0], None, (), 0, failures[0], retired[0])
        methods = (alone,) if guards[0].drafter.max_nodes() else ()
        return ControlReport(False, bool(methods) and not retired[0], False, None, None, 0.0, methods, (), ())

    def num_held(self) -> int:
        """Sequences for which anything is kept."""
        return max(self.drafters.num_held(), 0 if self.policy is None else self.policy.num_held)

    def integrity(self) -> list[str]:
        """What is wrong in the drafters' own accounting (empty when nothing is)."""
        return self.drafters.integrity()

    def _outcome(self, own: Observation) -> Outcome:
        sequence = own.sequence
        choice = self._choices.get(sequence.id, NOTHING)
        drafter, lookup = self.drafters.drafted_by(sequence), choice.lookup
        checked, accepted = len(own.proposal), own.num_accepted
        cut = sequence.finished and own.was_cut  # what follows was not looked at
        depth = max(own.proposal.depths, default=0)
        if drafter == choice.drafter != NOBODY and depth < choice.depth and self.drafters.ends_early(drafter):
            depth += 1  # not confident enough to go on: no better than a rejected token
        reached = min(accepted + (not cut), depth)
        num_tokens = len(sequence.token_ids) - own.length_before
        if sequence.id in self._expected:
            num_tokens = 1  # what was expected says nothing of what drafters gain
        if lookup not in (NOBODY, drafter):
            found = self.drafters.found.get(sequence.id, EMPTY_PROPOSAL)
            if len(found):  # too short to be used: what the text becomes says what it was worth
                lookup = NOBODY
                self._unchecked.append(Draft(sequence, choice.lookup, found, own.length_before))
        task = self.task_of(sequence)
        return Outcome(sequence.id, task, drafter, checked, reached, accepted, num_tokens, lookup)

    def _score(self, policy: Policy) -> None:
        """See whether what was looked up came true; a text that has not grown past it yet is waited for."""
        waiting: list[Draft] = []
        for unchecked in self._unchecked:
            sequence, proposal = unchecked.sequence, unchecked.proposal
            depth = max(proposal.depths, default=0)
            grown = sequence.token_ids[unchecked.length : unchecked.length + depth]
            accepted = depth_along(proposal, grown)
            if accepted == len(grown) < depth and not sequence.finished:
                waiting.append(unchecked)
            else:
                policy.score(unchecked.drafter, self.task_of(sequence), len(proposal), accepted)
        self._unchecked = waiting
