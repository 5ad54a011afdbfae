"""A draft of fewer tokens than the target: whatever is valid for the target is no failure of the draft's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.core import Sequence
from slipstream.draft.model.growth import Growths, NotFiniteError, Shape
from slipstream.sampling.params import SamplingParams

WIDTH = 10
"""Of the draft; the target's ids go on behind."""


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


def growths(method: str = "greedy", top_k: int = 1) -> Growths:
    return Growths(Shape(depth=2, top_k=top_k, num_nodes=2 * top_k, method=method), WIDTH)


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
    growth = growths().begin(sequence(temperature=temperature, **params), 2)
    growth.grow(rows())
    kept = 2 if "allowed_token_ids" in params or 2 in params.get("logit_bias", {}) else WIDTH - 1
    assert growth.proposal().token_ids == (kept,)


def test_nothing_is_drafted_where_only_unknown_tokens_may_come() -> None:
    begun = growths().begin(sequence(allowed_token_ids=[11, 12]), 2)
    assert not begun.frontier
    assert not len(begun.proposal())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("method", ["greedy", "coupled", "probabilistic"])
def test_logits_that_are_not_finite_are_no_draft(
    method: str, top_k: int, value: float, temperature: float
) -> None:
    growth = growths(method, top_k).begin(sequence(temperature=temperature, top_k=3), 4)
    with pytest.raises(NotFiniteError, match="not finite"):
        growth.grow(rows(value))


def test_a_row_that_rules_everything_out_is_no_draft() -> None:
    with pytest.raises(NotFiniteError):
        growths().begin(sequence(), 2).grow(torch.full((1, WIDTH), float("-inf")))
    growths().begin(sequence(), 2).grow(rows(float("-inf")))  # one token ruled out is ordinary
