"""Streaming never shows what it would have to take back: half characters, the beginning of a stop string."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.assets import EMBEDDED_TARGET
from slipstream.models import load_tokenizer
from slipstream.text.stream import TextStream


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(EMBEDDED_TARGET)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30), seed=st.integers(0, 1000))
def test_streamed_pieces_are_the_text(text: str, seed: int) -> None:
    tokenizer = load_tokenizer_once()
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    rng = random.Random(seed)
    stream = TextStream(tokenizer, tokenizer("before: ").input_ids)
    shown = ""
    for token_id in token_ids:
        stream.push(token_id, from_draft=rng.random() < 0.5)
        if rng.random() < 0.6:
            shown += "".join(piece.text for piece in stream.take(finished=False))
            assert text.startswith(shown), "nothing shown is ever wrong"
            assert "\ufffd" not in shown or "\ufffd" in text
    stream.flush()
    shown += "".join(piece.text for piece in stream.take(finished=True))
    assert shown == stream.text == text


def load_tokenizer_once(cache: list[Any] = []) -> Any:  # noqa: B006  (shared on purpose: loading is slow)
    if not cache:
        cache.append(load_tokenizer(EMBEDDED_TARGET))
    return cache[0]


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "👩‍👩‍👧 family", "mixed ½ ✓ end"])
def test_characters_of_several_tokens_appear_whole(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(token_ids) > len(text.split())
    stream = TextStream(tokenizer, [])
    shown = ""
    for token_id in token_ids:
        stream.push(token_id, from_draft=False)
        for piece in stream.take(finished=False):
            shown += piece.text
            assert "\ufffd" not in shown
    assert shown == text


def test_bytes_that_never_become_a_character_are_replaced_at_the_end(tokenizer: Any) -> None:
    token_ids = tokenizer("a日", add_special_tokens=False).input_ids[:-1]
    stream = TextStream(tokenizer, [])
    for token_id in token_ids:
        stream.push(token_id, from_draft=False)
    assert "".join(piece.text for piece in stream.take(finished=False)) == "a"
    stream.flush()
    assert "\ufffd" in stream.take(finished=True)[0].text


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("abc ", min_size=1, max_size=40),
    stops=st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_strings_against_a_search_of_the_whole_text(text: str, stops: list[str], include: bool) -> None:
    tokenizer = load_tokenizer_once()
    stream = TextStream(tokenizer, [], stops, include)
    shown = ""
    found = None
    pushed: list[int] = []
    for token_id in tokenizer(text, add_special_tokens=False).input_ids:
        pushed.append(token_id)
        found = stream.push(token_id, from_draft=False)
        shown += "".join(piece.text for piece in stream.take(finished=found is not None))
        if found is not None:
            break
    decoded = tokenizer.decode(pushed)
    if found is None:
        assert not any(stop in text for stop in stops)
        assert text.startswith(shown)
        assert len(text) - len(shown) < max(map(len, stops)), "held back no more than a beginning"
    else:
        at = min(decoded.find(stop) for stop in stops if stop in decoded)
        assert decoded.startswith(found, at)
        assert shown == stream.text == decoded[: at + (len(found) if include else 0)]


def test_pieces_know_who_wrote_them(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, [], stop=["zzz"])
    for token_id, from_draft in zip(tokenizer("one two three").input_ids, [True, False, True], strict=False):
        stream.push(token_id, from_draft)
    pieces = stream.take(finished=True)
    assert "".join(piece.text for piece in pieces).startswith("one")
    assert [piece.from_draft for piece in pieces][:2] == [True, False]


def test_special_tokens_are_shown_only_when_asked(tokenizer: Any) -> None:
    for skip, expected in ((True, "hi"), (False, "hi<|end|>")):
        stream = TextStream(tokenizer, [], skip_special_tokens=skip)
        for token_id in [*tokenizer("hi").input_ids, tokenizer.eos_token_id]:
            stream.push(token_id, from_draft=False)
        stream.flush()
        assert stream.text == expected
