"""What is recorded of a step: when its phases ended, what was accepted, its report."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.metrics.step import StepReport
from slipstream.core.types import Sequence, StepItem
from slipstream.draft.lookup.alignment import num_found


@dataclass(slots=True)
class StepTimes:
    """When the phases of one step ended."""

    planned_s: float
    drafted_s: float
    verified_s: float


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


def report_of(items: Seq[StepItem], times: StepTimes) -> StepReport:
    """What the step did; made before its tokens are committed, which changes the sequences."""
    return StepReport(
        num_sequences=len(items),
        num_rows=sum(item.num_rows for item in items),
        num_context_tokens=sum(item.sequence.num_computed + item.num_rows for item in items),
        num_draft_tokens=sum(len(item.proposal) + item.num_dropped_nodes for item in items),
        draft_depth=max(item.proposal.depth for item in items),
        draft_s=times.drafted_s - times.planned_s,
        verify_s=times.verified_s - times.drafted_s,
    )
