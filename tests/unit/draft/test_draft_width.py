"""A draft of fewer tokens than the target: whatever is valid for the target is no failure of the draft's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.core.sequence import Sequence
from slipstream.draft.proposers.draft_tree import NotFiniteError, Peaks
from slipstream.draft.proposers.draft_trees import DraftTrees
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.sampling.params import SamplingParams

WIDTH = 10
"""Width of the draft; the target's ids go on behind."""


def sequence(number: int = 0, **params: Any) -> Sequence:
    return Sequence(
        id=number,
        request_id=str(number),
        index=0,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        params=SamplingParams(**params),
        seed=number,
    )


def trees(method: str = "greedy", top_k: int = 1) -> DraftTrees:
    return DraftTrees(ProposalShape(depth=2, top_k=top_k, num_nodes=2 * top_k, method=method), WIDTH, {})


def rows(value: float = 0.0) -> torch.Tensor:
    logits = torch.arange(WIDTH, dtype=torch.float32)[None].clone()
    logits[0, 4] = value
    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [3, 12]},
        {"logit_bias": {12: 5.0}},
        {"logit_bias": {12: 5.0, 2: 100.0}},
        {"allowed_token_ids": [2, 12]},
        {"logprobs": 15},
        {"prompt_logprobs": 15},
    ],
)
def test_what_only_the_target_knows_is_left_out(params: dict[str, Any], temperature: float) -> None:
    tree = trees().begin(sequence(temperature=temperature, **params), 2)
    tree.grow(rows())
    kept = 2 if "allowed_token_ids" in params or 2 in params.get("logit_bias", {}) else WIDTH - 1
    assert tree.proposal().token_ids == (kept,)


def test_nothing_is_drafted_where_only_unknown_tokens_may_come() -> None:
    begun = trees().begin(sequence(allowed_token_ids=[11, 12]), 2)
    assert not begun.frontier
    assert not len(begun.proposal())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("method", ["greedy", "coupled", "probabilistic"])
def test_logits_that_are_not_finite_are_no_draft(
    method: str, top_k: int, value: float, temperature: float
) -> None:
    tree = trees(method, top_k).begin(sequence(temperature=temperature, top_k=3), 4)
    with pytest.raises(NotFiniteError, match="not finite"):
        tree.grow(rows(value))


def test_a_row_that_rules_everything_out_is_no_draft() -> None:
    with pytest.raises(NotFiniteError):
        trees().begin(sequence(), 2).grow(torch.full((1, WIDTH), float("-inf")))
    trees().begin(sequence(), 2).grow(rows(float("-inf")))  # one token ruled out is ordinary


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_peaks_read_for_several_sequences_give_the_drafts_of_lone_ones(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, WIDTH, generator=generator)
    logits[1, 4] = float("nan")
    lone, together = (
        [trees().begin(sequence(n, temperature=temperature), 2) for n in range(3)] for _ in "ab"
    )
    peaks = Peaks.of(logits, together)
    for number in (0, 2):
        lone[number].grow(logits[number : number + 1])
        together[number].grow(logits[number : number + 1], peaks.rows(number, number + 1))
        assert lone[number].proposal() == together[number].proposal()
        assert len(lone[number].proposal()) == 1
    with pytest.raises(NotFiniteError):
        together[1].grow(logits[1:2], peaks.rows(1, 2))


def test_only_a_greedy_chain_takes_the_most_probable_token_as_it_is() -> None:
    chosen = {
        (method, top_k, temperature): trees(method, top_k)
        .begin(sequence(temperature=temperature), 4)
        .takes_argmax
        for method in ("greedy", "coupled", "probabilistic")
        for top_k in (1, 2)
        for temperature in (0.0, 0.8)
    }
    assert all(takes == (key[1] == 1 and key[2] == 0.0) for key, takes in chosen.items())
    assert not trees().begin(sequence(temperature=0.0, logit_bias={1: 2.0}), 4).takes_argmax
