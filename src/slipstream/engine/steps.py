"""What is noted of a step: when its phases ended, what was accepted, what it did and cost."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core import ROOT, Proposal, Sequence, StepPlan
from slipstream.metrics.step import StepReport


@dataclass(slots=True)
class StepTimes:
    """When the phases of one step ended."""

    planned_s: float
    drafted_s: float
    verified_s: float


def record_acceptance(sequence: Sequence, proposal: Proposal, kept: tuple[int, ...], emitted: int) -> None:
    """Count what was proposed, reached and accepted; what a stop rule cut off was not reached."""
    last = kept[-1] if kept else ROOT
    was_cut = emitted == len(kept)
    reached = len(kept) + (0 if was_cut or last not in proposal.children else 1)
    sequence.metrics.num_cut_steps += was_cut
    sequence.metrics.record_step(
        proposed_depth=max(proposal.depths, default=0),
        num_proposed=len(proposal),
        path_proposed=reached,
        num_accepted=len(kept),
    )


def report_of(plan: StepPlan, proposals: dict[int, Proposal], times: StepTimes) -> StepReport:
    """What the step did; made before its tokens are committed, which changes the sequences."""
    return StepReport(
        num_sequences=len(plan.scheduled),
        num_rows=sum(item.num_rows for item in plan.scheduled),
        num_context_tokens=sum(item.sequence.num_computed + item.num_rows for item in plan.scheduled),
        num_draft_tokens=sum(map(len, proposals.values())),
        draft_depth=max((max(proposal.depths) for proposal in proposals.values()), default=0),
        draft_s=times.drafted_s - times.planned_s,
        verify_s=times.verified_s - times.drafted_s,
    )
