"""A chat template without an end fails its request, after a number of steps that is the same everywhere."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from slipstream.assets import EMBEDDED_TARGET
from slipstream.errors import RequestError
from slipstream.models import load_tokenizer
from slipstream.text import template_bound
from slipstream.text.prompts import encode_chat

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(EMBEDDED_TARGET)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bound, "MAX_STEPS", 20_000)


@pytest.mark.parametrize(
    "template",
    [
        NESTED,
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) %}{% set b = range(99999) | map('upper') | join %}{% endfor %}",
    ],
)
def test_a_template_without_an_end_is_stopped(tokenizer: Any, template: str) -> None:
    before = sys.gettrace()
    with pytest.raises(RequestError, match=r"chat template of this model was stopped after 25,000 steps"):
        encode_chat(tokenizer, MESSAGES, chat_template=template)
    assert sys.gettrace() is before
    assert encode_chat(tokenizer, MESSAGES), "the next conversation is rendered"


def test_the_text_of_a_template_is_bounded(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bound, "MAX_CHARACTERS", 10_000)
    with pytest.raises(RequestError, match="stopped after 10,000 characters"):
        encode_chat(tokenizer, MESSAGES, chat_template="{% for a in range(99) %}{{ 'x' * 999 }}{% endfor %}")


def test_long_steps_are_bounded_by_the_time_of_the_thread(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(template_bound.time, "thread_time", lambda: float(next(clock)))
    with pytest.raises(RequestError, match="stopped after 5 s"):
        encode_chat(tokenizer, MESSAGES, chat_template="{% for a in range(99) %}{% set b = a %}{% endfor %}")


@pytest.mark.parametrize(
    ("template", "is_refused"),
    [
        ("{{ 9 ** 9 ** 9 }}", True),
        ("{% set n = messages | length %}{% if n**n > 1 %}x{% endif %}", True),
        ("{{ dict(**{'a': 1}) }}{{ dict({}, **{'a': 1}) }}**bold**", False),
    ],
)
def test_one_step_without_an_end_is_refused(tokenizer: Any, template: str, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(RequestError, match="takes powers of numbers"):
            encode_chat(tokenizer, MESSAGES, chat_template=template)
    else:
        assert encode_chat(tokenizer, MESSAGES, chat_template=template)


def test_a_long_conversation_is_no_endless_one(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bound, "MAX_STEPS", 0)
    assert encode_chat(tokenizer, MESSAGES * 500)
