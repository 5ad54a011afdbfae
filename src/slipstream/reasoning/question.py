"""The question behind a step, and the tokens that answer it with a digit."""

from __future__ import annotations

from typing import Any

from slipstream.errors import ConfigError
from slipstream.text.template_bound import bounded

ASKED = (
    "Evaluate the last reasoning step, solely based on its factual and logical correctness and its usefulness for the "
    "problem. Answer with one digit from 0 (wrong) to 9 (right and useful)."
)
PREFIX = "The mark from 0 to 9 is "
_PLACE = "\x1cSTEP\x1c"


def question_text(tokenizer: Any) -> str:
    """The default question: another turn of the chat template, or plain text for a tokenizer without one."""
    plain = f"\n\n({ASKED} {PREFIX}"
    if not getattr(tokenizer, "chat_template", None):
        return plain
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _PLACE},
        {"role": "user", "content": ASKED},
    ]
    try:
        with bounded(tokenizer.chat_template, len(turns)):
            rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template may refuse anything
        return plain
    _, found, after = rendered.partition(_PLACE)
    return after + PREFIX if found else plain


def question_token_ids(tokenizer: Any, question: str | None) -> list[int]:
    """The tokens of `question`, or of the default one. Raises `ConfigError` where it has none."""
    text = question_text(tokenizer) if question is None else question
    token_ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if not token_ids:
        raise ConfigError(f"reasoning question {text!r} has no tokens of this model")
    return token_ids


def digit_token_ids(tokenizer: Any) -> dict[int, int]:
    """Token id to digit, for every single token that says a digit, with or without a space before it.

    Raises `ConfigError` for a tokenizer that has no such token for some digit.
    """
    found: dict[int, int] = {}
    for digit in range(10):
        said = [tokenizer(text, add_special_tokens=False).input_ids for text in (str(digit), f" {digit}")]
        single = {ids[0] for ids in said if len(ids) == 1}
        if not single:
            raise ConfigError(
                f"the target's tokenizer has no single token for the digit {digit}, so it cannot give marks; "
                "use judge 'logprob'"
            )
        found |= dict.fromkeys(single, digit)
    return found
