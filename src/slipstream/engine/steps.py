"""What is recorded of a step: when its phases ended, what was accepted, its report."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core import StepItem
from slipstream.metrics.step import StepReport


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


def report_of(items: Seq[StepItem], times: StepTimes) -> StepReport:
    """What the step did; made before its tokens are committed, which changes the sequences."""
    return StepReport(
        num_sequences=len(items),
        num_rows=sum(item.num_rows for item in items),
        num_context_tokens=sum(item.sequence.num_computed + item.num_rows for item in items),
        num_draft_tokens=sum(len(item.proposal) for item in items),
        draft_depth=max(item.proposal.depth for item in items),
        draft_s=times.drafted_s - times.planned_s,
        verify_s=times.verified_s - times.drafted_s,
    )
