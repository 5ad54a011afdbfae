"""Which configurations are compared, how they are called, and in which order they run."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import SpeculativeConfig
from slipstream.errors import ConfigError
from slipstream.tools.bench.engine.configurations import parse_counts, sweep
from slipstream.tools.bench.engine.measure import cut, turns

NGRAM = SpeculativeConfig("ngram")
OFF = SpeculativeConfig("off")


def draft(model: str, verifier: str = "coupled", **options: object) -> SpeculativeConfig:
    return SpeculativeConfig("draft_model", verifier, {"model": model, **options})


def test_off_comes_first_and_every_drafter_with_every_length() -> None:
    found = sweep([NGRAM, OFF, draft("a/small")], [2, 4])
    assert [c.name for c in found] == ["off", "ngram γ=2", "ngram γ=4", "draft γ=2", "draft γ=4"]
    assert [c.is_off for c in found] == [True, False, False, False, False]
    assert [c.speculative.options.get("num_speculative_tokens") for c in found] == [None, 2, 4, 2, 4]


def test_names_tell_configurations_apart() -> None:
    found = sweep(
        [
            draft("a/small"),
            draft("b/tiny", tree_top_k=3),
            draft("b/tiny", verifier="block"),
            draft("c/tiny", verifier="block"),
        ],
        [],
    )
    assert [c.name for c in found[1:]] == [
        "draft small γ=4",
        "draft tiny γ=4 tree_top_k=3",
        "draft tiny γ=4 block #1",
        "draft tiny γ=4 block #2",
    ]


def test_the_same_twice_runs_once() -> None:
    assert len(sweep([NGRAM, NGRAM], [3, 3])) == 2


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="nothing to compare with speculation off"):
        sweep([OFF], [2])
    with pytest.raises(ConfigError, match="did you mean 'prompt_lookup_max'"):
        sweep([SpeculativeConfig("ngram", options={"promt_lookup_max": 3})], [])
    for text in ("0", "2,", "two", "", "1,-2"):
        with pytest.raises(ConfigError, match="--x takes whole numbers of at least 1"):
            parse_counts(text, "--x")
    assert parse_counts("8,2,8", "--x") == [8, 2]


@given(st.integers(1, 60), st.integers(1, 12))
def test_batches_hold_every_prompt_once(num_prompts: int, concurrency: int) -> None:
    batches = cut(num_prompts, concurrency)
    assert [prompt for batch in batches for prompt in batch] == list(range(num_prompts))
    sizes = {len(batch) for batch in batches}
    assert max(sizes) - min(sizes) <= 1
    if concurrency == 1:
        assert sizes == {1}
    elif num_prompts >= 2 * concurrency:
        assert min(sizes) >= 2 * concurrency


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_everything_runs_once_a_repeat(
    batches: int, configurations: int, repeats: int, side_by_side: bool
) -> None:
    order = list(turns(batches, configurations, repeats, side_by_side))
    places = {(turn.repeat, turn.batch, turn.configuration) for turn in order}
    assert len(places) == len(order) == batches * configurations * repeats
    assert [turn.repeat for turn in order] == sorted(turn.repeat for turn in order)


def test_side_by_side_a_batch_is_done_before_the_next_and_the_order_rotates() -> None:
    order = list(turns(3, 3, 3, side_by_side=True))
    groups = [order[begin : begin + 3] for begin in range(0, len(order), 3)]
    assert all(len({(turn.repeat, turn.batch) for turn in group}) == 1 for group in groups)
    firsts = Counter(group[0].configuration for group in groups)
    assert firsts == {0: 3, 1: 3, 2: 3}
    assert [group[0].configuration for group in groups[:3]] == [0, 1, 2]


def test_one_at_a_time_configurations_change_once_a_round() -> None:
    order = list(turns(4, 3, 2, side_by_side=False))
    changes = sum(a.configuration != b.configuration for a, b in pairwise(order))
    assert changes == 2 * 3 - 1
    assert [order[0].configuration, order[12].configuration] == [0, 1]
