"""Where answers end: at every token that a model's files or its chat template name."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.text.end_tokens import end_of_turn, end_token_ids
from tests.kit.tokenizer_families import byte_fallback, byte_level

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|im_end|>2")


def tokenizer_with(template: str | None, eos: str | None = None) -> Any:
    tokenizer = copy.deepcopy(byte_level(specials=SPECIALS))
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    return tokenizer


def model_with(config: Any = None, generation: Any = None) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(eos_token_id=config),
        generation_config=SimpleNamespace(eos_token_id=generation),
    )


@pytest.mark.parametrize(
    ("config", "generation", "eos", "template", "expected"),
    [
        (None, None, None, None, set()),
        (0, None, None, CHATML, {0, 3}),  # a file whose end token is 0, and a template that ends with another
        (None, None, None, CHATML, {3}),
        (0, None, "<|end|>", None, {0, 1}),
        (7, [5, 6], "<|end|>", CHATML, {1, 3, 5, 6, 7}),
        ([5, 6], None, None, None, {5, 6}),
    ],
)
def test_all_that_are_named_count(
    config: Any, generation: Any, eos: str | None, template: str | None, expected: set[int]
) -> None:
    tokenizer = tokenizer_with(template, eos)
    assert end_token_ids(tokenizer, model_with(config, generation), len(tokenizer)) == expected


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content | trim }} <|im_end|>2{% endfor %}",
            "<|im_end|>2",
        ),
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", None),  # silent about the end
        ("{% for m in messages %}{{ m.content }} and so on<|im_end|>{% endfor %}", None),
        ("{{ raise_exception('only tools') }}", None),
        ("{{ messages[0].content }}<|im_end|>", None),  # leaves answers out
        (None, None),
    ],
)
def test_the_templates_end_of_a_turn(template: str | None, end: str | None) -> None:
    tokenizer = tokenizer_with(template)
    found = end_of_turn(tokenizer)
    assert (None if found is None else tokenizer.convert_ids_to_tokens(found)) == end


def test_the_end_of_a_turn_in_a_sentencepiece_vocabulary() -> None:
    tokenizer = copy.deepcopy(byte_fallback())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}"
    assert end_of_turn(tokenizer) == tokenizer.eos_token_id


def test_tokens_that_the_model_cannot_generate_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert end_token_ids(tokenizer_with(CHATML), model_with(9), 4) == {3}
    assert "the model cannot generate its end token 9: it has logits for only 4 tokens" in caplog.text
