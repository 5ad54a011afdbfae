"""A draft whose token ids mean something else is refused, and the message says what."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from slipstream.errors import VocabularyMismatchError
from slipstream.text.vocabulary import check_same_vocabulary

WORDS = ["<s>", "</s>", "<unk>", "<pad>", "alpha", "beta", "gamma", "delta"]
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def tokenizer(words: list[str] = WORDS, **roles: str) -> Any:
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **{**ROLES, **roles})


def test_same_vocabulary_passes() -> None:
    check_same_vocabulary(tokenizer(), tokenizer(), "a draft")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (WORDS[:-1], ["(7 tokens, the target 8)", "'delta' is absent there and id 7 in the target"]),
        (WORDS[:-2], ["(6 tokens, the target 8)", "'gamma' is absent there and id 6 in the target"]),
        ([*WORDS, "epsilon"], ["(9 tokens, the target 8)", "'epsilon' is id 8 there and absent"]),
        (
            [*WORDS[:5], "delta", "gamma", "beta"],
            ["(8 tokens, the target 8)", "'beta' is id 7 there and id 5 in the target"],
        ),
        ([*WORDS[:4], "omega", *WORDS[5:]], ["(8 tokens, the target 8)", "is absent there and id 4"]),
    ],
    ids=["smaller", "smaller-by-two", "larger", "swapped", "another-word"],
)
def test_first_difference_is_named(words: list[str], says: list[str]) -> None:
    with pytest.raises(VocabularyMismatchError) as caught:
        check_same_vocabulary(tokenizer(), tokenizer(words), "some/draft")
    message = str(caught.value)
    assert "some/draft" in message
    assert "\n" not in message
    for part in [*says, "tli", "slem"]:
        assert part in message


@pytest.mark.parametrize("role", list(ROLES))
def test_special_tokens_may_serve_another_purpose(role: str) -> None:
    """As the end token of a base model does that drafts for a tuned one; all ids mean the same."""
    check_same_vocabulary(tokenizer(), tokenizer(**{role: "alpha"}), "some/draft")
