"""Tokenizers in GGUF files: the same tokens as llama.cpp's, and those of the tokenizer that they were made from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from slipstream.errors import ModelError
from slipstream.models.files.gguf_tokenizer import WORDS, read_tokenizer
from tests.kit.tokenizer_families import byte_fallback, byte_level

TEXT = "Show me tar.  1234 don't\n\té 日本 👍 <|end|><|user|>x"


def fields_of(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes of a tokenizer."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = sorted(described["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in described["added_tokens"]}
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token, _ in vocabulary],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in described["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.pre": "gpt-2",
    }
    return fields | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def test_prompts_begin_and_end_as_the_file_says() -> None:
    own = byte_level()(TEXT).input_ids
    begun = read_tokenizer(
        fields_of(byte_level(), bos_token_id=2, add_bos_token=True, add_eos_token=True), "x"
    )
    assert begun(TEXT).input_ids == [2, *own, 1]
    assert begun("a", "b").input_ids == [2, *begun("a").input_ids[1:-1], 1, 2, *begun("b").input_ids[1:-1], 1]
    assert begun(TEXT, add_special_tokens=False).input_ids == own
    llama = read_tokenizer(fields_of(byte_level(), bos_token_id=2, pre="llama-bpe"), "x")
    assert llama("a").input_ids[0] == 2  # Llama 3's begin, unless a file says otherwise


def sentence_piece_fields(**changes: Any) -> dict[str, Any]:
    """The keys of a SentencePiece vocabulary: tokens that are never cut, and scores in place of merges."""
    merges = json.loads(byte_fallback().backend_tokenizer.to_str())["model"]["merges"]
    scores = {"".join(merge): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
    whole = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|user|>": 3, "<|end|>": 3, "  ": 4, "    ": 4}
    known = byte_fallback().get_vocab()
    tokens = [*sorted(known, key=known.__getitem__), *(token for token in whole if token not in known)]
    keys = {
        **{"model": "llama", "pre": "default", "tokens": tokens},
        **{"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>"), "unknown_token_id": 0},
        "token_type": [whole.get(token, 6 if token.startswith("<0x") else 1) for token in tokens],
        "scores": [scores.get(token, -1e5 - index) for index, token in enumerate(tokens)],
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (keys | changes).items()}


def test_a_sentencepiece_vocabulary_is_restored() -> None:
    tokenizer = byte_fallback()
    text = "The quick brown fox 👍 naïve\n"
    restored = read_tokenizer(sentence_piece_fields(), "x")
    own = tokenizer(text, add_special_tokens=False).input_ids
    assert restored(text, add_special_tokens=False).input_ids == own
    assert restored(text).input_ids == [restored.bos_token_id, *own]
    assert restored.decode(restored(text).input_ids, skip_special_tokens=True) == text
    merges = [
        " ".join(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    ]
    flat = {"scores": [0.0] * len(restored), "merges": merges}  # scores that say nothing, and merges that do
    assert read_tokenizer(sentence_piece_fields(**flat), "x")(text).input_ids[1:] == own


def test_qwen_35_cuts_words_as_transformers_does() -> None:
    assert WORDS["qwen35"][0]["pattern"]["Regex"] == PRETOKENIZE_REGEX


def test_gemma_4s_tokenizer_is_restored() -> None:
    """It puts no space in front of a text, and says what is merged; what all tokens score is the same."""
    backend = Tokenizer.from_str(byte_fallback().backend_tokenizer.to_str())
    backend.normalizer = normalizers.Replace(" ", "▁")
    merges = [" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    fields = sentence_piece_fields(model="gemma4", merges=merges)
    fields["tokenizer.ggml.scores"] = [-1000.0] * len(fields["tokenizer.ggml.tokens"])
    del fields["tokenizer.ggml.pre"]
    restored = read_tokenizer(fields, "x")
    for text in ("The quick brown fox 👍 naïve\n", "    return a + b\n\n\nprint(add(2, 3))\n", " the"):
        own = backend.encode(text, add_special_tokens=False).ids
        if "  " not in text:  # tokens of spaces alone are taken first
            assert restored(text).input_ids == [restored.bos_token_id, *own]
        assert restored.decode(restored(text).input_ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("text", "with_prefix", "without"),
    [  # by llama.cpp's own tokenizer of the same vocabulary
        ("the", ["▁the"], ["t", "he"]),
        (" the", ["▁", "▁the"], ["▁the"]),
        ("<s>the", ["<s>", "▁the"], ["<s>", "t", "he"]),
        ("<s> the", ["<s>", "▁", "▁the"], ["<s>", "▁the"]),
        ("the<|end|>a", ["▁the", "<|end|>", "▁a"], ["t", "he", "<|end|>", "a"]),
        ("<unk>a", ["<unk>", "▁a"], ["<unk>", "a"]),
        ("a  the", ["▁a", "  ", "▁the"], ["a", "  ", "t", "he"]),
        ("a     the", ["▁a", "    ", "▁", "▁the"], ["a", "    ", "▁the"]),
        ("👍", ["▁", "<0xF0>", "<0x9F>", "<0x91>", "<0x8D>"], ["<0xF0>", "<0x9F>", "<0x91>", "<0x8D>"]),
    ],
)
def test_spaces_of_a_sentencepiece_vocabulary_are_llama_cpps(
    text: str, with_prefix: list[str], without: list[str]
) -> None:
    for prefix, expected in ((True, with_prefix), (False, without)):
        tokenizer = read_tokenizer(sentence_piece_fields(add_space_prefix=prefix), "x")
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.convert_ids_to_tokens(token_ids) == expected
        assert prefix or tokenizer.decode(token_ids) == text


def test_phi_3s_tokens_take_the_white_space_behind_them() -> None:
    tokenizer = read_tokenizer(sentence_piece_fields() | {"general.name": "Phi 3 Mini"}, "x")
    named = read_tokenizer(sentence_piece_fields() | {"general.name": "Phi-3-mini"}, "x")
    assert named("<|user|> \nthe").input_ids == named("<|user|>the").input_ids
    assert tokenizer("<|user|> \nthe").input_ids != tokenizer("<|user|>the").input_ids


def test_tokenizers_that_cannot_be_restored_are_refused() -> None:
    for changes, what in (
        ({"pre": "poro-chat"}, "'gpt2', 'poro-chat', which cannot be restored here"),
        ({"model": "rwkv"}, "of kind 'rwkv'"),
        ({"tokens": []}, "holds no tokenizer"),
        ({"merges": ["no such"]}, "a damaged tokenizer"),
        ({"token_type": [1]}, "without its merges"),
        ({"tokens": ["a", "b", "a"]}, "the token 'a' more than once"),
        ({"model": "llama", "token_type": [1]}, "as their kinds"),
        ({"model": "llama", "merges": None}, "without a score for each"),
        ({"model": "llama", "merges": None, "scores": [float("nan")] * 600}, "without a score for each"),
    ):
        with pytest.raises(ModelError, match=what) as caught:
            read_tokenizer(fields_of(byte_level(), **changes), "x")
        assert "\n" not in str(caught.value)
