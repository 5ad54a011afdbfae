"""Prompt lookup against a brute-force search of the text."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.sequence import Sequence
from slipstream.draft.lookup.ngram import NgramDrafter, NgramIndex, NgramOptions
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import draft_context

CONTEXT = draft_context(vocab_size=1000)
PARAMS = SamplingParams()


def sequence(token_ids: list[int], id: int = 0) -> Sequence:
    return Sequence(id, str(id), 0, list(token_ids), 1, PARAMS, seed=0)


def brute_force(text: list[int], options: NgramOptions, budget: int) -> list[int]:
    """Search the text from its end, longest n-gram first, then copy, through the copy itself if need be."""
    for n in range(options.prompt_lookup_max, options.prompt_lookup_min - 1, -1):
        for follower in range(len(text) - 1, n - 1, -1):
            if text[follower - n : follower] == text[-n:]:
                distance = len(text) - follower
                longer = list(text)
                for _ in range(min(budget, options.num_speculative_tokens)):
                    longer.append(longer[-distance])
                return longer[len(text) :]
    return []


texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@st.composite
def ngram_options(draw: st.DrawFn) -> NgramOptions:
    shortest = draw(st.integers(1, 4))
    return NgramOptions(draw(st.integers(1, 9)), shortest, draw(st.integers(shortest, 6)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(texts, ngram_options(), st.integers(0, 12), st.lists(st.integers(1, 9), max_size=8), st.data())
def test_proposals_equal_a_brute_force_search(
    text: list[int], options: NgramOptions, budget: int, growth: list[int], data: st.DataObject
) -> None:
    """At every length of a growing text, wherever the index was extended and whenever it was released."""
    drafter = NgramDrafter(options, CONTEXT)
    growing = sequence(text[:1])
    for step in [*growth, len(text)]:
        proposal = drafter.propose([growing], [budget])[0]
        assert list(proposal.token_ids) == (brute_force(growing.token_ids, options, budget) if budget else [])
        assert proposal.is_chain
        if data.draw(st.booleans()):
            drafter.release(growing)
        growing.token_ids.extend(text[len(growing.token_ids) :][:step])


def test_a_loop_fills_the_whole_budget() -> None:
    drafter = NgramDrafter(NgramOptions(num_speculative_tokens=7), CONTEXT)
    assert drafter.propose([sequence([1, 2, 3, 1, 2, 3, 1, 2])], [7])[0].token_ids == (3, 1, 2, 3, 1, 2, 3)


def test_the_most_recent_of_equal_matches_decides() -> None:
    drafter = NgramDrafter(NgramOptions(1, 2, 2), CONTEXT)
    assert drafter.propose([sequence([1, 2, 7, 1, 2, 8, 1, 2])], [4])[0].token_ids == (8,)


def test_a_step_looks_only_at_new_tokens() -> None:
    class Watched(list[int]):
        touched = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            self.touched += 1
            return super().__getitem__(key)

    text = Watched(range(500))
    index = NgramIndex(2, 4)
    index.extend_to(text)
    text.touched = 0
    text.extend([1, 2])
    index.extend_to(text)
    index.find(text)
    assert text.touched <= 2 * 3 + 3


def test_memory_is_what_was_allocated_and_comes_back() -> None:
    drafter = NgramDrafter(NgramOptions(), CONTEXT)
    long = sequence(random.Random(0).choices(range(1000), k=20_000))
    tracemalloc.start()
    drafter.propose([long], [4])
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.8 * allocated <= drafter.memory_bytes() <= 1.2 * allocated
    drafter.release(long)
    assert drafter.memory_bytes() == 0
