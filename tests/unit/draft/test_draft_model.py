"""The draft model keeps the drafter's contract, sees the committed text and nothing else, and never falls behind."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Observation
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions
from slipstream.errors import ConfigError
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, load_tokenizer
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import draft_context
from tests.kit.head_drafters import CHOICES, text

pytestmark = pytest.mark.usefixtures("drafts_loaded_once")

VOCAB = 4096


def make(verifier: str = "coupled", **options: Any) -> DraftModelDrafter:
    context = draft_context(VOCAB, 512, verifier, tokenizer=load_tokenizer(EMBEDDED_TARGET))
    drafter = DraftModelDrafter(DraftModelOptions(model=EMBEDDED_DRAFT, **options), context)
    drafter.allocate(4096)
    return drafter


def sequence(token_ids: list[int], temperature: float = 0.0, number: int = 0) -> Sequence:
    params = SamplingParams(temperature=temperature, max_tokens=100)
    return Sequence(
        id=number,
        request_id=str(number),
        index=0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        params=params,
        seed=number,
    )


def seen(sequence: Sequence, num_accepted: int) -> Observation:
    return Observation(sequence, EMPTY_PROPOSAL, num_accepted, torch.empty(0))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_a_chain_ends_where_the_draft_has_lost_its_confidence(verifier: str, temperature: float) -> None:
    """Before the token with which the product of the highest probabilities falls below the threshold."""
    whole, careful = make(verifier), make(verifier, confidence_threshold=0.1)
    lengths: set[int] = set()
    for seed in range(12):
        asked = sequence(text(40, seed), temperature, seed)
        [full], [part] = whole.propose([asked], [4]), careful.propose([asked], [4])
        lengths.add(len(part))
        assert part.token_ids == full.token_ids[: len(part)]
        highest = [_highest(asked, list(full.token_ids[:depth])) for depth in range(4)]
        products = [math.prod(highest[: depth + 1]) for depth in range(4)]
        expected = next((depth for depth, product in enumerate(products) if product < 0.1), 4)
        assert len(part) == expected
    assert len(lengths) > 1


@cache
def another() -> DraftModelDrafter:
    return make("rejection", num_speculative_tokens=1)


def _highest(asked: Sequence, guessed: list[int]) -> float:
    """The draft's highest probability of the next token, after some guesses, by a drafter of its own."""
    params = SamplingParams(temperature=asked.params.temperature or 1.0, max_tokens=100)
    drafter = another()
    longer = replace(asked, token_ids=[*asked.token_ids, *guessed], params=params)
    [proposal] = drafter.propose([longer], [1])
    drafter.release(longer)
    assert proposal.draft_probs is not None
    return float(proposal.draft_probs[0].max())


@pytest.mark.parametrize("is_moved", [False, True])
def test_draft_entries_that_were_left_behind_are_not_kept(is_moved: bool) -> None:
    """A sequence that is moved takes its valid entries along, not those of its draft."""
    drafter = make(num_speculative_tokens=4)
    asked, other = sequence(text(40)), sequence(text(40, 1), number=1)
    proposal, _ = drafter.propose([asked, other], [4, 4])
    accounting = drafter.cache.accounting
    before = accounting.slots(0)
    if is_moved:
        assert accounting.reserve(0, 1000)
    assert (accounting.slots(0)[0] != before[0]) == is_moved
    asked.token_ids += [*proposal.token_ids[:2], 7]
    drafter.observe([seen(asked, 2)])
    assert accounting.num_valid(0) == (40 if is_moved else 42)


@pytest.mark.parametrize("threshold", [-0.1, 1.0, math.nan])
def test_a_threshold_that_cannot_be_is_refused(threshold: Any) -> None:
    with pytest.raises(ConfigError, match="confidence_threshold must be from 0 to below 1"):
        DraftModelOptions(model=EMBEDDED_DRAFT, confidence_threshold=threshold)


def test_a_tree_takes_no_threshold() -> None:
    with pytest.raises(ConfigError, match="confidence_threshold is for chains"):
        DraftModelOptions(model=EMBEDDED_DRAFT, confidence_threshold=0.1, tree_top_k=2)


def greedy_chain(drafter: DraftModelDrafter, token_ids: list[int], length: int) -> list[int]:
    """The draft model's own greedy continuation, computed from nothing."""
    model = drafter.model
    out = list(token_ids)
    for _ in range(length):
        pool = KVPool(model.shapes, len(out), model.dtype, model.device)
        logits = model.forward([RowGroup(pool.slots, 0, out, [len(out) - 1])], pool).logits
        out.append(int(logits[0].argmax()))
    return out[len(token_ids) :]


def test_guesses_are_the_models_own_whatever_was_accepted() -> None:
    """Full, partial and no acceptance, a stretch without drafting, long first sight: never a stale entry."""
    drafter = make()
    rng = random.Random(1)
    seq = sequence(text(60))
    for _ in range(12):
        proposal = drafter.propose([seq], [4])[0]
        assert list(proposal.token_ids) == greedy_chain(drafter, seq.token_ids, 4)
        accepted = rng.randint(0, 4)
        seq.token_ids += [*proposal.token_ids[:accepted], rng.randrange(6, VOCAB)]
        drafter.observe([seen(seq, accepted)])
        if rng.random() < 0.4:
            seq.token_ids += text(rng.randint(1, 30), seed=rng.randrange(99))  # decoded without us
    drafter.release(seq)
    assert drafter.cache.accounting.num_held == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tree_guesses_follow_their_own_branch(temperature: float) -> None:
    """Each parent's best child is what a lone pass over its path ranks first."""
    drafter = make(tree_top_k=3, num_draft_nodes=9, draft_sample_method="greedy")
    seq = sequence(text(40), temperature)
    for _ in range(3):
        proposal = drafter.propose([seq], [9])[0]
        assert len(proposal) == 9
        for parent, children in proposal.children.items():
            path = [proposal.token_ids[node] for node in proposal.path(parent)]
            expected = greedy_chain(drafter, seq.token_ids + path, 1)[0]
            assert proposal.token_ids[children[0]] == expected
        leaf = max(range(9), key=lambda node: proposal.depths[node])
        path = [proposal.token_ids[node] for node in proposal.path(leaf)]
        seq.token_ids += [*path, 17]
        drafter.observe([seen(seq, len(path))])


@pytest.mark.parametrize(("temperature", "method"), [(0.0, "auto"), (0.8, "greedy"), (0.8, "auto")])
@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_a_fixed_tree_has_its_shape(temperature: float, method: str, verifier: str) -> None:
    drafter = make(verifier, tree_choices=CHOICES, draft_sample_method=method)
    proposal = drafter.propose([sequence(text(40), temperature)], [6])[0]
    found = set()
    for node in range(len(proposal)):
        path = [ROOT, *proposal.path(node)]
        found.add(tuple(proposal.children[a].index(b) for a, b in pairwise(path)))
    assert found == {tuple(choice) for choice in CHOICES}
    drawn = verifier == "rejection" and method == "auto" and temperature > 0
    assert (proposal.kind is ProposalKind.SAMPLED_WITHOUT_REPLACEMENT) == drawn


def test_batch_is_drafted_as_each_alone() -> None:
    together, alone = make(), make()
    sequences = [sequence(text(length, length), 0.7, number) for number, length in enumerate((3, 50, 20, 7))]
    batch = together.propose(sequences, [4, 2, 3, 4])
    for seq, budget, proposal in zip(sequences, [4, 2, 3, 4], batch, strict=True):
        assert alone.propose([seq], [budget])[0].token_ids == proposal.token_ids
        assert len(proposal) == budget


def test_kinds_suit_the_verifier() -> None:
    seq = sequence(text(20), temperature=1.0)
    assert make().propose([seq], [3])[0].kind is ProposalKind.COUPLED
    sampled = make("rejection").propose([seq], [3])[0]
    assert sampled.kind is ProposalKind.SAMPLED_IID
    assert sampled.draft_probs is not None
    assert sampled.draft_probs.shape == (3, VOCAB)
    assert torch.allclose(sampled.draft_probs.sum(dim=1), torch.ones(3))
    assert make("rejection", draft_sample_method="greedy").propose([seq], [3])[0].kind is ProposalKind.ONE_HOT


def test_long_prompt_is_caught_up_in_bounded_steps_beside_a_short_one() -> None:
    drafter = make()
    limit = drafter.context.engine_config.max_num_batched_tokens
    long, short = sequence(text(limit + 200), number=1), sequence(text(10), number=2)
    sizes: list[list[int]] = []
    for _ in range(3):
        proposals = drafter.propose([short, long], [4, 4])
        sizes.append([len(proposal) for proposal in proposals])
        for seq, proposal in zip((short, long), proposals, strict=True):
            seq.token_ids.append(9)
            drafter.observe([seen(seq, 0)])
            assert isinstance(proposal, Proposal)
    assert sizes == [[4, 0], [4, 4], [4, 4]]


def test_beyond_its_context_or_its_memory_it_proposes_nothing() -> None:
    drafter = make()
    assert len(drafter.propose([sequence(text(drafter.model.context_length - 3))], [4])[0]) == 0
    small = make()
    small.allocate(100)
    big, fits = sequence(text(200), number=1), sequence(text(20), number=2)
    proposals = small.propose([big, fits], [4, 4])
    assert [len(proposal) for proposal in proposals] == [0, 4]
    assert small.integrity() == []


def test_prompts_are_computed_while_the_target_computes_them() -> None:
    """A budget of 0 is used to catch up, so that the first budget finds the draft ready."""
    drafter = make()
    limit = drafter.context.engine_config.max_num_batched_tokens
    seq = sequence(text(limit + 200))
    assert len(drafter.propose([seq], [0])[0]) == 0
    assert drafter.cache.accounting.num_valid(seq.id) == limit
    assert list(drafter.propose([seq], [4])[0].token_ids) == greedy_chain(drafter, seq.token_ids, 4)
