"""Suffix decoding against a brute-force reference, and its memory of past answers."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.proposal import ROOT, Proposal
from slipstream.core.request import FinishReason, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.lookup.suffix import MAX_OCCURRENCES, SuffixDrafter, SuffixOptions
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import draft_context

CONTEXT = draft_context(vocab_size=1000)
PARAMS = SamplingParams()
Past = list[tuple[list[int], int]]
"""Past texts, oldest first: token ids, and how many of them are prompt."""


def make(**options: Any) -> SuffixDrafter:
    return SuffixDrafter(SuffixOptions(**options), CONTEXT)


def sequence(token_ids: list[int], num_prompt_tokens: int = 1, tenant: str = "", id: int = 0) -> Sequence:
    return Sequence(
        id, str(id), 0, list(token_ids), num_prompt_tokens, PARAMS, 0, RequestOptions(tenant=tenant)
    )


def finish(
    drafter: SuffixDrafter,
    text: list[int],
    num_prompt_tokens: int = 1,
    tenant: str = "",
    reason: str = "stop",
) -> None:
    """Let a request come and end with `text`."""
    done = sequence(text, num_prompt_tokens, tenant, id=-1)
    drafter.propose([done], [1])
    done.finish_reason = FinishReason(reason)
    drafter.release(done)


def guess(drafter: SuffixDrafter, text: list[int], budget: int = 16, tenant: str = "") -> Proposal:
    """What a new request with this text would be offered."""
    asking = sequence(text, tenant=tenant, id=-2)
    proposal = drafter.propose([asking], [budget])[0]
    drafter.release(asking)
    return proposal


# --- the reference: every occurrence, every length, no index ------------------------------------------------


def places_by_length(documents: Past, tail: list[int], max_depth: int) -> list[tuple[list[int], int, int]]:
    """(text, position of the next token, tokens that agree); three or more that agree first, then newest."""
    found = []
    for text, num_context in reversed(documents):
        for place in range(len(text) - 1, max(num_context, 1) - 1, -1):
            length = 0
            while length < min(place, len(tail), max_depth) and text[place - 1 - length] == tail[-1 - length]:
                length += 1
            if length:
                found.append((text, place, length))
    return sorted(found, key=lambda entry: entry[2] < 3)


def best_first(
    places: list[tuple[list[int], int]], max_depth: int, max_nodes: int, options: SuffixOptions
) -> tuple[float, Proposal]:
    token_ids: list[int] = []
    parents: list[int] = []
    score = 0.0
    open_nodes: list[tuple[float, int, int, int, list[tuple[list[int], int]]]] = []

    def expand(node: int, here: list[tuple[list[int], int]], depth: int, prob: float) -> None:
        following = [text[place + depth] for text, place in here if place + depth < len(text)]
        ranked = sorted(dict.fromkeys(following), key=lambda token: -following.count(token))
        for token in ranked if options.tree else ranked[:1]:
            below = [(t, p) for t, p in here if p + depth < len(t) and t[p + depth] == token]
            share = prob * following.count(token) / len(following)
            if share >= options.suffix_decoding_min_token_prob:
                open_nodes.append((share, node, token, depth + 1, below))

    if max_depth > 0:
        expand(ROOT, places, 0, 1.0)
    while open_nodes and len(token_ids) < max_nodes:
        prob, parent, token, depth, here = open_nodes.pop(
            max(range(len(open_nodes)), key=lambda i: open_nodes[i][0])
        )
        token_ids.append(token)
        parents.append(parent)
        score += prob
        if depth < max_depth:
            expand(len(token_ids) - 1, here, depth, prob)
    return score, Proposal(tuple(token_ids), tuple(parents))


def brute_force(text: list[int], past: Past, options: SuffixOptions, budget: int) -> Proposal:
    max_tree_depth = options.suffix_decoding_max_tree_depth
    most = options.num_draft_nodes if options.tree else options.num_speculative_tokens
    contexts = [(t[max(0, n - max_tree_depth) :], min(n, max_tree_depth)) for t, n in past if len(t) > n]
    best = (0.0, Proposal())
    for documents in ([(text, 1)], contexts):
        found = places_by_length(documents, text, max_tree_depth)
        for length in range(max_tree_depth, 0, -1):
            places = [(t, place) for t, place, agreed in found if agreed >= length]
            earned = (
                int(options.suffix_decoding_max_spec_factor * length)
                + options.suffix_decoding_max_spec_offset
            )
            max_depth = min(budget, options.num_speculative_tokens, earned)
            draft = best_first(places, max_depth, min(budget, most), options)
            if draft[0] > best[0]:
                best = draft
    return best[1]


@st.composite
def suffix_options(draw: st.DrawFn) -> SuffixOptions:
    return SuffixOptions(
        num_speculative_tokens=draw(st.integers(1, 8)),
        suffix_decoding_max_tree_depth=draw(st.integers(1, 9)),
        suffix_decoding_max_spec_factor=draw(st.sampled_from([0.5, 1.0, 2.0])),
        suffix_decoding_max_spec_offset=draw(st.integers(0, 2)),
        suffix_decoding_min_token_prob=draw(st.sampled_from([0.0, 0.1, 0.5])),
        tree=draw(st.booleans()),
        num_draft_nodes=draw(st.integers(1, 10)),
    )


token_lists = st.lists(st.integers(0, 3), min_size=1, max_size=25)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(token_lists, st.integers(1, 12)), max_size=3),
    token_lists,
    suffix_options(),
    st.integers(0, 10),
    st.data(),
)
def test_proposals_equal_the_reference(
    past: Past, text: list[int], options: SuffixOptions, budget: int, data: st.DataObject
) -> None:
    """At every length of a growing text, beside past answers, and whenever the sequence was preempted."""
    drafter = SuffixDrafter(options, CONTEXT)
    past = [(tokens, min(num_prompt_tokens, len(tokens))) for tokens, num_prompt_tokens in past]
    for tokens, num_prompt_tokens in past:
        finish(drafter, tokens, num_prompt_tokens)
    growing = sequence(text[:1])
    while True:
        proposal = drafter.propose([growing], [budget])[0]
        expected = brute_force(growing.token_ids, past, options, budget) if budget else Proposal()
        assert (proposal.token_ids, proposal.parents) == (expected.token_ids, expected.parents)
        if len(growing.token_ids) == len(text):
            break
        if data.draw(st.booleans()):
            drafter.release(growing)
        growing.token_ids.extend(text[len(growing.token_ids) :][: data.draw(st.integers(1, 6))])
    assert drafter.integrity() == []


# --- the guess ----------------------------------------------------------------------------------------------


def test_the_length_of_the_draft_follows_the_length_of_the_match() -> None:
    drafter = make()
    finish(drafter, list(range(100, 130)))
    assert guess(drafter, [5, 110]).token_ids == (111,)
    assert guess(drafter, [5, 108, 109, 110]).token_ids == (111, 112, 113)
    assert guess(drafter, [5, 108, 109, 110], budget=2).token_ids == (111, 112)


def test_a_tree_holds_what_was_said_more_than_once() -> None:
    drafter = make(tree=True)
    for answer in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5]):
        finish(drafter, [9, *answer])
    proposal = guess(drafter, [8, 1, 2, 3])
    assert (proposal.token_ids, proposal.parents) == ((5, 4), (ROOT, ROOT))


def test_a_text_that_has_ended_says_nothing_about_what_follows() -> None:
    drafter = make(suffix_decoding_min_token_prob=0.6)
    for answer in ([1, 2, 3], [1, 2, 3, 4]):
        finish(drafter, [9, *answer])
    assert guess(drafter, [1, 2]).token_ids == (3, 4)


def test_only_the_newest_occurrences_are_counted() -> None:
    drafter = make()
    for last, times in ((7, 3 * MAX_OCCURRENCES), (8, MAX_OCCURRENCES)):
        for _ in range(times):
            finish(drafter, [9, 1, 2, 3, last])
    assert guess(drafter, [1, 2, 3]).token_ids == (8,)
    index = drafter.cache.index("")
    assert index is not None
    assert len(index.occurrences([1, 2, 3])) == MAX_OCCURRENCES


# --- what is remembered, and for whom -----------------------------------------------------------------------


def test_tenants_never_see_each_other() -> None:
    drafter = make()
    finish(drafter, [9, 1, 2, 3, 4], tenant="red")
    assert guess(drafter, [1, 2, 3], tenant="red").token_ids == (4,)
    for other in ("blue", "", "re"):
        assert not guess(drafter, [1, 2, 3], tenant=other).token_ids


@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_finished_answer_is_learned_once_and_the_prompt_is_not(reason: str) -> None:
    drafter = make()
    text = [11, 12, 13, 14, 1, 2, 3, 4]
    asking = sequence(text[:6], num_prompt_tokens=4)
    drafter.propose([asking], [4])
    drafter.release(asking)  # preempted: it comes back
    assert len(drafter.cache) == 0
    finish(drafter, text, num_prompt_tokens=4, reason=reason)
    assert len(drafter.cache) == 1
    assert guess(drafter, [12, 13, 14]).token_ids == (1, 2, 3), "the prompt's end is context for the answer"
    assert not guess(drafter, [11, 12]).token_ids, "nothing of a prompt is proposed to others"


def test_nothing_is_learned_from_an_empty_answer_or_when_sharing_is_off() -> None:
    drafter = make()
    finish(drafter, [1, 2, 3], num_prompt_tokens=3, reason="abort")
    assert len(drafter.cache) == 0
    alone = make(suffix_decoding_max_cached_requests=0)
    finish(alone, [9, 1, 2, 3, 4])
    assert len(alone.cache) == 0
    assert not guess(alone, [1, 2, 3]).token_ids


def test_reset_forgets_past_answers() -> None:
    drafter = make()
    finish(drafter, [9, 1, 2, 3, 4])
    empty = make().memory_bytes()
    assert drafter.memory_bytes() > empty
    drafter.reset()
    assert drafter.memory_bytes() == empty
    assert not guess(drafter, [1, 2, 3]).token_ids


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(["", "red"]), token_lists), max_size=30),
    st.integers(0, 6),
    token_lists,
)
def test_what_is_evicted_leaves_no_trace(
    answers: list[tuple[str, list[int]]], max_requests: int, text: list[int]
) -> None:
    """A full cache proposes as one that was only ever given the answers that are left."""
    bounds = {"suffix_decoding_max_cached_requests": max_requests, "suffix_decoding_max_cached_tokens": 60}
    full, small = make(**bounds), make()
    for tenant, tokens in answers:
        finish(full, [0, *tokens], tenant=tenant)
        assert full.integrity() == []
        assert len(full.cache) <= max_requests
        assert full.cache.num_tokens <= 60
    for left in full.cache.answers():
        finish(small, list(left.token_ids), tenant=left.tenant)
    for tenant in ("", "red"):
        assert guess(full, text, tenant=tenant) == guess(small, text, tenant=tenant)


def test_what_is_evicted_is_not_counted_even_before_it_is_cut_off() -> None:
    drafter = make(suffix_decoding_max_cached_requests=20)
    for number in range(22):
        finish(drafter, [9, 1, 2, 3, number])
    index = drafter.cache.index("")
    assert index is not None
    assert len(index.occurrences([1, 2, 3])) == len(index.occurrences([3])) == 20


def test_a_tenant_whose_answers_are_gone_costs_nothing() -> None:
    drafter = make(suffix_decoding_max_cached_requests=2)
    levels = []
    for number in range(50):
        finish(drafter, [9, 1, 2, 3, 4], tenant=f"tenant {number:02d}")
        levels.append(drafter.memory_bytes())
    assert len(set(levels[1:])) == 1
    assert drafter.cache.index("tenant 47") is None


@pytest.mark.parametrize("bound", ["requests", "tokens"])
def test_a_busy_account_pushes_out_its_own_answers_whatever_users_it_names(bound: str) -> None:
    drafter = make(**{f"suffix_decoding_max_cached_{bound}": 8 if bound == "requests" else 40})
    finish(drafter, [9, 1, 2, 3, 4], tenant="quiet/ann")
    finish(drafter, [9, 5, 6, 7, 8], tenant="quiet")
    for number in range(30):
        finish(drafter, [9, 1, 2, number, 4], tenant=f"busy/{number}")
        assert drafter.integrity() == []
    assert guess(drafter, [1, 2, 3], tenant="quiet/ann").token_ids == (4,)
    assert guess(drafter, [5, 6, 7], tenant="quiet").token_ids == (8,)
    assert [left.tenant for left in drafter.cache.answers()][2:] == [f"busy/{n}" for n in range(24, 30)]


def test_an_answer_longer_than_the_cache_does_not_empty_it() -> None:
    drafter = make(suffix_decoding_max_cached_tokens=10)
    finish(drafter, [9, 1, 2, 3, 4])
    finish(drafter, list(range(100, 120)))
    assert guess(drafter, [1, 2, 3]).token_ids == (4,)


def test_memory_is_what_was_allocated_and_stays_bounded() -> None:
    rng = random.Random(0)
    answers = [rng.choices(range(1000), k=200) for _ in range(400)]
    drafter = make(suffix_decoding_max_cached_tokens=40_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for answer in answers[:200]:
        finish(drafter, answer)
    allocated = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    level = drafter.memory_bytes()
    assert 0.85 * allocated <= level <= 1.15 * allocated
    for answer in answers:
        finish(drafter, answer)
        assert drafter.memory_bytes() <= 1.5 * level
    assert level / drafter.cache.num_tokens < 160, "random text is the worst case: every trigram is new"


# --- on disk ------------------------------------------------------------------------------------------------


def filled() -> SuffixDrafter:
    drafter = make()
    rng = random.Random(1)
    for number in range(20):
        finish(drafter, rng.choices(range(5), k=30), num_prompt_tokens=4, tenant=("", "rëd")[number % 2])
    return drafter


def test_what_is_saved_proposes_the_same(tmp_path: Path) -> None:
    drafter, path = filled(), tmp_path / "cache.jsonl"
    drafter.save(path)
    loaded = make(suffix_decoding_cache_file=str(path))
    assert len(loaded.cache) == 20
    rng = random.Random(2)
    for _ in range(50):
        text = rng.choices(range(5), k=12)
        for tenant in ("", "rëd", "other"):
            assert guess(loaded, text, tenant=tenant) == guess(drafter, text, tenant=tenant)
    assert loaded.integrity() == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache.jsonl"]
    assert path.stat().st_mode & 0o077 == 0, "other people's answers are nobody else's business"


HEADER = {"format": "slipstream-suffix-cache", "version": 1, "vocab_size": 1000, "documents": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a suffix cache file"),
        (b"\x89PNG\r\n\xff\xfe", "is not a suffix cache file"),
        (b"[" * 100_000, "is not a suffix cache file"),
        (b'{"format": "something else"}\n', "is not a suffix cache file"),
        (HEADER | {"version": 2}, "has version 2"),
        (HEADER | {"vocab_size": 32_000}, "vocabulary of 32000; the target has 1000"),
        (HEADER, "cut off after 0 answers"),
        (json.dumps(HEADER).encode() + b'\n["", 0, [1, 2', "damaged in line 2"),
        (json.dumps(HEADER).encode() + b'\n["", 0, [1, 1000]]\n', "damaged in line 2"),
        (json.dumps(HEADER).encode() + b'\n["", 0, [1, -1]]\n', "damaged in line 2"),
        (json.dumps(HEADER).encode() + b'\n["", 0, ["a"]]\n', "damaged in line 2"),
        (json.dumps(HEADER).encode() + b"\n[7, 0, [1]]\n", "damaged in line 2"),
        (json.dumps(HEADER).encode() + b'\n["", 0, [1]]\n\xff\xff\n', "damaged in line 3"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_whole(
    content: bytes | dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "cache.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode() + b"\n")
    drafter = make()
    with pytest.raises(ConfigError) as caught:
        drafter.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(drafter.cache) == 0


def test_a_file_of_something_else_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a cache\n")
    with pytest.raises(ConfigError, match="is not a suffix cache file"):
        SuffixOptions(suffix_decoding_cache_file=str(path))
