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
            if sequence in plan.preempted or rows[sequence.id] == 0:
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
                sequence.id, sequence.token_ids, sequence.tenant, reuse=not sequence.wants_prompt_logprobs
            )
            if cached is None:
                return  # later ones must not overtake it: a large request would starve
            sequence.num_computed = cached
            if sequence.metrics.num_preemptions == 0:
                sequence.metrics.num_cached_tokens = cached
            self.waiting.remove(sequence)
            self.running.append(sequence)

    def _share_rows(self) -> dict[int, int]:
        """Sequence id to the pending tokens that it computes in this step."""
        rows = {sequence.id: 1 for sequence in self.running if sequence.num_pending == 1}
        prompts = sorted((s for s in self.running if s.num_pending > 1), key=lambda s: s.num_pending)
        left = self._max_rows - len(rows)
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

    def _draft_tokens(self, sequence: Sequence, rows: dict[int, int]) -> int:
        """How many draft tokens to ask for.

        Never more than can be emitted beside the target's own token, than fit into the context, or than this
        sequence's share of the spare rows.
        """
        spare = (self._max_rows - sum(rows.values())) // len(self.running)
        to_emit = sequence.max_output_tokens - sequence.num_output_tokens - 1
        to_context = self._num_tokens_limit - len(sequence.token_ids) - 1
        bound = sequence.options.max_draft_tokens
        wanted = self._max_draft_tokens if bound is None else bound
        return int(max(0, min(self._max_draft_tokens, wanted, spare, to_emit, to_context)))

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
    return leader is not None and not leader.finished and leader.num_output_tokens == 0
