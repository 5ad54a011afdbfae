"""Copies of sequences, proposals and observations, for drafters from other packages.

Such a drafter may keep its arguments, and a call that timed out goes on in its own thread. It must not write to objects
that the engine uses.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from dataclasses import replace

from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Observation


class SequenceCopies:
    """One copy of each sequence, which is extended as the sequence grows, so that each token is copied once."""

    def __init__(self) -> None:
        self._copies: dict[int, Sequence] = {}

    def of(self, sequence: Sequence) -> Sequence:
        """The sequence's copy, up to date, without log-probabilities and metrics."""
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
        """Cut the copy to the sequence's length."""
        if sequence.id in self._copies:
            del self._copies[sequence.id].token_ids[len(sequence.token_ids) :]

    def drop(self, sequence: Sequence) -> None:
        """Drop the sequence's copy."""
        self._copies.pop(sequence.id, None)

    def drop_all(self) -> list[Sequence]:
        """Drop all copies and return them."""
        copies, self._copies = self._copies, {}
        return list(copies.values())


def copies_of_proposals(proposals: Seq[Proposal]) -> list[Proposal]:
    """Copies of the proposals; raises TypeError for an item that is not a `Proposal`."""
    return [_copy_of_proposal(proposals[place]) for place in range(len(proposals))]


def copy_of_observation(seen: Observation, sequence: Sequence) -> Observation:
    """A copy of `seen` for the sequence's copy."""
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
