"""Lookahead decoding keeps the drafter's contract; its window is the paper's, its pool is bounded."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from slipstream.core.proposal import ROOT, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Observation
from slipstream.draft.parallel.lookahead import (
    JacobiWindow,
    LookaheadDrafter,
    LookaheadOptions,
    NgramPool,
    TreeBuilder,
)
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import draft_context

VOCAB = 500


def make(vocab_size: int = VOCAB, **options: Any) -> LookaheadDrafter:
    return LookaheadDrafter(LookaheadOptions(**options), draft_context(vocab_size))


def sequence(token_ids: list[int]) -> Sequence:
    return Sequence(0, "0", 0, list(token_ids), len(token_ids), SamplingParams(), seed=0)


def held(drafter: LookaheadDrafter, text: Sequence) -> JacobiWindow:
    window = drafter.window(text)
    assert window is not None
    return window


def words(proposal: Proposal, node: int) -> list[int]:
    """The tokens from below the text down to `node`."""
    return [proposal.token_ids[ancestor] for ancestor in proposal.path(node)]


def step(
    drafter: LookaheadDrafter, text: Sequence, budget: int, said: dict[tuple[int, ...], int]
) -> Proposal:
    """One step without acceptance; `said` is the target's best token behind each path, 0 where it says nothing."""
    proposal = drafter.propose([text], [budget])[0]
    rows = [said.get(tuple(words(proposal, node)), 0) for node in range(ROOT, len(proposal))]
    text.token_ids.append(rows[0])
    logits = torch.nn.functional.one_hot(torch.tensor(rows), VOCAB).float()
    drafter.observe([Observation(text, proposal, 0, logits)])
    return proposal


def test_the_window_is_the_paper_s() -> None:
    """W = 2, N = 3: each column sees the first row up to itself, then itself; its last token's row is the next."""
    drafter = make(window_size=2, ngram_size=3, pool_from_prompt=False)
    text = sequence([10, 11])
    first = step(drafter, text, 99, {})
    assert first.is_chain  # one row so far
    a, b = first.token_ids
    # Behind each column of one token the target said 0; now it says 31 and 32 behind the columns of two.
    second = step(drafter, text, 99, {(): 12, (a, 0): 31, (a, b, 0): 32})
    assert [words(second, node) for node in range(4)] == [[a], [a, 0], [a, b], [a, b, 0]]
    # Both columns gave an n-gram and lost their oldest token: now 0 31 and 0 32.
    third = step(drafter, text, 99, {(): a})
    assert [words(third, node) for node in range(4)] == [[0], [0, 31], [0, 0], [0, 0, 32]]
    # The last committed token is now a, after which 0 31 was seen: a guess at the top.
    fourth = drafter.propose([text], [99])[0]
    assert words(fourth, 1) == [0, 31]


def test_each_column_reads_the_row_behind_its_own_last_token() -> None:
    """With a target that numbers every path, every cell holds what was said behind the cell above it."""
    rng = random.Random(0)
    drafter = make(window_size=4, ngram_size=4)
    text = sequence([rng.randrange(VOCAB) for _ in range(30)])
    said: dict[tuple[int, ...], int] = {}

    class Target(dict[tuple[int, ...], int]):
        def get(self, path: Any, default: Any = None) -> Any:
            return said.setdefault(path, rng.randrange(1, VOCAB))

    for _ in range(20):
        said.clear()
        window = drafter.window(text)
        before = None if window is None else [list(column) for column in window.columns]
        step(drafter, text, 99, Target())
        if window is None or before is None:
            continue
        tops = [column[0] for column in before]
        for i, (old, new) in enumerate(zip(before, window.columns, strict=True)):
            expected = [*old, said[(*tops[: i + 1], *old[1:])]]
            assert new == expected[-3:]
            if len(expected) == 4:
                assert tuple(expected[1:]) in window.pool.after(expected[0])


def test_n_grams_come_first_and_the_window_shrinks_by_whole_columns() -> None:
    drafter = make(window_size=4, ngram_size=3, max_guesses=2)
    text = sequence([1, 2, 3, 1, 4, 5, 1])
    for _ in range(3):
        step(drafter, text, 99, {(): 1})
    columns = held(drafter, text).columns
    for budget in range(1, drafter.traits.max_nodes + 1):
        proposal = drafter.propose([text], [budget])[0]
        paths = [words(proposal, node) for node in range(len(proposal))]
        ngrams = [[*tail] for tail in held(drafter, text).pool.after(1)]
        for i, ngram in enumerate(ngrams):
            if budget >= 2 * (i + 1):
                assert ngram in paths
        num_columns = len(held(drafter, text).ends)
        assert all(len(end) >= 2 and [*end] in paths for end in held(drafter, text).ends)
        assert num_columns >= min(4, (budget - 2 * len(ngrams)) // 2)
        for i, end in enumerate(held(drafter, text).ends):
            tops = [column[0] for column in columns[: i + 1]]
            assert [*end] == [*tops, *columns[i][1:]]
        assert len(proposal) <= budget


def test_a_column_that_was_cut_off_before_the_check_waits() -> None:
    """An ensemble's budget and a grammar take nodes away and number the others anew."""
    drafter = make(window_size=3, ngram_size=3, pool_from_prompt=False)
    text = sequence([1, 2, 3])
    step(drafter, text, 99, {})
    proposal = drafter.propose([text], [99])[0]
    before = [list(column) for column in held(drafter, text).columns]
    lost = held(drafter, text).ends[1]
    kept = [node for node in range(len(proposal)) if words(proposal, node)[: len(lost)] != [*lost]]
    number = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
    part = Proposal(
        tuple(proposal.token_ids[node] for node in kept),
        tuple(number[proposal.parents[node]] for node in kept),
    )
    logits = torch.eye(VOCAB)[torch.arange(len(part) + 1) % VOCAB]  # row i says token i
    text.token_ids.append(4)
    drafter.observe([Observation(text, part, 0, logits)])
    after = held(drafter, text).columns
    assert after[1] == before[1]
    for i in (0, 2):
        row = 1 + next(
            node for node in range(len(part)) if words(part, node) == [*held(drafter, text).ends[i]]
        )
        assert after[i][-1] == row % VOCAB
        assert len(after[i]) != len(before[i]) or after[i] != before[i]


def test_what_was_not_computed_waits() -> None:
    drafter = make(window_size=3, ngram_size=3, pool_from_prompt=False)
    text = sequence([1, 2, 3])
    step(drafter, text, 99, {})
    before = [list(column) for column in held(drafter, text).columns]
    drafter.observe([Observation(text, Proposal(), 0, torch.zeros(1, VOCAB))])
    assert held(drafter, text).columns == before
    step(drafter, text, 2, {})  # room for one column of two
    after = held(drafter, text).columns
    assert after[0] != before[0]
    assert after[1:] == before[1:]


def test_branches_that_begin_alike_share_nodes() -> None:
    tree = TreeBuilder(5)
    assert tree.add(ROOT, [1, 2, 3]) == 2
    assert tree.add(ROOT, [1, 2, 4]) == 3
    assert tree.add(ROOT, [1, 5, 6]) == 4  # no room for 6
    proposal = tree.proposal()
    assert (proposal.token_ids, proposal.parents) == ((1, 2, 3, 4, 5), (-1, 0, 1, 1, 0))


def test_the_pool_forgets_what_was_seen_the_longest_time_ago() -> None:
    pool = NgramPool(2, max_keys=3)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
        pool.add(ngram)
    assert pool.after(1) == [(6, 7), (2, 3)]
    for first in (2, 3, 1, 4):
        pool.add([first, 0, 0])
    assert [bool(pool.after(first)) for first in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(pool) == 4


def test_the_prompt_s_ngrams_are_guesses() -> None:
    text = sequence([1, 2, 3, 4, 9, 1])
    with_prompt, without = make(ngram_size=4), make(pool_from_prompt=False)
    assert [2, 3, 4] in [words(with_prompt.propose([text], [99])[0], node) for node in range(3)]
    assert len(without.propose([text], [99])[0]) == 3  # the window, one row of it
    with_prompt.release(text)
    assert (with_prompt.num_held(), with_prompt.memory_bytes()) == (0, 0)


def test_siblings_never_repeat_a_token() -> None:
    drafter = make(vocab_size=4)
    rng = random.Random(3)
    text = sequence([rng.randrange(4) for _ in range(10)])
    for _ in range(200):
        proposal = drafter.propose([text], [rng.randint(1, 30)])[0]
        for siblings in proposal.children.values():
            tokens = sorted(proposal.token_ids[node] for node in siblings)
            assert all(a < b for a, b in pairwise(tokens))
        text.token_ids.append(rng.randrange(4))
        rows = torch.randn(1 + len(proposal), 4, generator=torch.Generator().manual_seed(len(text.token_ids)))
        drafter.observe([Observation(text, proposal, 0, rows)])


def test_options_are_checked() -> None:
    for key, value in {"window_size": 0, "max_guesses": 0, "ngram_size": 1}.items():
        with pytest.raises(ConfigError, match=f"lookahead {key} must be a whole number"):
            LookaheadOptions(**{key: value})
    with pytest.raises(ConfigError, match="lookahead pool_from_prompt must be bool"):
        LookaheadOptions(pool_from_prompt=1)  # type: ignore[arg-type]
