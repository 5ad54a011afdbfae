"""A draft of another vocabulary writes text; what the target's tokenizer reads in it is proposed, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_draft_model import seen, sequence

from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.model.slem import SlemDrafter, SlemOptions
from slipstream.draft.proposers.autoregressive import Feed
from slipstream.errors import ConfigError
from slipstream.testing.stub_drafters import draft_context
from slipstream.text.retokenize import Encoder
from tests.kit.tokenizer_families import FAMILIES, PAIRS, SENTENCES, draft_folders

pytestmark = pytest.mark.usefixtures("drafts_loaded_once")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return draft_folders(tmp_path_factory.mktemp("drafts"))


def make(
    folders: dict[str, Path], ours: str, theirs: str, verifier: str = "coupled", **options: Any
) -> SlemDrafter:
    tokenizer = FAMILIES[ours]()
    context = draft_context(len(tokenizer), 512, verifier, tokenizer=tokenizer)
    drafter = SlemDrafter(SlemOptions(model=str(folders[theirs]), **options), context)
    drafter.allocate(4096)
    return drafter


def encode(drafter: SlemDrafter, text: str) -> list[int]:
    translator = drafter.inner.translator
    return Encoder(drafter.context.tokenizer, translator.target).encode(text.encode())[0]


class Ghost:
    """Takes the writer's place: goes on with a known text, however far it has come."""

    def __init__(self, drafter: SlemDrafter, text: str, ending: tuple[int, ...] = ()) -> None:
        self.drafter, self.text, self.ending = drafter, text, ending
        self.encoder = Encoder(drafter.inner.tokenizer, drafter.inner.translator.draft)

    def propose(self, sequences: list[Sequence], budgets: list[int]) -> list[Proposal]:
        """The next tokens of the text, and behind its last one the ending."""
        return [self._go_on(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _go_on(self, sequence: Sequence, budget: int) -> Proposal:
        ordinary = self.drafter.inner.translator.draft.ordinary
        written = b"".join(ordinary.get(token, b"") for token in sequence.token_ids)
        assert self.text.encode().startswith(written)
        rest, _ = self.encoder.encode(self.text.encode()[len(written) :])
        return Proposal.chain([*rest, *self.ending][:budget])


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("sentence", SENTENCES[:6])
def test_a_draft_that_knows_the_text_is_nearly_always_right(
    folders: dict[str, Path], ours: str, theirs: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(folders, ours, theirs)
    monkeypatch.setattr(drafter.inner, "propose", Ghost(drafter, sentence).propose)
    text = encode(drafter, sentence)
    seq = sequence(text[:1])
    num_steps = num_wrong = 0
    while len(seq.token_ids) < len(text):
        guesses = list(drafter.propose([seq], [10])[0].token_ids)
        rest = text[len(seq.token_ids) :]
        accepted = next(
            (i for i, (a, b) in enumerate(zip(guesses, rest, strict=False)) if a != b), len(guesses)
        )
        num_wrong += accepted < len(guesses) and accepted < len(rest)
        seq.token_ids += rest[: accepted + 1]
        drafter.observe([seen(seq, accepted)])
        num_steps += 1
    assert num_wrong <= 2, "of text that is known, only words that read otherwise in their sentence may fail"
    assert num_steps < 0.67 * len(text)


def test_a_word_that_may_go_on_is_not_proposed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(folders, "byte-level", "byte-fallback", num_speculative_tokens=8)
    monkeypatch.setattr(drafter.inner, "propose", Ghost(drafter, "and the do").propose)
    proposal = drafter.propose([sequence(encode(drafter, "and"))], [8])[0]
    assert drafter.context.tokenizer.convert_ids_to_tokens(list(proposal.token_ids)) == ["Ġthe"]


def test_the_end_of_a_text_ends_its_last_word(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(folders, "byte-level", "byte-fallback", num_speculative_tokens=8)
    eos = drafter.inner.tokenizer.eos_token_id
    monkeypatch.setattr(drafter.inner, "propose", Ghost(drafter, "and the do", (eos, eos)).propose)
    for budget in (8, 2):
        proposal = drafter.propose([sequence(encode(drafter, "and"))], [budget])[0]
        expected = [*encode(drafter, " the do"), drafter.context.tokenizer.eos_token_id]
        assert list(proposal.token_ids) == expected[:budget]


def test_a_text_that_reads_otherwise_gets_no_guesses(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(folders, "byte-level", "unigram", num_speculative_tokens=20)
    monkeypatch.setattr(drafter.inner, "propose", Ghost(drafter, "over the lazy dog, and").propose)
    odd = [*encode(drafter, "over t"), *encode(drafter, "he")]
    assert odd != encode(drafter, "over the")
    assert len(drafter.propose([sequence(odd)], [8])[0]) == 0
    assert len(drafter.propose([sequence(encode(drafter, "over the"), number=1)], [8])[0]) > 0


def test_what_is_written_behind_kept_entries_is_what_is_written_behind_none(folders: dict[str, Path]) -> None:
    drafter = make(folders, "byte-level", "unigram")
    seq = sequence(encode(drafter, SENTENCES[0]))
    for _ in range(12):
        proposal = drafter.propose([seq], [8])[0]
        fresh = make(folders, "byte-level", "unigram").propose([seq], [8])[0]
        assert fresh.token_ids == proposal.token_ids
        seq.token_ids += [*proposal.token_ids, encode(drafter, "x")[0]]
        drafter.observe([seen(seq, len(proposal))])
        assert drafter.integrity() == []
    drafter.release(seq)
    assert drafter.num_held() == 0


def test_what_was_written_and_stands_is_not_fed_again(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(folders, "byte-level", "unigram")
    writer = drafter.inner
    written, _ = Encoder(writer.tokenizer, writer.translator.draft).encode(SENTENCES[0].encode())
    written.insert(0, writer.tokenizer.bos_token_id)

    def forward(feeds: list[Feed]) -> torch.Tensor:
        logits = torch.zeros(len(feeds), writer.model.vocab_size)
        for row, feed in enumerate(feeds):
            at = len(feed.tree.sequence.token_ids) + (feed.nodes[0].depth if feed.nodes else 0)
            logits[row, written[min(at, len(written) - 1)]] = 1
        return logits

    monkeypatch.setattr(writer, "_forward", forward)
    monkeypatch.setattr(writer, "draws_chains", lambda: False)  # level by level, with these logits
    text = encode(drafter, SENTENCES[0])
    seq = sequence(text[:3])
    most_kept = 0
    while len(seq.token_ids) < len(text) - 8:
        num_guesses = len(drafter.propose([seq], [8])[0])
        before = writer.cache.accounting.num_valid(seq.id)
        seq.token_ids += text[len(seq.token_ids) :][: num_guesses + 1]
        drafter.observe([seen(seq, num_guesses)])
        most_kept = max(most_kept, writer.cache.accounting.num_valid(seq.id) - before)
    assert most_kept >= 2


def test_a_batch_is_drafted_as_each_alone(folders: dict[str, Path]) -> None:
    together, alone = (make(folders, "byte-fallback", "byte-level", draft_temperature=0.8) for _ in range(2))
    sequences = [sequence(encode(together, text), 0.7, number) for number, text in enumerate(SENTENCES[:5])]
    batch = together.propose(sequences, [3, 8, 0, 1, 8])
    assert torch.tensor([len(proposal) for proposal in batch]).sum() > 2
    for seq, budget, proposal in zip(sequences, [3, 8, 0, 1, 8], batch, strict=True):
        assert alone.propose([seq], [budget])[0].token_ids == proposal.token_ids


def test_bad_options_are_refused() -> None:
    for options in ({"num_speculative_tokens": 0}, {"draft_temperature": -1.0}, {"dtype": "float8"}):
        with pytest.raises(ConfigError, match="slem"):
            SlemOptions(model="x", **options)
