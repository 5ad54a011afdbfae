"""Heads that correct a block from left to right: walking gives what known texts give, and each reads what it may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.draft.heads.corrections import KINDS, MARKOV_KINDS, CandidateSelector, make_left_to_right
from slipstream.draft.heads.dflash_head import DFlashHead
from slipstream.draft.heads.left_to_right import LeftToRightConfig, LeftToRightHead
from tests.kit.dflash_heads import random_head

HIDDEN, VOCAB, DRAFTED, BLOCK = 12, 40, 30, 5
PATHS = 3


def made(kind: str, from_anchor: bool, **options: Any) -> LeftToRightHead:
    torch.manual_seed(0)
    config = LeftToRightConfig(kind=kind, rank=6, top_k=4, state_size=7, num_uncorrected=1)
    head = make_left_to_right(
        replace(config, **options),
        vocab_size=VOCAB,
        draft_vocab_size=DRAFTED,
        hidden_size=HIDDEN,
        block_size=BLOCK,
        first_slot=0 if from_anchor else 1,
    )
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head.requires_grad_(False)


def inputs(from_anchor: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drafts = BLOCK if from_anchor else BLOCK - 1
    return {
        "hidden": torch.randn(PATHS, BLOCK, HIDDEN, generator=generator),
        "base_logits": torch.randn(PATHS, drafts, DRAFTED, generator=generator),
        "tokens": torch.randint(VOCAB, (PATHS, BLOCK), generator=generator),
        "before": torch.randint(VOCAB, (PATHS,), generator=generator),
    }


def embed(token_ids: Tensor) -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))[token_ids]


def walked(head: LeftToRightHead, given: dict[str, Tensor], paths: list[int]) -> Tensor:
    """Slot by slot; `paths` says which path's text and state each path goes on with, as in a tree."""
    read = head.read(given["hidden"])
    state = head.begin(read, given["tokens"][:, 0], given["before"], embed)
    found = []
    for draft in range(given["base_logits"].shape[1]):
        slot = head.first_slot + draft
        logits, state = head.step(
            slot, read[:, slot], given["base_logits"][:, draft], given["tokens"][:, draft], state, embed
        )
        found.append(logits)
        state = state[paths]
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_gives_what_a_known_text_gives(kind: str, from_anchor: bool) -> None:
    head, given = made(kind, from_anchor), inputs(from_anchor)
    torch.testing.assert_close(walked(head, given, [0, 1, 2]), head(**given, embed=embed))


@pytest.mark.parametrize("kind", KINDS)
def test_states_can_be_taken_over_by_other_paths(kind: str) -> None:
    """Three children of one node: with the parent's inputs, all of them go on as it does."""
    head = made(kind, True)
    given = {name: tensor[:1].expand(PATHS, *tensor.shape[1:]) for name, tensor in inputs(True).items()}
    torch.testing.assert_close(walked(head, given, [1, 1, 1])[0], head(**given, embed=embed)[0])


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_reads_no_token_of_its_own_place_or_later(kind: str, from_anchor: bool) -> None:
    head, given = made(kind, from_anchor), inputs(from_anchor)
    reads_before = kind == "refiner" and not from_anchor
    for place in range(BLOCK):
        changed = given | {"tokens": given["tokens"].clone()}
        changed["tokens"][:, place] = (changed["tokens"][:, place] + 1) % VOCAB
        moved = (head(**given, embed=embed) != head(**changed, embed=embed)).any(-1).any(0)
        drafts = given["base_logits"].shape[1]
        expected = [draft >= place if head.reads_path else draft == place for draft in range(drafts)]
        if kind == "gru" and place < drafts:
            expected[0] = False  # the first draft keeps the logits of the layers
        assert moved.tolist() == expected
    other = head(**(given | {"before": (given["before"] + 1) % VOCAB}), embed=embed)
    assert (not torch.equal(other, head(**given, embed=embed))) == reads_before


def test_a_selector_draws_from_the_likeliest_tokens_alone() -> None:
    head, given = made("selector", True), inputs(True)
    logits = head(**given, embed=embed)
    possible = logits > float("-inf")
    assert (possible.sum(-1) == 4).all()
    likeliest = given["base_logits"].topk(4, dim=-1).indices
    assert torch.equal(possible.nonzero()[:, 2].view(PATHS, BLOCK, 4), likeliest.sort(-1).values)
    assert isinstance(head, CandidateSelector)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'best' is not known; there are vanilla, gated"):
        made("best", True)


def with_confidence(confidence: str, kind: str | None) -> DFlashHead:
    correction = None if kind is None else LeftToRightConfig(kind=kind, rank=6)
    return random_head(from_anchor=True, left_to_right=correction, confidence=confidence)


@pytest.mark.parametrize("kind", [None, *MARKOV_KINDS])
@pytest.mark.parametrize("confidence", ["hidden", "hidden+token"])
def test_confidence_reads_the_previous_token_if_asked_to(confidence: str, kind: str | None) -> None:
    if kind is None and confidence == "hidden+token":
        with pytest.raises(ValueError, match="needs a Markov head"):
            with_confidence(confidence, kind)
        return
    head = with_confidence(confidence, kind)
    hidden = torch.randn(2, 5, 24)
    first, second = (head.confidence(hidden, torch.full((2, 5), token)) for token in (3, 4))
    assert first is not None
    assert second is not None
    assert first.shape == (2, 5)
    assert torch.equal(first, second) == (confidence == "hidden")
    assert random_head().confidence(hidden, torch.zeros(2, 5, dtype=torch.int64)) is None
