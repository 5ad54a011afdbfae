"""What a request says in words, as token ids: prompts, conversations, bad words, end tokens."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.errors import RequestError
from slipstream.sampling.characters import check_characters

logger = logging.getLogger(__name__)

Prompt = str | Seq[int]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """What a request says in words, as the engine's step needs it."""

    text: str | None
    token_ids: list[int]
    bad_words: list[list[int]]


def encode_prompt(tokenizer: Any, prompt: Prompt, vocab_size: int, max_model_len: int) -> list[int]:
    """Token ids of `prompt`; raises `RequestError` when it is empty, too long or not of this vocabulary."""
    if isinstance(prompt, str):
        check_characters("the prompt", prompt)
        token_ids = list(tokenizer(prompt, verbose=False).input_ids)  # it would warn of what is refused below
    elif (
        isinstance(prompt, Seq)
        and not isinstance(prompt, bytes)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    ):
        token_ids = list(prompt)
    else:
        raise RequestError("a prompt is a string or a list of token ids")
    if not token_ids:
        raise RequestError("the prompt is empty; give at least one token")
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, but prompt and answer together may have {max_model_len}; "
            "shorten it"
        )
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} in the prompt is outside the vocabulary; use 0 to {vocab_size - 1}"
            )
    return token_ids


def encode_chat(
    tokenizer: Any,
    messages: Seq[dict[str, Any]],
    template_options: Mapping[str, Any] | None = None,
    tools: Seq[Mapping[str, Any]] | None = None,
    check_text: Callable[[str], None] = lambda text: None,
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer.

    `template_options` are variables of the model's own template, such as `enable_thinking`. `tools` are functions in
    OpenAI's shape; a template that does not know tools says nothing of them. `check_text` sees the text that the
    template makes, before it is tokenised.
    """
    if not tokenizer.chat_template:
        raise RequestError("this model's tokenizer has no chat template; use generate with a plain prompt")
    if not isinstance(messages, Seq) or isinstance(messages, str):
        raise RequestError(f"a conversation is a list of messages, got {messages!r}")
    if not messages:
        raise RequestError("the conversation is empty; give at least one message")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            got = f"the keys {', '.join(map(str, message))}" if isinstance(message, dict) else repr(message)
            raise RequestError(f'a message is {{"role": ..., "content": ...}}, got {got}')
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) & set(template_options or ())
    for what, said in (
        ("the conversation", messages),
        ("tools", tools),
        ("the chat template's variables", template_options),
    ):
        check_characters(what, said)
    if reserved:  # else a request could bring a template of its own, which is a program
        raise RequestError(f"{min(reserved)!r} is not a variable that the chat template may be given")
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=True,
            tokenize=False,
            **(template_options or {}),
        )
    except Exception as error:  # a template may raise anything
        raise RequestError(f"the chat template refuses this conversation: {error}") from None
    check_text(text)
    # Templates write special tokens themselves. `verbose` as in `encode_prompt`.
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def encode_bad_words(tokenizer: Any, words: Seq[str]) -> list[list[int]]:
    """Each word as it is tokenised at the start of a text and after a space."""
    texts = [text for word in words for text in (word, " " + word.lstrip(" "))]
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False).input_ids
    return [list(token_ids) for token_ids in dict.fromkeys(map(tuple, encoded)) if token_ids]


def end_token_ids(tokenizer: Any, model: Any, vocab_size: int) -> frozenset[int]:
    """The model's own end tokens: generation config first, then model config, then tokenizer.

    Those beyond `vocab_size`, the width of the logits, are left out: the model cannot say them.
    """
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            named = frozenset([ids] if isinstance(ids, int) else ids)
            sayable = frozenset(token for token in named if 0 <= token < vocab_size)
            if sayable != named:
                logger.warning(
                    "the model cannot say its end token %s: it has logits for %d tokens only%s",
                    ", ".join(map(str, sorted(named - sayable))),
                    vocab_size,
                    "" if sayable else "; answers end at stop strings, stop_token_ids or max_tokens",
                )
            return sayable
    return frozenset()
