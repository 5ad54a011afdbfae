"""A draft of another vocabulary keeps the drafter's contract and guesses as itself, in the tokens that both have."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_draft_model import seen, sequence
from torch import Tensor

from slipstream.core.proposal import ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.model.tli import TliDrafter, TliOptions
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import draft_context
from slipstream.text.retokenize import Encoder
from slipstream.text.token_bytes import shared_tokens
from tests.kit.tokenizer_families import FAMILIES, PAIRS, SENTENCES, byte_level, draft_folders

pytestmark = pytest.mark.usefixtures("drafts_loaded_once")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return draft_folders(tmp_path_factory.mktemp("drafts"))


def make(
    folders: dict[str, Path], ours: str, theirs: str, verifier: str = "coupled", **options: Any
) -> TliDrafter:
    tokenizer = FAMILIES[ours]()
    context = draft_context(len(tokenizer), 512, verifier, tokenizer=tokenizer)
    drafter = TliDrafter(TliOptions(model=str(folders[theirs]), **options), context)
    drafter.allocate(4096)
    return drafter


def encode(drafter: TliDrafter, data: bytes) -> list[int]:
    return Encoder(drafter.context.tokenizer, drafter.translator.target).encode(data)[0]


def own_logits(drafter: TliDrafter, text: list[int], guesses: list[int]) -> Tensor:
    """The draft's logits behind the text and guesses, in the target's ids, computed from nothing."""
    fresh = drafter.translator.begin()
    fresh.update(text)
    pairs = shared_tokens(drafter.translator.target, drafter.translator.draft)
    out = [*fresh.token_ids, *(pairs[token] for token in guesses)]
    model = drafter.model
    pool = KVPool(model.shapes, len(out), model.dtype, model.device)
    own = model.forward([RowGroup(pool.slots, 0, out, [len(out) - 1])], pool).logits[0]
    logits = torch.full((drafter.context.vocab_size,), float("-inf"))
    for our, their in pairs.items():
        logits[our] = own[their]
    return logits


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_guesses_are_the_drafts_own_whatever_was_accepted(
    folders: dict[str, Path], ours: str, theirs: str
) -> None:
    """Any acceptance, text in pieces of characters, stretches without us: never a stale entry."""
    drafter = make(folders, ours, theirs)
    rng = random.Random(1)
    text = encode(drafter, "\n".join(SENTENCES[:6]).encode())
    seq = sequence(text[:20])
    at = 20
    num_refed = 0
    while at < len(text) - 8:
        proposal = drafter.propose([seq], [4])[0]
        expected: list[int] = []
        for _ in range(4):
            expected.append(int(own_logits(drafter, seq.token_ids, expected).argmax()))
        assert list(proposal.token_ids) == expected
        accepted = rng.randint(0, 4)
        seq.token_ids += [*proposal.token_ids[:accepted], text[at]]
        at += 1
        held = drafter.cache.accounting.num_valid(seq.id)
        drafter.observe([seen(seq, accepted)])
        num_refed += drafter.cache.accounting.num_valid(seq.id) < held
        assert drafter.integrity() == []
        if rng.random() < 0.2:
            seq.token_ids += text[at : at + 5]
            at += 5
    assert num_refed, "no guess or token ever changed how the text before it reads"
    drafter.release(seq)
    assert drafter.num_held() == 0


def test_accepted_guesses_keep_their_entries(folders: dict[str, Path]) -> None:
    tokenizer = byte_level(specials=("<|pad|>", "<|end|>"))  # the same text, other ids
    context = draft_context(len(tokenizer), 512, tokenizer=tokenizer)
    drafter = TliDrafter(TliOptions(model=str(folders["byte-level"])), context)
    drafter.allocate(4096)
    seq = sequence(encode(drafter, SENTENCES[0].encode()))
    held = []
    for _ in range(30):
        proposal = drafter.propose([seq], [4])[0]
        before = drafter.cache.accounting.num_valid(seq.id)
        seq.token_ids += proposal.token_ids
        drafter.observe([seen(seq, 3)])
        held.append(drafter.cache.accounting.num_valid(seq.id) - before)
    assert max(held) >= 1


def test_a_draw_comes_from_the_drafts_distribution_over_the_shared_tokens(folders: dict[str, Path]) -> None:
    drafter = make(folders, "byte-level", "unigram", "rejection")
    seq = sequence(encode(drafter, b"The quick brown "), temperature=0.7)
    proposal = drafter.propose([seq], [3])[0]
    assert proposal.kind is ProposalKind.SAMPLED_IID
    assert proposal.draft_probs is not None
    for node in range(3):
        logits = own_logits(drafter, seq.token_ids, list(proposal.token_ids[:node]))
        assert torch.allclose(proposal.draft_probs[node], (logits / 0.7).softmax(-1), atol=1e-5)
        assert 0 < int((proposal.draft_probs[node] > 0).sum()) < drafter.context.vocab_size


def test_the_users_limits_hold_in_the_targets_tokens(folders: dict[str, Path]) -> None:
    """Also where nothing that is allowed is shared."""
    drafter = make(folders, "byte-level", "unigram")
    shared = shared_tokens(drafter.translator.target, drafter.translator.draft)
    ordinary = sorted(drafter.translator.target.ordinary)
    some, none = list(shared)[5:9], [token for token in ordinary if token not in shared][:4]
    for number, allowed in enumerate((some, none)):
        seq = sequence(encode(drafter, b"The dog"), 0.8, number)
        seq.params = SamplingParams(temperature=0.8, allowed_token_ids=allowed)
        proposal = drafter.propose([seq], [4])[0]
        assert set(proposal.token_ids) <= (set(some) if allowed is some else shared.keys())


def test_a_batch_is_drafted_as_each_alone_in_one_pass_a_level(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    together, alone = make(folders, "unigram", "byte-level"), make(folders, "unigram", "byte-level")
    sequences: list[Sequence] = [
        sequence(encode(together, text.encode()), 0.7, number) for number, text in enumerate(SENTENCES[:5])
    ]
    passes: list[int] = []
    forward = together.model.forward

    def counted(rows: Any, *arguments: Any) -> Any:
        passes.append(len(rows))
        return forward(rows, *arguments)

    monkeypatch.setattr(together.model, "forward", counted)
    batch = together.propose(sequences, [4] * 5)
    assert passes == [5] * 4
    for seq, proposal in zip(sequences, batch, strict=True):
        assert alone.propose([seq], [4])[0].token_ids == proposal.token_ids


def test_an_unreadable_text_gets_no_guesses(folders: dict[str, Path]) -> None:
    """A byte-level draft puts nothing in front of a text, and the end of nothing says nothing."""
    drafter = make(folders, "byte-level", "byte-level")
    drafter.translator.special.clear()
    drafter.translator.target.special[1] = ""
    seq = sequence([1])
    assert len(drafter.propose([seq], [4])[0]) == 0
    seq.token_ids += encode(drafter, b"The dog")
    assert len(drafter.propose([seq], [4])[0]) == 4
