"""Who is drafted for in a step, and what becomes of the drafts of answers that must keep to a grammar."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core import EMPTY_PROPOSAL, Proposal, ProposalKind, ScheduledSequence, Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.forced import under_grammar
from slipstream.draft.guard import Guard
from slipstream.draft.merging import share_of


class Drafting(Guard):
    """The engine's guarded drafter. An answer that it fails still comes, decoded without its drafts."""

    def __init__(self, drafter: Drafter, vocab_size: int, kinds: frozenset[ProposalKind]) -> None:
        super().__init__(drafter, vocab_size, kinds)
        self._changed: dict[int, tuple[Proposal, int]] = {}
        """Sequence id to the drafter's own proposal, where another one is checked, and the text's length then."""

    def propose(self, scheduled: Seq[ScheduledSequence]) -> dict[int, Proposal]:
        """Sequence id to proposal; sequences without one are absent.

        Where the target is still computing the prompt, the drafter is asked with a budget of 0, so that it can
        compute it meanwhile; a sequence whose caller wants no drafts costs nothing. An answer under a grammar gets
        the grammar's forced tokens too, and no guesses that the grammar refuses.
        """
        asked = [
            item
            for item in scheduled
            if (item.max_draft_tokens > 0 or not item.decodes)
            and item.sequence.max_draft_tokens != 0
            and self.serves(item.sequence)
        ]
        answers = self.ask([item.sequence for item in asked], [item.max_draft_tokens for item in asked])
        proposals = {item.sequence.id: answer for item, answer in zip(asked, answers, strict=True)}
        for item in scheduled:
            if item.sequence.grammar is not None and item.max_draft_tokens > 0:
                proposals[item.sequence.id] = self._under_grammar(item, proposals)
        return {key: proposal for key, proposal in proposals.items() if len(proposal)}

    def observe(self, observations: Seq[Observation]) -> None:
        """Tell the drafter the verdicts on its own guesses."""
        super().observe([self._own(seen) for seen in observations])

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted or preempted."""
        self._changed.pop(sequence.id, None)
        super().release(sequence)

    def _under_grammar(self, item: ScheduledSequence, proposals: dict[int, Proposal]) -> Proposal:
        sequence = item.sequence
        assert sequence.grammar is not None
        own = proposals.get(sequence.id, EMPTY_PROPOSAL)
        checked = under_grammar(own, sequence.grammar, sequence.output_token_ids, item.max_draft_tokens)
        self._changed.pop(sequence.id, None)
        if checked is not own:
            self._changed[sequence.id] = own, len(sequence.token_ids)
        return checked

    def _own(self, seen: Observation) -> Observation:
        changed = self._changed.pop(seen.sequence.id, None)
        return seen if changed is None else share_of(seen, *changed)
