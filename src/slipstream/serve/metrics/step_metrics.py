"""Metrics of the engine's steps: their time, and the tokens that they drafted, accepted and emitted."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import repeat, zip_longest

from prometheus_client import Counter

from slipstream.core.metrics.decoded import DecodedRow
from slipstream.core.metrics.request import add_to_first
from slipstream.core.metrics.step import StepReport
from slipstream.serve.accounts import TaskLabels
from slipstream.serve.metrics.instruments import Instruments

_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class StepMetrics:
    """Counts what the engine's steps did. Safe from every thread."""

    def __init__(self, new: Instruments, task_label: TaskLabels) -> None:
        self._task_label = task_label
        self._by_task: dict[tuple[str, str], tuple[Counter, ...]] = {}
        self._by_position: list[tuple[Counter, Counter]] = []
        self._draft_s = new.counter("draft_seconds", "Time spent drafting.")
        self._verify_s = new.counter(
            "verify_seconds", "Time spent in target passes and verification, prompts included."
        )
        self._other_s = new.counter("other_seconds", "Time spent in the rest of the steps.")
        self._steps = new.counter("engine_steps", "Steps of the engine, each for all running answers.")
        self._rows = new.histogram(
            "iteration_tokens_total", "Tokens computed by a step, without draft tokens.", _ROWS
        )
        self._prompt_tokens = new.counter("prompt_tokens", "Prompt tokens of answers that have begun.")
        self._output_tokens = new.counter("generation_tokens", "Output tokens.")
        self._queries = new.counter("prefix_cache_queries", "Prompt tokens looked up for reuse.")
        self._hits = new.counter("prefix_cache_hits", "Prompt tokens that were reused.")
        self._declare_drafts(new)

    def _declare_drafts(self, new: Instruments) -> None:
        spec = "spec_decode_"
        self._drafts = new.counter(spec + "num_drafts", "Steps in which a sequence's draft was checked.")
        self._drafted = new.counter(spec + "num_draft_tokens", "Draft tokens that were checked.")
        self._accepted = new.counter(
            spec + "num_accepted_tokens", "Draft tokens that were accepted and emitted."
        )
        self._wasted = new.counter(spec + "num_wasted_tokens", "Draft tokens that were checked and rejected.")
        self._drafted_at = new.counter(
            spec + "num_draft_tokens_per_pos", "Drafts with a token at this position, from 0.", "position"
        )
        self._accepted_at = new.counter(
            spec + "num_accepted_tokens_per_pos",
            "Draft tokens accepted at this position, from 0.",
            "position",
        )
        self._length = new.histogram(
            spec + "accepted_length", "Draft tokens accepted in a step of a sequence with a draft.", _LENGTHS
        )
        by_task = ("task", "method")
        self._task_steps = new.counter("task_steps", "Target passes that produced tokens, by task.", *by_task)
        self._task_drafted = new.counter(
            "task_draft_tokens", "Draft tokens that were checked, by task.", *by_task
        )
        self._task_accepted = new.counter("task_accepted_tokens", "Accepted draft tokens, by task.", *by_task)
        self._task_output = new.counter("task_generation_tokens", "Output tokens, by task.", *by_task)

    def on_step(self, step: StepReport) -> None:
        """Count a step's time."""
        self._steps.inc()
        self._draft_s.inc(step.draft_s)
        self._verify_s.inc(step.verify_s)
        self._other_s.inc(max(step.other_s, 0.0))
        self._rows.observe(step.num_rows)

    def on_rows(self, rows: Seq[DecodedRow]) -> None:
        """Count a step's draft, accepted and emitted tokens, added up first: every counter takes a lock."""
        self.on_repeated_rows(zip(rows, repeat(1)))
        self.on_prompts(
            sum(row.num_prompt_tokens for row in rows), sum(row.num_cached_tokens for row in rows)
        )

    def on_prompts(self, num_tokens: int, num_cached: int) -> None:
        """Count the tokens of prompts, and those of them that were reused."""
        if num_tokens:
            self._prompt_tokens.inc(num_tokens)
            self._queries.inc(num_tokens)
            self._hits.inc(num_cached)

    def on_repeated_rows(self, rows: Iterable[tuple[DecodedRow, int]]) -> None:
        """As `on_rows`, each row as often as its number says; the tokens of prompts come by `on_prompts`."""
        emitted = num_drafts = drafted = accepted = 0
        drafted_at: list[int] = []
        accepted_at: list[int] = []
        tasks: dict[tuple[str, str], list[int]] = {}
        for row, times in rows:
            emitted += row.num_emitted * times
            if row.num_drafted:
                num_drafts += times
                drafted += row.num_drafted * times
                accepted += row.num_accepted * times
                self._length.observe_times(row.num_accepted, times)
                add_to_first(drafted_at, row.draft_depth, times)
                add_to_first(accepted_at, row.num_accepted, times)
            counted = tasks.setdefault((self._task_label(row.task), row.method), [0, 0, 0, 0])
            for i, number in enumerate((1, row.num_drafted, row.num_accepted, row.num_emitted)):
                counted[i] += number * times
        self._output_tokens.inc(emitted)
        for labels, counted in tasks.items():
            for counter, number in zip(self._task_counters(labels), counted, strict=True):
                counter.inc(number)
        if num_drafts:
            self._drafts.inc(num_drafts)
            self._drafted.inc(drafted)
            self._accepted.inc(accepted)
            self._wasted.inc(drafted - accepted)
            for position, numbers in enumerate(zip_longest(drafted_at, accepted_at, fillvalue=0)):
                for counter, number in zip(self._position_counters(position), numbers, strict=True):
                    counter.inc(number)

    def _task_counters(self, labels: tuple[str, str]) -> tuple[Counter, ...]:
        """Counters of passes, and of draft, accepted and emitted tokens of a task and drafter; cached, since
        looking up labels is slow."""
        if labels not in self._by_task:
            counters = (self._task_steps, self._task_drafted, self._task_accepted, self._task_output)
            self._by_task[labels] = tuple(counter.labels(*labels) for counter in counters)
        return self._by_task[labels]

    def _position_counters(self, position: int) -> tuple[Counter, ...]:
        """Counters of draft and accepted tokens at a depth, from 0."""
        while len(self._by_position) <= position:
            number = len(self._by_position)
            self._by_position.append((self._drafted_at.labels(number), self._accepted_at.labels(number)))
        return self._by_position[position]
