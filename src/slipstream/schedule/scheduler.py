"""Who runs in the next step, and how many tokens each computes. No tensors.

Sequences of one account are admitted first come, first served, and accounts share the running places (`shares`): one
that has fewer than its share gets a place at once, if need be that of another account's newest sequence. A step holds
a bounded number of rows. Every decoding sequence gets its row first, and prompts share the rest, evenly by account and
within it: a long prompt delays the others' next token by one bounded step at most, and short prompts overtake long
ones. When the cache is full, the newest sequence of the account with the most places is preempted and computed again
later. A sequence whose reader does not keep up is paused: it has no place until it is resumed. No text changes by any
of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem, StepPlan
from slipstream.kv.slots import SlotAccounting
from slipstream.schedule.shares import Shares, even_shares
from slipstream.text.prediction import MAX_PREDICTED_TOKENS

MAX_SCORED_ROWS = 256
"""The most rows a step of prompts whose log-probabilities are wanted: each has logits as wide as the vocabulary."""


class Scheduler:
    """The queue and the running set.

    `max_draft_tokens` is the largest proposal that the drafter makes. `num_tokens_limit` is the length, prompt and
    answer together, that no sequence may exceed.
    """

    def __init__(
        self,
        accounting: SlotAccounting,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_tokens_limit: int,
        max_draft_tokens: int,
    ) -> None:
        self._accounting = accounting
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_rows = max_num_batched_tokens
        self._num_tokens_limit = num_tokens_limit
        self._max_draft_tokens = max_draft_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.paused: list[Sequence] = []
        self._shares = Shares()
        self.num_preemptions = 0
        self._num_step_nodes = 0
        """Draft nodes of the whole drafted steps that the step being planned checks."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)
        self._shares.enter(sequence.account)

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished or aborted sequence; its cache entries are retained for prefix reuse."""
        if sequence in self.paused:
            self.paused.remove(sequence)
        else:
            self._take_out(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Give a waiting or running sequence no more steps until `resume`; what it has computed is retained as long as
        nothing else needs the room."""
        if self._take_out(sequence):
            sequence.num_computed = 0
            self.paused.append(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Queue a paused sequence before those of its account that wait."""
        if sequence in self.paused:
            self.paused.remove(sequence)
            self.waiting.appendleft(sequence)
            self._shares.enter(sequence.account)

    def _take_out(self, sequence: Sequence) -> bool:
        """Whether the sequence was running or waiting; now it is neither."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._accounting.close(sequence.id)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return False
        self._shares.leave(sequence.account)
        return True

    @property
    def num_sequences(self) -> int:
        """Waiting, running and paused."""
        return len(self.waiting) + len(self.running) + len(self.paused)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def may_admit(self) -> bool:
        """Whether some sequence waits that the next step may have a place for."""
        return bool(self.waiting) and (len(self.running) < self._max_num_seqs or not self._shares.is_one)

    def plan(self) -> StepPlan:
        """Decide the next step and reserve the slots that it will write."""
        plan = StepPlan()
        self._admit(plan)
        rows = self._share_rows()
        for sequence in list(self.running):
            if sequence in plan.preempted or rows.get(sequence.id, 0) == 0:
                continue
            item = StepItem(sequence, rows[sequence.id])
            if item.decodes:
                item.max_draft_tokens = self._draft_tokens(sequence, rows)
            if self._reserve(item, plan):
                plan.scheduled.append(item)
        if not self._shares.is_one:
            for item in plan.scheduled:
                self._shares.serve(item.sequence.account, item.num_rows)
        return plan

    def plan_ahead(self, sequences: Seq[Sequence]) -> list[StepItem] | None:
        """A step of one row for each of these running sequences, and drafts; None where there is no room for all."""
        items = [StepItem(sequence, 1) for sequence in sequences]
        rows = {sequence.id: 1 for sequence in sequences}
        for item in items:
            item.max_draft_tokens = self._draft_tokens(item.sequence, rows)
            needed = item.sequence.num_computed + 1 + item.max_draft_tokens
            if not self._accounting.reserve(item.sequence.id, needed):
                return None
        if not self._shares.is_one:
            for item in items:
                self._shares.serve(item.sequence.account, item.num_rows)
        return items

    def _admit(self, plan: StepPlan) -> None:
        while self.waiting:
            if len(self.running) >= self._max_num_seqs and self._shares.is_one:
                return
            sequence = self._next(plan)
            if sequence is None:
                return
            cached = self._open(sequence)
            if cached is None and self._make_way(sequence, plan):
                cached = self._open(sequence)
            if cached is None:
                return  # later ones must not overtake it: a large request would starve
            sequence.num_computed = cached
            sequence.length_at_admission = len(sequence.token_ids)
            if sequence.num_new_tokens == 0 and sequence.metrics.num_preemptions == 0:
                sequence.metrics.num_cached_tokens = min(cached, sequence.num_prompt_tokens)
            self.waiting.remove(sequence)
            self.running.append(sequence)

    def _next(self, plan: StepPlan) -> Sequence | None:
        """Who is to be admitted next; an account that a place was just taken from has had its turn in this step."""
        first: dict[str, Sequence] = {}
        for sequence in self.waiting:
            if sequence.account not in first and not _waits_for_leader(sequence):
                if self._shares.is_one:
                    return sequence
                first[sequence.account] = sequence
        return self._shares.next((s for s in first.values() if s not in plan.preempted), self.running)

    def _open(self, sequence: Sequence) -> int | None:
        """How many tokens are computed already; None where there is no place or no room for the sequence."""
        if len(self.running) >= self._max_num_seqs:
            return None
        reuse = not sequence.wants_prompt_logprobs
        return self._accounting.open(sequence.id, sequence.entry_ids(), sequence.prefix_account, reuse=reuse)

    def _make_way(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt what keeps an account from its share; nothing where that would not be enough."""
        if self._shares.is_one:
            return False
        stay, victims = list(self.running), []
        room = self._accounting.num_slots - self._accounting.num_held
        while len(stay) >= self._max_num_seqs or room <= len(sequence.token_ids):
            victim = self._shares.victim(stay, sequence.account)
            if victim is None:
                return False
            stay.remove(victim)
            victims.append(victim)
            room += len(self._accounting.slots(victim.id))
        for victim in victims:
            self._preempt(victim, plan)
        return bool(victims)

    def _share_rows(self) -> dict[int, int]:
        """Sequence id to the pending tokens that it computes in this step; absent where it awaits a drafted step."""
        rows = {s.id: 1 for s in self.running if s.num_pending == 1 and not s.awaits_draft}
        self._grant_steps(rows)
        by_account: dict[str, list[Sequence]] = {}
        for sequence in sorted((s for s in self.running if s.num_pending > 1), key=lambda s: s.num_pending):
            by_account.setdefault(sequence.account, []).append(sequence)
        prompts = list(by_account.values())
        scored = [sum(s.num_pending for s in own if s.wants_prompt_logprobs) for own in prompts]
        free = [sum(s.num_pending for s in own if not s.wants_prompt_logprobs) for own in prompts]
        most_scored = even_shares(scored, MAX_SCORED_ROWS)
        left = self._max_rows - len(rows) - self._num_step_nodes
        most = even_shares([each + bound for each, bound in zip(free, most_scored, strict=True)], left)
        for own, num_rows, num_scored in zip(prompts, most, most_scored, strict=True):
            _share_among(own, num_rows, num_scored, rows)
        return rows

    def _grant_steps(self, rows: dict[int, int]) -> None:
        """Whole drafted steps are checked as far as there are rows for them, in turn by account."""
        self._num_step_nodes = 0
        for sequence in self.running if self._shares.is_one else self._shares.in_turn(self.running):
            if sequence.num_step_nodes and sequence.id in rows:
                if self._num_step_nodes + sequence.num_step_nodes > self._max_rows - len(rows):
                    del rows[sequence.id]  # in a later step; those before it have left by then
                else:
                    self._num_step_nodes += sequence.num_step_nodes

    def _draft_tokens(self, sequence: Sequence, rows: dict[int, int]) -> int:
        """How many draft tokens to ask for.

        Never more than can be emitted beside the target's own token, than fit into the context, or than this
        sequence's share of the spare rows.
        """
        if sequence.num_step_nodes:
            return sequence.num_step_nodes
        if not self._max_draft_tokens and sequence.expected is None:
            return 0
        spare = (self._max_rows - sum(rows.values()) - self._num_step_nodes) // len(self.running)
        to_emit = sequence.max_output_tokens - sequence.num_output_tokens - 1
        to_context = self._num_tokens_limit - len(sequence.token_ids) - 1
        bound = sequence.options.max_draft_tokens
        most = self._max_draft_tokens
        if sequence.expected is not None:
            most = max(most, MAX_PREDICTED_TOKENS)
        wanted = most if bound is None else bound
        return int(max(0, min(most, wanted, spare, to_emit, to_context)))

    def _reserve(self, item: StepItem, plan: StepPlan) -> bool:
        """Make room for the rows: first without draft tokens, then by preempting."""
        sequence = item.sequence
        needed = sequence.num_computed + item.num_rows
        if self._accounting.reserve(sequence.id, needed + item.max_draft_tokens):
            return True
        item.max_draft_tokens = 0
        while not self._accounting.reserve(sequence.id, needed):
            victim = self._shares.last(self.running)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        self.running.remove(sequence)
        self._accounting.close(sequence.id)
        sequence.num_computed = 0
        sequence.metrics.num_preemptions += 1
        self.num_preemptions += 1
        plan.scheduled = [item for item in plan.scheduled if item.sequence is not sequence]
        plan.preempted.append(sequence)
        self.waiting.appendleft(sequence)


def _share_among(prompts: Seq[Sequence], left: int, left_scored: int, rows: dict[int, int]) -> None:
    """Put into `rows` what each of an account's prompts, shortest first, gets of its `left` rows."""
    scored = sum(s.wants_prompt_logprobs for s in prompts)
    for number, sequence in enumerate(prompts):
        share = left // (len(prompts) - number)
        rows[sequence.id] = min(sequence.num_pending, max(share, 1)) if left else 0
        if sequence.wants_prompt_logprobs:
            rows[sequence.id] = min(rows[sequence.id], max(left_scored // scored, 1))
            left_scored -= rows[sequence.id]
            scored -= 1
        left -= rows[sequence.id]


def _waits_for_leader(sequence: Sequence) -> bool:
    leader = sequence.leader
    return leader is not None and not leader.finished and leader.num_new_tokens == 0
