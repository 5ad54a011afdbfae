"""What a drafter that is not trusted is shown, and what it answers, as copies.

Such a drafter may keep what it was given, and a call that was given up on goes on in its own thread: whatever it then
writes to must be its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from dataclasses import replace

from slipstream.core import Proposal, Sequence
from slipstream.draft.base import Observation
from slipstream.metrics.request import RequestMetrics


class SequenceCopies:
    """One copy of each sequence, which grows as the sequence does; no other call pays for the whole text again."""

    def __init__(self) -> None:
        self._copies: dict[int, Sequence] = {}

    def of(self, sequence: Sequence) -> Sequence:
        """The copy, with all that has been committed. Log-probabilities and metrics are not in it."""
        copied = self._copies.get(sequence.id)
        if copied is None:
            copied = self._copies[sequence.id] = _new(sequence)
        copied.token_ids.extend(sequence.token_ids[len(copied.token_ids) :])
        copied.from_draft.extend(sequence.from_draft[len(copied.from_draft) :])
        copied.num_computed = sequence.num_computed
        copied.finish_reason, copied.stop_reason = sequence.finish_reason, sequence.stop_reason
        copied.text = sequence.text
        return copied

    def rewind(self, sequence: Sequence) -> None:
        """The sequence's text ends earlier than it did."""
        if sequence.id in self._copies:
            del self._copies[sequence.id].token_ids[len(sequence.token_ids) :]

    def drop(self, sequence: Sequence) -> None:
        """Keep no copy of the sequence any more."""
        self._copies.pop(sequence.id, None)

    def drop_all(self) -> list[Sequence]:
        """Keep none of any; returns those that were kept."""
        copies, self._copies = self._copies, {}
        return list(copies.values())


def copies_of_proposals(proposals: Seq[Proposal]) -> list[Proposal]:
    """The same proposals, in tuples and tensors that nobody else holds. Raises TypeError for what is none."""
    return [_copy_of_proposal(proposals[place]) for place in range(len(proposals))]


def copy_of_observation(seen: Observation, sequence: Sequence) -> Observation:
    """What was seen, of the copy of its sequence."""
    return replace(seen, sequence=sequence, proposal=replace(seen.proposal), logits=seen.logits.clone())


def _copy_of_proposal(proposal: Proposal) -> Proposal:
    if not isinstance(proposal, Proposal):
        raise TypeError(f"a proposal must be a Proposal of some ProposalKind, got {type(proposal).__name__}")
    probs = None if proposal.draft_probs is None else proposal.draft_probs.detach().clone()
    return Proposal(tuple(proposal.token_ids), tuple(proposal.parents), proposal.kind, probs)


def _new(sequence: Sequence) -> Sequence:
    return replace(
        sequence,
        token_ids=[],
        from_draft=[],
        params=copy.deepcopy(sequence.params),
        leader=None,
        grammar=sequence.grammar and sequence.grammar.copy(),
        logprobs=None,
        prompt_logprobs=None,
        metrics=RequestMetrics(),
    )
