"""What a step knows of a sequence: where the target's judgement ended and where a stop rule cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.base import Observation
from slipstream.sampling.params import SamplingParams

CHAIN = Proposal.chain([5, 6, 7])
TREE = Proposal((5, 6, 7), (ROOT, ROOT, 1))  # 5, or 6 and then 7


@dataclass(frozen=True)
class Case:
    proposal: Proposal
    accepted: tuple[int, ...]
    num_emitted: int
    num_accepted: int
    reached: int
    was_cut: bool


CASES = {
    "no proposal": Case(EMPTY_PROPOSAL, (), 1, 0, 0, False),
    "no proposal, and nothing may come": Case(EMPTY_PROPOSAL, (), 0, 0, 0, True),
    "rejected at once": Case(CHAIN, (), 1, 0, 1, False),
    "rejected on the way": Case(CHAIN, (0,), 2, 1, 2, False),
    "all accepted": Case(CHAIN, (0, 1, 2), 4, 3, 3, False),
    "the answer ends with the last draft token": Case(CHAIN, (0, 1, 2), 3, 3, 3, True),
    "the answer ends on the way": Case(CHAIN, (0, 1, 2), 1, 1, 1, True),
    "the answer ends before anything": Case(CHAIN, (0, 1, 2), 0, 0, 0, True),
    "a leaf with siblings": Case(TREE, (0,), 2, 1, 1, False),
    "a node with a child": Case(TREE, (1,), 2, 1, 2, False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_was_emitted(case: Case) -> None:
    item = StepItem(Sequence(0, "0", 0, [1, 2, 3], 3, SamplingParams(), 0, num_computed=2), num_rows=1)
    item.proposal, item.verdict = case.proposal, Verdict(case.accepted, 9)
    item.logits = torch.zeros(1 + len(case.proposal), 10)
    emitted = item.verdict.token_ids(case.proposal)[: case.num_emitted]
    item.sequence.token_ids += emitted
    item.record_emitted(case.num_emitted)
    assert item.num_accepted == case.num_accepted
    assert item.kept_nodes == case.accepted[: case.num_emitted]
    assert item.reached == case.reached
    assert item.was_cut is case.was_cut
    assert item.emitted_token_ids == emitted
    seen = Observation.of(item)
    assert (seen.sequence, seen.proposal, seen.logits) == (item.sequence, item.proposal, item.logits)
    assert (seen.num_accepted, seen.length_before, seen.was_cut) == (case.num_accepted, 3, case.was_cut)


def test_what_decodes_was_decided_when_the_step_was_planned() -> None:
    """Later the sequence has grown, and has other pending tokens."""
    sequence = Sequence(0, "0", 0, [1, 2, 3], 3, SamplingParams(), 0)
    assert not StepItem(sequence, num_rows=2).decodes
    item = StepItem(sequence, num_rows=3)
    sequence.token_ids.append(4)
    assert item.decodes
    assert item.length_before == 3
