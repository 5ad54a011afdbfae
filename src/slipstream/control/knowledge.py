"""What is known of the drafters and of the requests: costs, acceptance, lengths, and who has seen which text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.control.acceptance import Acceptance, Drafts, LookupYield
from slipstream.control.choice import MAX_TASKS, Asked, Member
from slipstream.control.facts import Outcome, StepFacts
from slipstream.control.step_cost import MANY_MISSED, DraftCost, Drafted, Mean, StepCost
from slipstream.draft.choice import NOBODY
from slipstream.profiling.break_even import break_even

MAX_LEARNED = 12
"""Requests of a step that are learned from; of more, each in its turn."""
FIRST_LENGTH = 64.0
"""Tokens of an answer before any has ended."""
MAX_UNLEARNED = 256


@dataclass(slots=True)
class Use:
    """What a task's requests were given lately."""

    depth: Mean = field(default_factory=Mean)
    tokens: Mean = field(default_factory=Mean)


class Knowledge:
    """Learns from every step that is told of. What steps made of requests is kept, and worked in when it is needed."""

    def __init__(self, members: Seq[Member], pass_s: Callable[[float], float]) -> None:
        """`pass_s` is what a target pass should take by rows."""
        self.members = tuple(members)
        self.cost = StepCost(pass_s)
        self.draft_costs = [DraftCost(pass_s(1.0)) for _ in members]
        self.acceptance = [Acceptance(member.max_depth) for member in members]
        self.lookups = {number: LookupYield() for number, member in enumerate(members) if member.looks_up}
        self.step_s = Mean()
        self.num_steps = [0] * len(self.members)
        """In which some draft of a member was checked."""
        self.by_batch: dict[int, Mean] = {}
        """Requests of a step to draft tokens for each."""
        self.tasks: OrderedDict[str, Use] = OrderedDict()
        self.turn = 0
        """Steps so far."""
        self._length = Mean()
        self._lengths: OrderedDict[str, Mean] = OrderedDict()
        """Task to tokens of an answer."""
        self._outcomes: list[Outcome] = []
        self._depths: list[tuple[int, int]] = []
        """Sequences of a step and their draft tokens."""
        self._gone: list[int] = []
        self._seen: list[dict[int, tuple[int, int]]] = [{} for _ in members]
        """By member, sequence to the turn in which it was asked last, and the text's length then."""
        self._num_missed = [0] * len(self.members)
        """By member, tokens of texts that it has to compute in this step before it can draft."""

    # --- texts ------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Between two steps, when nothing of requests that are over is still to be learned from."""
        self.turn += 1
        self._num_missed = [0] * len(self.members)
        self.forget_many()

    def meet(self, member: int, sequence_id: int, length: int) -> None:
        """A drafter is asked for a request in this step; what it has not seen of the text it must compute first."""
        turn, seen = self._seen[member].get(sequence_id, (-1, 0))
        if turn != self.turn - 1:
            self._num_missed[member] += max(length - seen - 1, 0)
        self._seen[member][sequence_id] = self.turn, length

    def meet_prompt(self, member: int, sequence_id: int, num_rows: int, length: int) -> None:
        """A drafter computes `num_rows` of a prompt in this step, up to `length`."""
        self._num_missed[member] += num_rows
        self._seen[member][sequence_id] = self.turn, length

    def num_unseen(self, member: int, request: Asked) -> int:
        """Tokens of a request's text that a drafter would have to compute first, where they are many."""
        _, seen = self._seen[member].get(request.sequence_id, (0, 0))
        unseen = request.length - seen
        return unseen if unseen >= MANY_MISSED else 0

    def entry_s(self, member: int, request: Asked) -> float:
        """What it would take a drafter to compute them."""
        return self.num_unseen(member, request) * self.draft_costs[member].missed_token_s

    def usual_length(self, task: str) -> float:
        """Tokens of an answer."""
        of_task = self._lengths.get(task, self._length)
        return of_task.value if of_task.weight else FIRST_LENGTH

    def steps_left(self, request: Asked) -> float:
        """A careful guess: answers are as long as those of their task, and steps yield a token and a half."""
        usual = self.usual_length(request.task)
        return max(usual - request.num_output, 0.25 * usual, 4.0) / 1.5

    def release(self, sequence_id: int, task: str, num_tokens: int | None) -> None:
        """The request is over, after `num_tokens` of answer; None where it will come back."""
        if num_tokens:
            self._length.learn(float(num_tokens))
            lengths = self._lengths.setdefault(task, Mean())
            lengths.learn(float(num_tokens))
            self._lengths.move_to_end(task)
            if len(self._lengths) > MAX_TASKS:
                self._lengths.popitem(last=False)
        for seen in self._seen:
            seen.pop(sequence_id, None)
        self._gone.append(sequence_id)  # its last outcomes are still to be learned from

    @property
    def num_held(self) -> int:
        """Requests that are remembered."""
        self.work_in()
        return max(*map(len, self._seen), *(acceptance.num_held for acceptance in self.acceptance))

    # --- steps ------------------------------------------------------------------------------------------------

    def learn(self, facts: StepFacts, with_outcomes: bool) -> None:
        """What a step did and took; `with_outcomes` also what it made of its requests."""
        for call in facts.calls:
            self.draft_costs[call.member].learn(call.drafted, self._num_missed[call.member], call.seconds)
        number = len(facts.gains)
        if number:
            self.cost.learn(
                num_sequences=number,
                num_rows=facts.num_rows,
                drafted=facts.num_drafted,
                checked=facts.num_checked,
                seconds=facts.undrafted_s,
            )
            if with_outcomes:
                self._outcomes.extend(facts.outcomes)
                self._depths.append((number, facts.num_checked))
        if len(self._outcomes) >= MAX_UNLEARNED:
            self.work_in()

    def score(self, lookup: int, task: str, num_found: int, num_stood: int) -> None:
        """What a draft that was never checked would have come to, seen from the text that came instead."""
        self.lookups[lookup].learn(task, num_found, num_stood)

    def forget_many(self) -> None:
        """Let go of requests that are over, once they are many."""
        if len(self._gone) >= MAX_UNLEARNED:
            self.work_in()

    def work_in(self) -> None:
        """Learn what was only kept so far."""
        drafts: dict[tuple[int, int, str], Drafts] = {}
        for outcome in self._outcomes:
            if outcome.member != NOBODY:
                key = outcome.member, outcome.sequence_id, outcome.task
                if key not in drafts:
                    drafts[key] = Drafts()
                drafts[key].add(outcome.num_checked, outcome.num_reached, outcome.num_accepted)
                self.num_steps[outcome.member] += 1
            if outcome.lookup in self.lookups:
                taken = outcome.member == outcome.lookup
                found, stood = (outcome.num_checked, outcome.num_accepted) if taken else (0, 0)
                self.lookups[outcome.lookup].learn(outcome.task, found, stood)
        for (member, sequence_id, task), each in drafts.items():
            self.acceptance[member].learn(sequence_id, task, each)
        for outcome in self._outcomes:
            self._use(outcome)
        for number, checked in self._depths:
            self.by_batch.setdefault(number, Mean()).learn(checked / number)
        gone, self._gone = self._gone, []
        self._outcomes, self._depths = [], []
        for sequence_id in gone:
            for acceptance in self.acceptance:
                acceptance.release(sequence_id)

    def _use(self, outcome: Outcome) -> None:
        use = self.tasks.get(outcome.task)
        if use is None:
            use = self.tasks[outcome.task] = Use()
            if len(self.tasks) > MAX_TASKS:
                self.tasks.popitem(last=False)
        self.tasks.move_to_end(outcome.task)
        use.depth.learn(float(outcome.num_checked))
        use.tokens.learn(float(outcome.num_tokens))

    def break_even(self, member: int, num_requests: int) -> float | None:
        """The α from which on one draft token pays for each of `num_requests`."""
        plain_s = self.cost.step_s(num_requests, num_requests, 0, 0)
        if plain_s <= 0 or not self.draft_costs[member].is_known:
            return None
        draft_s = self.draft_costs[member](Drafted(num_requests, 1, num_requests))
        step_s = self.cost.step_s(num_requests, 2 * num_requests, num_requests, num_requests)
        return break_even(1, (step_s + draft_s) / plain_s)
