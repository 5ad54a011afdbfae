"""Token Recycling keeps the drafter's contract and remembers what stood behind every row, by tenant."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from slipstream.core.proposal import ROOT, Proposal
from slipstream.core.request import FinishReason, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Observation
from slipstream.draft.lookup.token_recycling import (
    RANK_PROBS,
    TokenRecyclingDrafter,
    TokenRecyclingOptions,
    best_shape,
)
from slipstream.draft.top_tokens import top_tokens
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import draft_context

VOCAB = 100
PARAMS = SamplingParams()


def make(vocab_size: int = VOCAB, **options: Any) -> TokenRecyclingDrafter:
    return TokenRecyclingDrafter(TokenRecyclingOptions(**options), draft_context(vocab_size))


def sequence(token_ids: list[int], tenant: str = "") -> Sequence:
    return Sequence(0, "0", 0, list(token_ids), 1, PARAMS, seed=0, options=RequestOptions(tenant=tenant))


def logits(*rows: list[int]) -> torch.Tensor:
    """[rows, VOCAB]: each row's best tokens, best first; the others are far below."""
    made = torch.full((len(rows), VOCAB), -100.0)
    for row, best in zip(made, rows, strict=True):
        row[best] = torch.arange(len(best), 0, -1).float()
    return made


def teach(drafter: TokenRecyclingDrafter, successors: dict[int, list[int]], tenant: str = "") -> None:
    """Steps without drafts in which each token is followed by its successors, best first."""
    for token, best in successors.items():
        text = sequence([token, best[0]], tenant)
        drafter.observe([Observation(text, Proposal(), 0, logits(best))])


def test_nothing_is_proposed_for_a_token_that_was_never_seen() -> None:
    drafter = make(num_successors=2)
    assert len(drafter.propose([sequence([7])], [9])[0]) == 0
    teach(drafter, {7: [8, 9]})
    assert len(drafter.propose([sequence([8])], [9])[0]) == 0
    proposal = drafter.propose([sequence([7])], [9])[0]
    assert (proposal.token_ids, proposal.parents) == ((8, 9), (ROOT, ROOT))
    drafter.reset()
    assert len(drafter.propose([sequence([7])], [9])[0]) == 0
    assert drafter.memory_bytes() == 0


def test_every_row_is_recycled_accepted_or_not_and_the_first_decides() -> None:
    """Text 1 2, of which 2 is the last; drafts 3 and 4 below it, 5 and 2 below 3; 3 and 5 are accepted."""
    drafter = make(num_successors=2)
    proposal = Proposal((3, 4, 5, 2), (ROOT, ROOT, 0, 0))
    rows = logits([3, 4], [5, 6], [40, 41], [50, 51], [20, 21])
    drafter.observe([Observation(sequence([1, 2, 3, 5, 50]), proposal, 2, rows)])
    known = {2: (3, 4), 3: (5, 6), 4: (40, 41), 5: (50, 51)}
    for token, best in known.items():
        tree = drafter.propose([sequence([token])], [24])[0]
        assert tuple(tree.token_ids[node] for node in tree.children[ROOT]) == best
    for token in (1, 50, 20):
        assert len(drafter.propose([sequence([token])], [24])[0]) == 0


def test_a_cut_block_and_others_guesses_do_not_shift_the_rows() -> None:
    """Draft 3 stops the answer; then a step of an ensemble in which another member's draft tokens 6, 7 were
    accepted."""
    drafter = make(num_successors=1)
    done = sequence([1, 2, 3])
    done.finish_reason = FinishReason.STOP
    drafter.observe([Observation(done, Proposal.chain([3, 4]), 1, logits([3], [4], [5]), num_before=2)])
    assert [len(drafter.propose([sequence([token])], [1])[0]) for token in (1, 2, 3, 4)] == [0, 1, 1, 1]
    text = sequence([1, 8, 6, 7, 9])
    drafter.observe([Observation(text, Proposal(), 0, logits([6]), num_before=2)])
    assert drafter.propose([sequence([8])], [1])[0].token_ids == (6,)
    assert not len(drafter.propose([sequence([7])], [1])[0])


def test_the_tree_follows_the_successors_of_its_own_tokens() -> None:
    drafter = make(num_successors=3, num_draft_nodes=12)
    rng = random.Random(0)
    successors = {token: rng.sample(range(VOCAB), 3) for token in range(VOCAB)}
    teach(drafter, successors)
    for token in range(VOCAB):
        for budget in (1, 5, 12, 40):
            proposal = drafter.propose([sequence([token])], [budget])[0]
            assert len(proposal) == min(budget, 12)
            for parent, children in proposal.children.items():
                above = token if parent == ROOT else proposal.token_ids[parent]
                assert [proposal.token_ids[node] for node in children] == successors[above][: len(children)]


def test_the_shape_is_the_best_of_its_size_and_depth() -> None:
    """Against all paths of ranks, by their products."""
    probs = RANK_PROBS[:3]
    worths = sorted(
        [a * b for a in probs for b in probs]
        + list(probs)
        + [a * b * c for a in probs for b in probs for c in probs],
        reverse=True,
    )
    for num_nodes in (1, 2, 7, 20, 39, 100):
        found: list[float] = []
        for parent, rank in best_shape(num_nodes, 3, 3):
            assert parent < len(found)
            found.append((found[parent] if parent != ROOT else 1.0) * probs[rank])
        assert found == pytest.approx(worths[:num_nodes])
    assert make(num_successors=2, num_speculative_tokens=2).traits.max_nodes == 6


def test_tenants_share_nothing_and_the_last_ones_are_kept() -> None:
    drafter = make(max_tenants=2)
    for tenant in ("red", "blue", "red", "green"):
        teach(drafter, {7: [8, 9]}, tenant)
    for tenant, is_known in {"red": True, "green": True, "blue": False, "": False}.items():
        assert (len(drafter.propose([sequence([7], tenant)], [4])[0]) > 0) == is_known
    assert drafter.memory_bytes() == 2 * VOCAB * 8 * 4


@pytest.mark.parametrize("vocab_size", [5, 64, 300, 512, 1000])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_top_tokens_are_those_of_topk(vocab_size: int, k: int) -> None:
    rows = torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    assert torch.equal(top_tokens(rows, k), rows.topk(k).indices)
    assert top_tokens(rows[:0], k).shape == (0, k)


@pytest.mark.parametrize(
    "key", ["num_draft_nodes", "num_speculative_tokens", "num_successors", "max_tenants"]
)
def test_options_are_checked(key: str) -> None:
    with pytest.raises(ConfigError, match=f"token_recycling {key} must be"):
        TokenRecyclingOptions(**{key: 0})
    with pytest.raises(ConfigError, match=f"token_recycling {key} must be int"):
        TokenRecyclingOptions(**{key: "3"})
