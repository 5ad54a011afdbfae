"""Who is drafted for in a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core import Proposal, ScheduledSequence
from slipstream.draft.guard import Guard


class Drafting(Guard):
    """The engine's guarded drafter. An answer that it fails still comes, decoded without drafts."""

    def propose(self, scheduled: Seq[ScheduledSequence]) -> dict[int, Proposal]:
        """Sequence id to proposal; sequences without one are absent.

        Where the target is still computing the prompt, the drafter is asked with a budget of 0, so that it can
        compute it meanwhile; a sequence whose caller wants no drafts costs nothing.
        """
        asked = [
            item
            for item in scheduled
            if (item.max_draft_tokens > 0 or not item.decodes)
            and item.sequence.max_draft_tokens != 0
            and self.serves(item.sequence)
        ]
        proposals = self.ask([item.sequence for item in asked], [item.max_draft_tokens for item in asked])
        return {
            item.sequence.id: proposal
            for item, proposal in zip(asked, proposals, strict=True)
            if len(proposal)
        }
