"""What becomes of the tokens that a pass has chosen, where the host has the last word."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.core.proposal import Proposal, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.engine.verification import own_tokens, verify_items
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from slipstream.verify.base import Judgement
from slipstream.verify.coupled import CoupledVerifier

TREE = Proposal((4, 5, 6, 7), (-1, 0, 0, 2))
CHAIN = Proposal.chain((4, 5, 6))


def item_of(proposal: Proposal, chosen: list[int], **params: Any) -> tuple[StepItem, LogitsProcessor]:
    """A step whose logits say that every row's token is 9."""
    drawn = SamplingParams(**params)
    sequence = Sequence(0, "request", 0, [1, 2, 3], 3, drawn, seed=1)
    item = StepItem(sequence, 3)
    item.proposal, item.chosen = proposal, chosen
    item.logits = torch.zeros(len(chosen), 12)
    item.logits[:, 9] = 50.0
    return item, LogitsProcessor(drawn, [1, 2, 3], [], [], 12)


def verified(item: StepItem, processor: LogitsProcessor) -> Verdict:
    verify_items(CoupledVerifier(), [item], [processor])
    return item.verdict


def test_the_verdict_of_the_pass_is_taken() -> None:
    item, processor = item_of(TREE, [4, 6, 8, 7, 8], temperature=0.0)
    item.walked = Verdict((0, 2, 3), 8)
    assert verified(item, processor) == Verdict((0, 2, 3), 8)


def test_the_host_decides_the_rows_that_the_pass_could_not_and_no_others() -> None:
    """By the logits the text would end at once; the tokens of the pass hold where there are some."""
    item, processor = item_of(TREE, [4, 6, -1, 7, -1], top_p=0.5)
    assert verified(item, processor) == Verdict((0, 2, 3), 9)
    item, processor = item_of(TREE, [-1, 6, 8, 7, 8], top_p=0.5)
    assert verified(item, processor) == Verdict((), 9)


def test_a_verdict_about_a_proposal_that_was_cut_is_cut() -> None:
    item, processor = item_of(CHAIN, [4, 5, 6, 8], temperature=0.0)
    item.walked = Verdict((0, 1, 2), 8)
    item.proposal, item.num_dropped_nodes = Proposal.chain((4, 5)), 1
    assert verified(item, processor) == Verdict((0, 1), 6)


def test_a_draft_that_is_not_finite_is_never_accepted() -> None:
    """The pass computed it as token 0, which the target may have chosen."""
    item, processor = item_of(Proposal((4, -1, -1), (-1, 0, 1)), [4, 0, 0, 8], temperature=0.0)
    item.walked = Verdict((0, 1, 2), 8)
    assert verified(item, processor) == Verdict((0,), 0)


def test_what_is_behind_given_tokens_is_the_hosts() -> None:
    item, processor = item_of(CHAIN, [1, 1, 1, 1], temperature=0.0)
    item.walked, item.num_given = Verdict((), 1), 3
    assert verified(item, processor) == Verdict((0, 1, 2), 9)


@pytest.mark.parametrize(
    ("params", "chooses"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"allowed_token_ids": [3]}, False),
    ],
    ids=str,
)
def test_a_pass_chooses_where_the_text_does_not_matter(params: dict[str, Any], chooses: bool) -> None:
    item, processor = item_of(TREE, [0] * 5, **params)
    own = own_tokens(item, processor)
    assert (own is not None) == chooses
    if own is not None:
        assert len(own.keys) == 5
        assert own.params.temperature == params["temperature"]
        assert len(set(own.keys)) == (4 if own.params.temperature else 1), "a key a depth"


class Trusting(CoupledVerifier):
    def verify(self, judgements: list[Judgement]) -> list[Verdict]:  # type: ignore[override]
        return [Verdict((), 0) for _ in judgements]


class Renamed(CoupledVerifier):
    name = "renamed"


def test_a_verifier_with_a_verdict_of_its_own_does_not_leave_it_to_the_pass() -> None:
    assert CoupledVerifier.walks
    assert Renamed.walks
    assert not Trusting.walks
