"""What tells a sequence's cache entries from those of others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.sequence import Sequence
from slipstream.sampling.params import SamplingParams
from slipstream.text.common_prefix import common_prefix_length

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def sequence(token_ids: list[int], num_fast_tokens: int) -> Sequence:
    return Sequence(
        id=0,
        request_id="a",
        index=0,
        token_ids=token_ids,
        num_prompt_tokens=1,
        params=SamplingParams(),
        seed=0,
        num_fast_tokens=num_fast_tokens,
    )


@given(TEXT, TEXT, st.integers(0, 12), st.integers(0, 12))
def test_equal_ids_are_equal_texts_computed_alike(
    one: list[int], other: list[int], one_fast: int, other_fast: int
) -> None:
    common = common_prefix_length(
        sequence(one, one_fast).entry_ids(), sequence(other, other_fast).entry_ids()
    )
    alike = [
        (a, place < one_fast) == (b, place < other_fast)
        for place, (a, b) in enumerate(zip(one, other, strict=False))
    ]
    assert common == [*alike, False].index(False)


@given(TEXT, st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_parts_make_the_whole(token_ids: list[int], fast: int, begin: int, end: int) -> None:
    ids = sequence(token_ids, fast).entry_ids()
    begin, end = sorted((min(begin, len(ids)), min(end, len(ids))))
    assert sequence(token_ids, fast).entry_ids(begin, end) == ids[begin:end]
    assert fast or ids == token_ids
