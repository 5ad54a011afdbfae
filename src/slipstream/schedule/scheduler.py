"""Who runs in the next step, and how many tokens each computes. No tensors.

Sequences are admitted first come, first served. A step holds a bounded number of rows. Every decoding sequence gets
its row first, and prompts share the rest evenly: a long prompt delays the others' next token by one bounded step at
most, and short prompts overtake long ones. When the cache is full, the sequence that was admitted last is preempted and
computed again later; its text does not change.
"""

from __future__ import annotations

from collections import deque

from slipstream.core import Sequence, StepItem, StepPlan
from slipstream.kv.slots import SlotAccounting
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
        self.num_preemptions = 0
        self._num_step_nodes = 0
        """Of the drafted steps that the step being planned checks."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished or aborted sequence; its cache entries are retained for prefix reuse."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._accounting.close(sequence.id)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self) -> StepPlan:
        """Decide the next step and reserve the slots that it will write."""
        plan = StepPlan()
        self._admit()
        rows = self._share_rows()
        for sequence in list(self.running):
            if sequence in plan.preempted or rows.get(sequence.id, 0) == 0:
                continue
            item = StepItem(sequence, rows[sequence.id])
            if item.decodes:
                item.max_draft_tokens = self._draft_tokens(sequence, rows)
            if self._reserve(item, plan):
                plan.scheduled.append(item)
        return plan

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if len(self.running) >= self._max_num_seqs:
                return
            if _waits_for_leader(sequence):
                continue
            cached = self._accounting.open(
                sequence.id, sequence.entry_ids(), sequence.tenant, reuse=not sequence.wants_prompt_logprobs
            )
            if cached is None:
                return  # later ones must not overtake it: a large request would starve
            sequence.num_computed = cached
            if sequence.metrics.num_preemptions == 0:
                sequence.metrics.num_cached_tokens = min(cached, sequence.num_prompt_tokens)
            self.waiting.remove(sequence)
            self.running.append(sequence)

    def _share_rows(self) -> dict[int, int]:
        """Sequence id to the pending tokens that it computes in this step; absent where it awaits a drafted step."""
        rows = {s.id: 1 for s in self.running if s.num_pending == 1 and not s.awaits_draft}
        self._grant_steps(rows)
        prompts = sorted((s for s in self.running if s.num_pending > 1), key=lambda s: s.num_pending)
        left = self._max_rows - len(rows) - self._num_step_nodes
        scored, left_scored = sum(s.wants_prompt_logprobs for s in prompts), MAX_SCORED_ROWS
        for number, sequence in enumerate(prompts):
            share = left // (len(prompts) - number)
            rows[sequence.id] = min(sequence.num_pending, max(share, 1)) if left else 0
            if sequence.wants_prompt_logprobs:
                rows[sequence.id] = min(rows[sequence.id], max(left_scored // scored, 1))
                left_scored -= rows[sequence.id]
                scored -= 1
            left -= rows[sequence.id]
        return rows

    def _grant_steps(self, rows: dict[int, int]) -> None:
        """Whole drafted steps are checked as far as there are rows for them, first come, first served."""
        self._num_step_nodes = 0
        for sequence in self.running:
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
        """Make room for the rows: first without draft tokens, then by preempting later arrivals."""
        sequence = item.sequence
        needed = sequence.num_computed + item.num_rows
        if self._accounting.reserve(sequence.id, needed + item.max_draft_tokens):
            return True
        item.max_draft_tokens = 0
        while not self._accounting.reserve(sequence.id, needed):
            victim = self.running[-1]
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


def _waits_for_leader(sequence: Sequence) -> bool:
    leader = sequence.leader
    return leader is not None and not leader.finished and leader.num_new_tokens == 0
