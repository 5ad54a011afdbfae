"""Tokens of different families are compared by what they say, and text keeps its bytes from one to the other."""

from __future__ import annotations

import random
from functools import cache
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from slipstream.errors import VocabularyMismatchError
from slipstream.text.retokenize import Encoder, Translator, first_to_encode
from slipstream.text.token_bytes import TokenBytes, match_special, shared_tokens
from tests.kit.tokenizer_families import FAMILIES, SENTENCES, byte_level

PAIRS = list(permutations(FAMILIES, 2))


def tokenizer(family: str) -> Any:
    return FAMILIES[family]()


@cache
def token_bytes(family: str) -> TokenBytes:
    return TokenBytes(tokenizer(family), family)


@cache
def encoder(family: str) -> Encoder:
    return Encoder(tokenizer(family), token_bytes(family))


@cache
def translator(ours: str, theirs: str) -> Translator:
    return Translator(tokenizer(ours), tokenizer(theirs), ours, theirs)


def said(family: str, token_ids: list[int]) -> bytes:
    return b"".join(token_bytes(family).ordinary.get(token, b"") for token in token_ids)


TEXT = st.text(st.one_of(st.sampled_from("the dog 12\n日é👍<"), st.characters(codec="utf-8")), max_size=40)
"""Words that the vocabularies know, spaces, and any character at all."""


@settings(max_examples=100)
@given(text=TEXT)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_text_comes_back(family: str, text: str) -> None:
    token_ids, shares = encoder(family).encode(text.encode())
    assert said(family, token_ids) == text.encode()
    assert b"".join(shares) == text.encode()


@settings(max_examples=100)
@given(data=st.binary(max_size=24))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_bytes_come_back(family: str, data: bytes) -> None:
    """A sampler may draw bytes that no character has, and a text may end inside of one."""
    token_ids, shares = encoder(family).encode(data)
    assert said(family, token_ids) == data
    assert b"".join(shares) == data


@settings(max_examples=60)
@given(text=TEXT, seed=st.integers(0, 99))
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_growing_text_keeps_its_bytes(ours: str, theirs: str, text: str, seed: int) -> None:
    """Also where a step ends inside a character; and `update` tells how much stayed."""
    token_ids, _ = encoder(ours).encode(text.encode())
    rng = random.Random(seed)
    translation = translator(ours, theirs).begin()
    num_read = 0
    while num_read < len(token_ids):
        num_read = min(num_read + rng.randint(1, 4), len(token_ids))
        before = list(translation.token_ids)
        kept = translation.update(token_ids[:num_read])
        assert translation.token_ids[:kept] == before[:kept]
        assert said(theirs, translation.token_ids) == said(ours, token_ids[:num_read])
        assert translation.update(token_ids[:num_read]) == len(translation.token_ids)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_what_comes_bit_by_bit_reads_as_if_it_came_at_once(ours: str, theirs: str) -> None:
    for sentence in SENTENCES[:6]:
        token_ids, _ = encoder(ours).encode(sentence.encode())
        slowly, at_once = translator(ours, theirs).begin(), translator(ours, theirs).begin()
        for end in range(1, len(token_ids) + 1):
            slowly.update(token_ids[:end])
        at_once.update(token_ids)
        assert slowly.token_ids == at_once.token_ids


def test_only_the_last_words_are_read_again() -> None:
    ours = "byte-level"
    token_ids, _ = encoder(ours).encode((SENTENCES[0] * 20).encode())
    translation = translator(ours, "unigram").begin()
    translation.update(token_ids[:-1])
    assert translation.update(token_ids) > len(translation.token_ids) - 30


def test_shared_tokens_say_the_same() -> None:
    for ours, theirs in PAIRS:
        pairs = shared_tokens(token_bytes(ours), token_bytes(theirs))
        assert len(set(pairs.values())) == len(pairs)
        special = match_special(token_bytes(ours), token_bytes(theirs))
        for our, their in pairs.items():
            if our in token_bytes(ours).special:
                assert special[our] == their
            else:
                assert token_bytes(ours).ordinary[our] == token_bytes(theirs).ordinary[their]
        everything = set(token_bytes(ours).ordinary.values()) & set(token_bytes(theirs).ordinary.values())
        assert len(pairs) - len(special) == len(everything)


def test_spaces_and_bytes_are_recognised_in_every_spelling() -> None:
    level, fallback = tokenizer("byte-level"), tokenizer("byte-fallback")
    pairs = shared_tokens(token_bytes("byte-level"), token_bytes("byte-fallback"))
    for our, their in [("Ġ", "▁"), ("Ġthe", "▁the"), ("ÿ", "<0xFF>"), ("a", "a"), ("Ċ", "\n")]:
        assert pairs[level.convert_tokens_to_ids(our)] == fallback.convert_tokens_to_ids(their)


def test_special_tokens_meet_by_look_or_role_and_never_meet_text() -> None:
    ours, theirs = token_bytes("byte-level"), token_bytes("byte-fallback")
    assert match_special(ours, theirs) == {1: 2}  # <|end|> and </s> end a text
    same = TokenBytes(byte_level(specials=("<|end|>", "<|pad|>", "</s>")), "same")
    assert match_special(ours, same) == {0: 1, 1: 0}
    for text in ("</s>", "<s> <unk>", "<|end|>"):
        for family in FAMILIES:
            token_ids, _ = encoder(family).encode(text.encode())
            assert not set(token_ids) & token_bytes(family).special.keys()
            assert said(family, token_ids) == text.encode()


def test_special_tokens_in_a_text_stay_special_or_are_spelled_out() -> None:
    level = tokenizer("byte-level")
    translation = translator("byte-level", "byte-fallback").begin()
    token_ids = level("<|user|>the dog<|end|>the")["input_ids"]
    translation.update(token_ids)
    fallback = tokenizer("byte-fallback")
    assert translation.token_ids[0] == fallback.bos_token_id
    end = translation.token_ids.index(fallback.eos_token_id)
    assert said("byte-fallback", translation.token_ids[:end]) == b"<|user|>the dog"
    assert said("byte-fallback", translation.token_ids[end:]) == b"the"


def test_a_text_begins_once() -> None:
    fallback = tokenizer("byte-fallback")
    both = translator("byte-fallback", "unigram").begin()
    both.update([fallback.bos_token_id, fallback.convert_tokens_to_ids("▁the")])
    unigram = tokenizer("unigram")
    assert both.token_ids == [unigram.bos_token_id, unigram.convert_tokens_to_ids("▁the")]


def test_encoding_begins_at_a_word_far_enough_back_or_a_special_token() -> None:
    assert first_to_encode([]) == 0
    assert first_to_encode([b"a", None]) == 2
    assert first_to_encode([None, b"a", b"b"]) == 1
    assert first_to_encode([b" x", b" y", b"a", b"b", b"c"]) == 1
    assert first_to_encode([b"x"] * 40) == 16
    assert first_to_encode([b"x"] * 10 + [b"\xe6\x97\xa5"] + [b""] * 30) == 41


def test_tokens_that_spell_no_bytes_are_refused() -> None:
    backend = Tokenizer(WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(VocabularyMismatchError, match="'bert' do not represent bytes"):
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend), "bert")
