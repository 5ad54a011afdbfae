"""The Hydra drafter: each head reads the state behind the last computed token and all tokens on its node's path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.draft.heads.hydra import HydraDrafter, HydraOptions
from slipstream.errors import ModelError
from tests.kit.head_drafters import (
    VOCAB,
    computed,
    context,
    force,
    random_heads,
    reference,
    target,
    text,
)


def make(verifier: str = "coupled", **options: Any) -> HydraDrafter:
    return HydraDrafter(HydraOptions(**{"model": random_heads("hydra"), **options}), context(verifier))


def read(state: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """What a head reads: the state, and the embeddings of the last committed and of the drafted tokens."""
    return torch.cat([state, *target().embed(torch.tensor(token_ids))])


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_chain_reads_its_own_guesses(
    quantization: str | None, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(kernels, monkeypatch)
    drafter = make(quantization=quantization)
    heads = reference(drafter)
    sequence, state = computed(drafter, text(40))
    token_ids = [sequence.token_ids[-1]]
    for head in range(4):
        token_ids.append(int(heads.step(head, read(state, token_ids)[None]).argmax()))
    assert list(drafter.propose([sequence], [4])[0].token_ids) == token_ids[1:]
    assert list(drafter.propose([sequence], [3])[0].token_ids) == token_ids[1:4]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_every_branch_reads_its_own_path_in_a_batch(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parent's best child is what its head ranks first after the tokens of the parent's own path."""
    force(kernels, monkeypatch)
    drafter = make(tree_top_k=3, num_draft_nodes=9)
    heads = reference(drafter)
    pairs = [computed(drafter, text(length, length), number=length) for length in (40, 5, 17)]
    proposals = drafter.propose([sequence for sequence, _ in pairs], [9, 4, 9])
    assert [len(proposal) for proposal in proposals] == [9, 4, 9]
    for (sequence, state), proposal in zip(pairs, proposals, strict=True):
        for parent, children in proposal.children.items():
            path = [sequence.token_ids[-1], *(proposal.token_ids[node] for node in proposal.path(parent))]
            logits = heads.step(len(path) - 1, read(state, path)[None])
            assert proposal.token_ids[children[0]] == int(logits.argmax())


def test_batch_is_drafted_as_each_alone() -> None:
    drafter = make(tree_top_k=2)
    sequences = [computed(drafter, text(length, length), 0.7, length)[0] for length in (3, 50, 20, 7)]
    batch = drafter.propose(sequences, [8, 2, 5, 8])
    for sequence, budget, proposal in zip(sequences, [8, 2, 5, 8], batch, strict=True):
        assert drafter.propose([sequence], [budget])[0] == proposal
        assert len(proposal) == budget


def test_heads_for_another_target_are_refused() -> None:
    with pytest.raises(ModelError, match="hidden size 256 and 4096 tokens"):
        make(model=random_heads("hydra", 2, 256, VOCAB))
