"""Launches a step before the host has read the one before it.

A step's token is on the device as soon as its pass has chosen it, and where it goes is known: so the next pass is
launched from there. The host then reads the first step, and does its stop rules, texts and callbacks while the device
works. An answer that ends has one pass more on the device than it needs, whose result is dropped.

It is not done where the host must see a token first, such as for a grammar, or where the next step is another one than
a row for each running sequence. Then the step in flight is read first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from slipstream.core.pending import PendingTail
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.engine.draft_record import DraftRecord
from slipstream.engine.in_flight import InFlight
from slipstream.engine.parts import EngineParts
from slipstream.engine.runner import Choose

UNKNOWN = 0
"""In place of a token that the host has not read."""


class StepOverlap:
    """Launches the steps of one engine ahead, where they can be."""

    def __init__(self, parts: EngineParts, choose: Choose) -> None:
        executor = parts.model.executor
        chooses = parts.verifier.walks and executor.chooses
        self._is_on = parts.config.overlap_steps and executor.is_asynchronous and chooses
        self._parts, self._choose = parts, choose
        self.num_overlapped = 0
        """Steps that were launched before the one before them was read."""
        self.drained: Counter[str] = Counter()
        """Steps that were not, of those that followed another one, by why."""

    def launch(self, flight: InFlight) -> InFlight | None:
        """The step behind the one in `flight`; None where that must be read first."""
        if not self._is_on:
            return None
        going = [item for item in flight.items if not self._surely_ends(item.sequence)]
        if not going and len(flight.items) == len(self._parts.scheduler.running):
            return None  # nothing follows
        reason = self._reason_not(flight)
        if reason is None:
            self._parts.runner.enter(flight.items)
            drafts = any(map(self._parts.drafting.may_draft, (item.sequence for item in going)))
            with _grown([item.sequence for item in going], flight.tails(going, drafts)):
                launched = self._launch([item.sequence for item in going], flight.drafts)
            if launched is not None:
                self.num_overlapped += 1
                return launched
            reason = "no room"
        self.drained[reason] += 1
        return None

    def _launch(self, sequences: Seq[Sequence], before: DraftRecord) -> InFlight | None:
        items = self._parts.scheduler.plan_ahead(sequences)
        if items is None:
            return None
        drafts = self._parts.drafting.propose(items, {}, before)
        return self._parts.runner.launch(items, drafts, self._choose)

    def _surely_ends(self, sequence: Sequence) -> bool:
        """Whether the answer has its full length with one token more."""
        is_long = len(sequence.token_ids) + 1 >= self._parts.max_model_len
        return is_long or sequence.num_output_tokens + 1 >= sequence.max_output_tokens

    def _reason_not(self, flight: InFlight) -> str | None:
        """Why the step in flight is to be read first."""
        scheduler, drafting = self._parts.scheduler, self._parts.drafting
        if self._parts.extension.num_held():
            return "reasoning"
        if (
            scheduler.may_admit
            or len(flight.items) < len(scheduler.running)
            or not all(item.decodes for item in flight.items)
        ):
            return "prompts"
        if any(_reads_text(item, flight) for item in flight.items):
            return "the host chooses"
        if not all(drafting.runs_ahead(item, flight.drafts) for item in flight.items):
            return "drafts"
        return None


def _reads_text(item: StepItem, flight: InFlight) -> bool:
    """Whether the host has something to do with the step's token, or with its logits, before the next pass."""
    sequence = item.sequence
    if not flight.chooses_for(sequence) or sequence.num_step_nodes or sequence.awaits_draft:
        return True
    return sequence.params.logprobs is not None or sequence.wants_prompt_logprobs


@contextmanager
def _grown(sequences: Seq[Sequence], tails: Seq[PendingTail]) -> Iterator[None]:
    """Within, the texts have as many tokens as the step in flight adds at most."""
    for sequence, tail in zip(sequences, tails, strict=True):
        sequence.tail = tail
        sequence.token_ids += [UNKNOWN] * tail.most
        sequence.num_computed += tail.most - 1
    try:
        yield
    finally:
        for sequence, tail in zip(sequences, tails, strict=True):
            sequence.tail = None
            del sequence.token_ids[-tail.most :]
            sequence.num_computed -= tail.most - 1
