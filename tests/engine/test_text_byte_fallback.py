"""Text of tokenizers that spell rare characters as bytes and spaces as ▁, as Llama 2's does."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from slipstream.text.stream import TextStream

PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz.", "▁a", "▁ab", "he", "▁he"]
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
FIRST_BYTE = 3
REPLACEMENT = "\ufffd"


def make_tokenizer() -> Any:
    vocab = {word: number for number, word in enumerate(WORDS)}
    merges = [("▁", "a"), ("▁a", "b"), ("h", "e"), ("▁", "he")]
    backend = Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return SimpleNamespace(backend_tokenizer=backend)


TOKENIZER = make_tokenizer()


def encode(text: str) -> list[int]:
    token_ids: list[int] = TOKENIZER.backend_tokenizer.encode(text).ids
    return token_ids


def decode(token_ids: list[int]) -> str:
    text: str = TOKENIZER.backend_tokenizer.decode(token_ids)
    return text


def bytes_of(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def stream_text(prompt: list[int], token_ids: list[int], stop: tuple[str, ...] = ()) -> str:
    """The answer's text; the pieces that are shown on the way are checked to be just that."""
    stream = TextStream(TOKENIZER, prompt, stop)
    shown = ""
    for number, token_id in enumerate(token_ids):
        found = stream.push(token_id, from_draft=number % 2 == 0)
        shown += "".join(piece.text for piece in stream.take(finished=found is not None))
        assert stream.text.startswith(shown)
        if found is not None:
            assert shown == stream.text
            return shown
    stream.flush()
    shown += "".join(piece.text for piece in stream.take(finished=True))
    assert shown == stream.text
    return shown


def test_the_tokenizer_is_what_it_poses_as() -> None:
    assert encode("he 日") == [WORDS.index("▁he"), WORDS.index("▁"), *bytes_of("日")]
    assert decode(encode("he ab 日👍")) == "he ab 日👍"
    assert decode(bytes_of("日")[:2]) == REPLACEMENT * 2


def test_a_lone_space_is_no_special_token_that_stops() -> None:
    space = WORDS.index("▁")
    assert decode([space]) == ""
    answer = [space, *encode("he"), space, *encode("ab")]
    assert stream_text(encode("a"), answer, stop=("▁",)) == stream_text(encode("a"), answer)


PROMPTS = ["", "he", "he ", "日", "日本語日本語", "ab 👍", "👍👍👍👍", "👩‍👩‍👧", "é", "a é" * 6]


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.sampled_from(PROMPTS),
    text=st.text(st.one_of(st.sampled_from("ahe b."), st.characters(codec="utf-8")), max_size=12),
)
def test_valid_text_comes_whole_after_any_prompt(prompt: str, text: str) -> None:
    answer = stream_text(encode(prompt), encode(text))
    expected = decode([*encode(prompt), *encode(text)])[len(decode(encode(prompt))) :]
    assert answer == expected
    assert answer.lstrip(" ") == text.lstrip(" ")


@pytest.mark.parametrize("answer", ["he", "日", "👍 he", ". ab", "é"])
@pytest.mark.parametrize("prompt", ["日本", "ab 👍", "👍" * 9, "é" * 20, "日本語" * 7])
@pytest.mark.parametrize("cut", range(4))
def test_the_prompts_bytes_never_show_in_the_answer(prompt: str, answer: str, cut: int) -> None:
    """Even when the prompt was cut inside its last character, which the answer does not complete."""
    prompt_ids = encode(prompt)
    text = stream_text(prompt_ids[: len(prompt_ids) - cut], encode(answer))
    assert text.replace(REPLACEMENT, "").strip() == answer
    if cut == 0:
        assert text == " " + answer


@pytest.mark.parametrize("prompt", ["he", "日本", "👍"])
def test_a_character_that_the_prompt_began_harms_nothing(prompt: str) -> None:
    prompt_ids = [*encode(prompt), *bytes_of("👍")[:2]]
    text = stream_text(prompt_ids, [*bytes_of("👍")[2:], *encode("he ab")])
    assert text.endswith(" he ab")
    assert not set(text) - set(REPLACEMENT + " heab👍")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_no_sequence_of_tokens_is_too_odd(prompt: str) -> None:
    """Random bytes and words: nothing raises, and every word and space of the answer is there, in order."""
    rng = random.Random(prompt)
    prompt_ids = encode(prompt)
    for _ in range(120):
        token_ids: list[int] = []
        while len(token_ids) < rng.randint(1, 14):
            kind = rng.random()
            if kind < 0.4:
                token_ids.append(FIRST_BYTE + rng.randrange(128, 256))
            elif kind < 0.8:
                token_ids.append(rng.randrange(FIRST_BYTE + 256, len(WORDS)))
            else:
                token_ids += bytes_of(rng.choice("日👍é"))
        text = stream_text(prompt_ids, token_ids)
        expected = decode([*encode("he"), *token_ids])[len("he") :]
        if prompt == "":  # nothing precedes it: the first space of a text is the tokenizer's own
            expected = expected.removeprefix(" ") if WORDS[token_ids[0]].startswith("▁") else expected
        assert ascii_of(text) == ascii_of(expected)


def ascii_of(text: str) -> str:
    return re.sub("[^\0-\x7f]", "", text)


def test_any_token_at_all_raises_nothing() -> None:
    rng = random.Random(0)
    for _ in range(500):
        prompt = [rng.randrange(len(WORDS)) for _ in range(rng.randint(0, 14))]
        stream_text(prompt, [rng.randrange(len(WORDS)) for _ in range(rng.randint(1, 14))])


def test_spaces_survive_bytes_that_no_character_begins_with() -> None:
    """The emoji was shown before the byte behind it made the decoder take it back."""
    token_ids = [*encode("👍"), FIRST_BYTE + 255, *encode("a he ab")]
    assert stream_text(encode("he"), token_ids) == " 👍" + REPLACEMENT + " a he ab"


def test_stop_strings_of_several_bytes() -> None:
    token_ids = encode("he 日👍 ab")
    assert stream_text(encode("a"), token_ids, stop=("👍",)) == " he 日"
    assert stream_text(encode("日"), token_ids, stop=("日👍 a",)) == " he "
