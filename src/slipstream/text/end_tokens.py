"""The tokens that end an answer: of the model's files and of its chat template, all together."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from slipstream.errors import RequestError
from slipstream.text.prompts import encode_chat

logger = logging.getLogger(__name__)

_ANSWER = "Forty-two, as said before"
"""Text that is looked for in a rendered conversation; templates trim an answer but leave its inside as it is."""


def end_token_ids(tokenizer: Any, model: Any, vocab_size: int) -> frozenset[int]:
    """The end tokens of the generation config, the model config, the tokenizer, and the chat template's end of an
    assistant's turn: an answer ends at any of them, since files often name one and mean several.

    Tokens beyond `vocab_size`, the width of the logits, are dropped with a warning: the model cannot generate them.
    """
    named = {
        token
        for source in (getattr(model, "generation_config", None), model.config, tokenizer)
        for token in _as_ids(getattr(source, "eos_token_id", None))
    }
    turn_end = end_of_turn(tokenizer)
    if turn_end is not None:
        named.add(turn_end)
    possible = frozenset(token for token in named if 0 <= token < vocab_size)
    if possible != named:
        logger.warning(
            "the model cannot generate its end token %s: it has logits for only %d tokens%s",
            ", ".join(map(str, sorted(named - possible))),
            vocab_size,
            "" if possible else "; answers end at stop strings, stop_token_ids or max_tokens",
        )
    return possible


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that the chat template puts behind an assistant's answer; None where there is none, as in a template
    that is silent about it or refuses the conversation."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    rendered: list[str] = []
    messages = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        encode_chat(tokenizer, messages, check_text=rendered.append, add_generation_prompt=False)
    except RequestError:
        return None
    _, found, behind = rendered[0].rpartition(_ANSWER)
    behind = behind.lstrip()
    added = {
        token.content: number
        for number, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
    }
    fitting = [content for content in added if content.strip() and behind.startswith(content)]
    return added[max(fitting, key=len)] if found and fitting else None


def _as_ids(named: Any) -> Iterable[int]:
    """An `eos_token_id` as configurations have it: one, several or none."""
    if named is None:
        return ()
    return (named,) if isinstance(named, int) else named
