"""No text has fewer tokens than its length allows: what is refused by length could not have fitted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.assets import EMBEDDED_TARGET
from slipstream.serve.api.tokens import SHRINKS, max_bytes_a_token
from slipstream.text.token_bytes import TokenBytes
from tests.kit.tokenizer_families import SENTENCES, byte_fallback, byte_level, unigram

DECOMPOSED = "\u1100\u1161\u11a8" * 9  # Hangul, which takes 9 bytes a syllable as letters and 3 as a whole


def composing() -> Any:
    """Byte-level, after composing characters as Qwen's does."""
    backend = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
    backend.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=["\uac01" * 4])


def texts(tokenizer: Any) -> list[str]:
    """What people write, noise, and the longest tokens over and over."""
    draw = random.Random(7)
    words = sorted(tokenizer.get_vocab(), key=len)[-5:]
    characters = "aé日👍 \n\t\0~" + DECOMPOSED
    noise = ["".join(draw.choices(characters, k=draw.randrange(1, 80))) for _ in range(100)]
    decoded = [tokenizer.decode([tokenizer.convert_tokens_to_ids(word)] * 9) for word in words]
    return [*SENTENCES, *noise, *decoded, *(word * 9 for word in words), DECOMPOSED, " " * 99]


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "unigram", "composing", "pair"])
def test_no_token_stands_for_more(family: str) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "byte_level": byte_level,
        "byte_fallback": byte_fallback,
        "unigram": unigram,
        "composing": composing,
        "pair": lambda: AutoTokenizer.from_pretrained(EMBEDDED_TARGET),
    }
    tokenizer = makers[family]()
    longest = max_bytes_a_token(tokenizer, TokenBytes(tokenizer, family))
    assert longest is not None
    for text in texts(tokenizer):
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
        assert len(text.encode()) <= longest * len(token_ids), text


def test_the_bound_is_the_longest_token_where_text_is_read_as_it_is() -> None:
    tokenizer = byte_level()
    said = TokenBytes(tokenizer, "it")
    longest = max(map(len, [*said.ordinary.values(), *said.special.values()]))
    assert max_bytes_a_token(tokenizer, said) == longest
    assert max_bytes_a_token(composing(), TokenBytes(composing(), "it")) >= SHRINKS * longest


def test_there_is_no_bound_where_a_token_stands_for_anything_unknown() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert len(tokenizer("x" * 1000).input_ids) == 1
    assert max_bytes_a_token(tokenizer, None) is None
