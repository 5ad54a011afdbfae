"""The Medusa drafter: each level is one head's guesses from the state behind the last computed token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from slipstream.core.proposal import ROOT, ProposalKind
from slipstream.draft.heads.medusa import MedusaDrafter, MedusaOptions
from slipstream.errors import ConfigError, ModelError
from slipstream.testing.stub_drafters import draft_context
from tests.kit.head_drafters import (
    CHOICES,
    VOCAB,
    computed,
    context,
    force,
    random_heads,
    reference,
    text,
)


def make(verifier: str = "coupled", **options: Any) -> MedusaDrafter:
    return MedusaDrafter(MedusaOptions(**{"model": random_heads("medusa"), **options}), context(verifier))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_chain_is_each_heads_best_guess(
    quantization: str | None, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(kernels, monkeypatch)
    drafter = make(quantization=quantization)
    heads = reference(drafter)
    sequence, state = computed(drafter, text(40))
    expected = heads(state[None]).argmax(-1)[:, 0].tolist()
    assert list(drafter.propose([sequence], [4])[0].token_ids) == expected
    assert list(drafter.propose([sequence], [2])[0].token_ids) == expected[:2]
    drafter.release(sequence)
    assert drafter.num_held() == 0


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_the_best_products_of_probabilities_make_a_dynamic_tree(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(kernels, monkeypatch)
    drafter = make(tree_top_k=3, num_draft_nodes=9)
    heads = reference(drafter)
    sequence, state = computed(drafter, text(40))
    proposal = drafter.propose([sequence], [9])[0]
    probs = heads(state[None])[:, 0].softmax(-1)
    paths = [[proposal.token_ids[node] for node in proposal.path(node)] for node in range(9)]
    scores = [float(torch.stack([probs[i, token] for i, token in enumerate(path)]).prod()) for path in paths]
    assert len(proposal) == 9
    # Nothing that was left out beats what was taken: try every child of every node among each head's best three.
    candidates = [
        [*path, int(token)]
        for path in [[], *paths]
        if len(path) < 4
        for token in probs[len(path)].topk(3).indices
    ]
    left_out = [path for path in candidates if path not in paths]
    best = max(float(torch.stack([probs[i, t] for i, t in enumerate(path)]).prod()) for path in left_out)
    assert best <= min(scores) + 1e-6


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_a_fixed_tree_has_its_shape(verifier: str) -> None:
    drafter = make(verifier, tree_choices=CHOICES)
    proposal = drafter.propose([computed(drafter, text(40), temperature=0.8)[0]], [6])[0]
    found = set()
    for node in range(len(proposal)):
        path = [ROOT, *proposal.path(node)]
        found.add(tuple(proposal.children[a].index(b) for a, b in pairwise(path)))
    assert found == {tuple(choice) for choice in CHOICES}
    drawn = verifier == "rejection"
    assert (proposal.kind is ProposalKind.SAMPLED_WITHOUT_REPLACEMENT) == drawn


def test_batch_is_drafted_as_each_alone() -> None:
    drafter = make(tree_top_k=2)
    sequences = [computed(drafter, text(length, length), 0.7, length)[0] for length in (3, 50, 20, 7)]
    budgets = [8, 2, 5, 8]
    batch = drafter.propose(sequences, budgets)
    for sequence, budget, proposal in zip(sequences, budgets, batch, strict=True):
        assert drafter.propose([sequence], [budget])[0] == proposal
        assert len(proposal) == budget


def test_it_waits_until_the_target_has_computed_all_but_one_token() -> None:
    drafter = make()
    sequence, _ = computed(drafter, text(40))
    for num_computed in (0, 38, 40):
        sequence.num_computed = num_computed
        assert len(drafter.propose([sequence], [4])[0]) == 0
    sequence.num_computed = 39
    assert len(drafter.propose([sequence], [4])[0]) == 4
    sequence.token_ids, sequence.num_computed = sequence.token_ids[:1], 0  # no state is there to read
    assert len(drafter.propose([sequence], [4])[0]) == 0


def test_it_says_what_it_holds() -> None:
    weights = 4 * (320 * 320 + 320)  # a block a head, and no projection
    assert weights * 2 <= make().memory_bytes() < weights * 2 * 1.2  # 16 bits, as the target
    assert weights * 4 <= make(quantization="float32").memory_bytes() < weights * 4 * 1.2
    assert weights <= make(quantization="int8").memory_bytes() < weights * 1.3


def test_heads_for_another_target_are_refused() -> None:
    for sizes in ((256, VOCAB), (320, 32000)):
        with pytest.raises(ModelError, match="trained for it") as caught:
            make(model=random_heads("medusa", 2, *sizes))
        assert f"hidden size {sizes[0]} and {sizes[1]} tokens" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_depth_is_at_most_one_a_head() -> None:
    drafter = make(model=random_heads("medusa", 2))
    assert drafter.traits.max_nodes == drafter.traits.chain_length == 2
    assert make(tree_top_k=2).traits.chain_length is None, "the depth of a tree is not chosen"
    with pytest.raises(ConfigError, match=r"3 levels deep, but .* has 2 heads"):
        make(model=random_heads("medusa", 2), tree_choices=CHOICES)


def test_it_needs_a_target() -> None:
    with pytest.raises(ConfigError, match="no target is loaded"):
        MedusaDrafter(MedusaOptions(model=random_heads("medusa")), draft_context(VOCAB))
