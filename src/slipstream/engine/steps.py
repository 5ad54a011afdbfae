"""What is recorded of a step: when its phases ended, what was accepted, its report."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from slipstream.core.metrics.step import StepReport
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.lookup.alignment import num_found


class StepClock:
    """How long the phases of a step took, in seconds: each method is called when its phase is over."""

    def __init__(self) -> None:
        self.planned_s = 0.0
        """When the step's first plan was made."""
        self.draft_s = self.verify_s = 0.0
        """What the drafters took, and what the target's pass and the verdicts did. Where steps overlap, these are
        parts of the time between two verdicts, whichever step they were for."""
        self.step_s = 0.0
        """What the whole step took, without its extension; known once it is reported."""
        self._begun_s = self._extension_s = self._drafting_s = 0.0
        self._unreported_s = 0.0
        """What the extension took since the last report: a step that runs nothing has none."""

    def begin(self) -> None:
        """A step begins."""
        self._begun_s = self.planned_s = time.perf_counter()
        self.draft_s = self._extension_s = 0.0

    def extended(self, seconds: float) -> None:
        """The extension has proposed, which took so long."""
        self._extension_s = seconds
        self._unreported_s += seconds

    def planned(self) -> None:
        """The scheduler has planned."""
        self.planned_s = self._drafting_s = time.perf_counter()

    def drafted(self) -> None:
        """The drafters have proposed."""
        self.draft_s += time.perf_counter() - self._drafting_s

    def verified(self) -> None:
        """The target has computed, and the verdicts are known."""
        self.verify_s = time.perf_counter() - self.planned_s - self.draft_s

    def report(self, items: Seq[StepItem]) -> StepReport:
        """What the step did, once its tokens are committed."""
        self.step_s = time.perf_counter() - self._begun_s - self._extension_s
        extension_s, self._unreported_s = self._unreported_s, 0.0
        return StepReport(
            num_sequences=len(items),
            num_rows=sum(item.num_rows for item in items),
            num_context_tokens=sum(
                item.length_before if item.decodes else item.sequence.num_computed for item in items
            ),
            num_draft_tokens=sum(len(item.proposal) + item.num_dropped_nodes for item in items),
            draft_depth=max(item.proposal.depth for item in items),
            draft_s=self.draft_s + extension_s,
            verify_s=self.verify_s,
            other_s=self.step_s - self.draft_s - self.verify_s,
        )


def record_times(sequence: Sequence, clock: StepClock, arrived_s: float) -> None:
    """Count what the step took; `arrived_s` is when the request came."""
    metrics = sequence.metrics
    if metrics.verify_s == 0:  # its first step
        metrics.queue_s = clock.planned_s - arrived_s
    metrics.draft_s += clock.draft_s
    metrics.verify_s += clock.verify_s


def record_acceptance(item: StepItem) -> None:
    """Count what was proposed, reached and accepted; positions that a stop rule cut off do not count as reached."""
    metrics = item.sequence.metrics
    metrics.num_cut_steps += item.was_cut
    metrics.record_step(
        proposed_depth=item.proposal.depth,
        num_proposed=len(item.proposal),
        num_reached=item.reached,
        num_accepted=item.num_accepted,
    )


def record_prediction(sequence: Sequence) -> None:
    """Count the tokens of a prediction that the finished answer has, and those that it has not."""
    if sequence.expected is not None:
        found = num_found(sequence.expected, sequence.output_token_ids)
        sequence.metrics.num_accepted_prediction_tokens = found
        sequence.metrics.num_rejected_prediction_tokens = len(sequence.expected) - found
