"""Encodes the texts of a request as token ids: prompts, conversations, bad words."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from slipstream.errors import RequestError
from slipstream.text.encoder_input import EncoderInput
from slipstream.text.inputs import as_list, check_characters, is_token_id
from slipstream.text.template_bound import bounded
from slipstream.vllm_names import PROMPT, split_off

if TYPE_CHECKING:
    from slipstream.text.expected import ExpectedText


log = logging.getLogger(__name__)


class TextPrompt(TypedDict):
    """A text prompt in vLLM's form."""

    prompt: str


class EncoderDecoderPrompt(TypedDict):
    """What the encoder reads, and how the answer begins, in vLLM's form."""

    encoder_prompt: str | Seq[int] | TextPrompt | TokensPrompt
    decoder_prompt: NotRequired[str | Seq[int] | TextPrompt | TokensPrompt | None]


class AudioPrompt(TypedDict):
    """What a speech model hears, and how its answer begins."""

    audio: Any
    """(samples, sampling rate), a file or its bytes."""
    language: NotRequired[str | None]
    """A code such as "en"; None lets the model find out."""
    task: NotRequired[str | None]
    """`transcribe`, or `translate` into English."""
    decoder_prompt: NotRequired[str | Seq[int] | TextPrompt | TokensPrompt | None]
    """In place of language and task."""


class TokensPrompt(TypedDict):
    """A prompt of token ids in vLLM's form; `prompt` is its text, for the output only."""

    prompt_token_ids: Seq[int]
    prompt: NotRequired[str]


Prompt = str | Seq[int] | TextPrompt | TokensPrompt | EncoderDecoderPrompt | AudioPrompt
"""Text, or token ids: a list or a one-dimensional array."""

_KINDS_OF_PROMPT = 'a prompt is a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A request's texts as token ids."""

    text: str | None
    token_ids: list[int]
    bad_words: list[list[int]]
    expected: ExpectedText | None = None
    """What the caller expects as the answer."""
    encoder_input: EncoderInput | None = None
    """What the encoder reads; None for a model without one."""


def encode_request(
    tokenizer: Any, prompt: Prompt, bad_words: Seq[str], vocab_size: int, max_model_len: int
) -> EncodedPrompt:
    """Prompt and bad words in token ids; raises `RequestError` as `encode_prompt` does."""
    text, given = parse_prompt(prompt)
    token_ids = encode_prompt(tokenizer, given, vocab_size, max_model_len)
    return EncodedPrompt(text, token_ids, encode_bad_words(tokenizer, bad_words))


def parse_prompt(prompt: Any) -> tuple[str | None, Any]:
    """The prompt's text for the output (None if unknown), and the text or token ids to encode; raises
    `RequestError`."""
    if isinstance(prompt, Mapping):
        own, _ = split_off(prompt, PROMPT, "prompt key", RequestError)
        unknown = own.keys() - {"prompt", "prompt_token_ids"}
        text, token_ids = own.get("prompt"), own.get("prompt_token_ids")
        if unknown or (text is None and token_ids is None) or not isinstance(text, str | None):
            raise RequestError(f"{_KINDS_OF_PROMPT}, got the keys {', '.join(map(repr, prompt)) or 'none'}")
        return (text, text) if token_ids is None else (text, as_list(token_ids))
    return (prompt, prompt) if isinstance(prompt, str) else (None, as_list(prompt))


def encode_prompt(tokenizer: Any, prompt: str | Seq[int], vocab_size: int, max_model_len: int) -> list[int]:
    """Token ids of `prompt`; raises `RequestError` when it is empty, too long or not of this vocabulary."""
    if isinstance(prompt, str):
        check_characters("the prompt", prompt)
        # `verbose` would warn of long prompts, which are refused below.
        token_ids = list(tokenizer(prompt, verbose=False).input_ids)
    elif isinstance(prompt, Seq) and not isinstance(prompt, bytes) and all(map(is_token_id, prompt)):
        token_ids = list(map(int, prompt))
    else:
        raise RequestError(_KINDS_OF_PROMPT)
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
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer.

    `template_options` are variables of the model's own template, such as `enable_thinking`. `tools` are functions in
    OpenAI's format; templates without support for tools ignore them. `check_text` is called with the rendered text
    before it is tokenised. `chat_template` replaces the model's own template; it is a program, so never pass one from
    an untrusted source. `continue_final_message` leaves the last message open. Raises `RequestError`.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message continues the last message and add_generation_prompt begins a new one; "
            "set one of them to false"
        )
    if not tokenizer.chat_template and chat_template is None:
        raise RequestError(
            "this model has no chat template, as base models do not: give it plain text "
            "(a prompt on the command line and in Python, /v1/completions on a server; a sound for a speech model, "
            "/v1/audio/transcriptions)"
        )
    _check_messages(messages)
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) & set(template_options or ())
    check_characters("the conversation", messages)
    check_characters("tools", tools)
    check_characters("the chat template's variables", template_options)
    check_characters("the chat template", chat_template)
    if reserved:  # a request must not replace the template, which is a program
        raise RequestError(f"{min(reserved)!r} cannot be set as a variable of the chat template")
    text = _rendered(
        tokenizer,
        messages,
        tools,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **(template_options or {}),
    )
    check_text(text)
    # Templates write special tokens themselves. `verbose` as in `encode_prompt`.
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _rendered(
    tokenizer: Any,
    messages: Seq[dict[str, Any]],
    tools: Seq[Mapping[str, Any]] | None,
    *,
    chat_template: str | None,
    **variables: Any,
) -> str:
    """The conversation as the template writes it; raises `RequestError` where the template does not."""
    template = chat_template or tokenizer.chat_template
    readable = [_readable(message, str(template)) for message in messages]
    try:
        with bounded(template, len(messages) + len(tools or ())):
            text: str = tokenizer.apply_chat_template(
                readable,
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=chat_template,
                tokenize=False,
                **variables,
            )
    except RequestError:
        raise
    except Exception as error:  # a template may raise anything
        raise RequestError(f"the chat template rejected this conversation: {error}") from None
    return text


def _check_messages(messages: Seq[dict[str, Any]]) -> None:
    """Raise `RequestError` where `messages` are no conversation."""
    if not isinstance(messages, Seq) or isinstance(messages, str):
        raise RequestError(f"a conversation is a list of messages, got {messages!r}")
    if not messages:
        raise RequestError("the conversation is empty; give at least one message")
    for message in messages:
        if not isinstance(message, dict) or not (
            "role" in message and {"content", "tool_calls"} & message.keys()
        ):
            got = f"the keys {', '.join(map(str, message))}" if isinstance(message, dict) else repr(message)
            raise RequestError(f'a message is {{"role": ..., "content": ...}}, got {got}')


def encode_conversation(tokenizer: Any, messages: Seq[dict[str, Any]], raw: bool = False) -> list[int]:
    """A conversation of a workload or of data, ready for the assistant's answer.

    In the chat template; without one, or where `raw`, as the plain text that `plain_messages` makes of it. Raises
    `RequestError`.
    """
    if tokenizer.chat_template and not raw:
        return encode_chat(tokenizer, messages)
    return [token for one in plain_messages(tokenizer, messages) for token in one]


def encode_question(
    tokenizer: Any,
    text: str | None,
    messages: Seq[dict[str, Any]],
    raw: bool,
    vocab_size: int,
    max_model_len: int = sys.maxsize,
) -> list[int]:
    """Token ids of a prompt, `messages` or else `text`: in the chat template, without one or where `raw` plain.

    Raises `RequestError` as `encode_prompt` does.
    """
    prompt: str | list[int] = text or ""
    if messages:
        prompt = encode_conversation(tokenizer, messages, raw)
    elif tokenizer.chat_template and not raw:
        prompt = encode_chat(tokenizer, [{"role": "user", "content": text}])
    return encode_prompt(tokenizer, prompt, vocab_size, max_model_len)


def plain_messages(tokenizer: Any, messages: Seq[dict[str, Any]]) -> list[list[int]]:
    """The token ids of each of `plain_lines`; joined they begin as a prompt does, and have no end token.

    Each line is tokenised for itself, so that those before an answer do not depend on it.
    """
    if not tokenizer.chat_template:
        _warn_of_plain_text()
    first, *others = plain_lines(messages)
    begun = tokenizer(first, return_special_tokens_mask=True, verbose=False)
    last = bytes(begun.special_tokens_mask).rfind(0)
    return [list(begun.input_ids[: last + 1]), *(_line(tokenizer, one) for one in others)]


def _line(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that follows a line. SentencePiece puts a space in front of a text without one before it."""
    line_end, both = (
        list(tokenizer(part, add_special_tokens=False, verbose=False).input_ids)
        for part in ("\n", f"\n{text}")
    )
    if both[: len(line_end)] == line_end:
        return both[len(line_end) :]
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def plain_lines(messages: Seq[dict[str, Any]]) -> list[str]:
    """Each message as a line of plain text, without its role: what a base model reads. Raises `RequestError` for tool
    calls, which are no text."""
    check_characters("the conversation", messages)
    if not messages:
        raise RequestError("the conversation is empty; give at least one message")
    if any(message.get("tool_calls") for message in messages):
        raise RequestError(
            "a message has tool calls, which plain text cannot hold; use a model with a chat template"
        )
    return [f"{_readable(message, '')['content']}\n" for message in messages]


def plain_text(text: str | None, messages: Seq[dict[str, Any]]) -> str:
    """A prompt's text, `messages` or else `text`, without a chat template. Raises `RequestError`."""
    return "".join(plain_lines(messages)) if messages else text or ""


@functools.cache
def _warn_of_plain_text() -> None:
    log.warning(
        "this model has no chat template: conversations are given to it as plain text, a line a message"
    )


def _readable(message: dict[str, Any], template: str) -> dict[str, Any]:
    """The message as templates expect it: its text joined, its tool calls' arguments decoded; raises `RequestError`.

    An assistant's message without text, as clients send it with tool calls, has the empty one, since templates add it
    to other text, and Transformers drops fields that are none. `developer` is OpenAI's newer name for `system`;
    templates that do not know it would leave the message out, or fail.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    if message["role"] == "developer" and "developer" not in template:
        message = message | {"role": "system"}
    if not content and message["role"] == "assistant":
        message = message | {"content": ""}
    elif content is None:
        raise RequestError(f"a message of the role {message['role']!r} has no content; give it a text")
    if not calls:
        message = {key: value for key, value in message.items() if key != "tool_calls"}
    if isinstance(content, list):
        for part in content:
            is_text = (
                isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            )
            if not is_text:
                kind = part.get("type") if isinstance(part, dict) else part
                raise RequestError(f"a message has a part of type {kind!r}; this model reads text only")
        message = message | {"content": "".join(part["text"] for part in content)}
    if calls:
        message = message | {"tool_calls": [_decoded(call) for call in calls]}
    return message


def _decoded(call: Any) -> Any:
    """A tool call with its JSON arguments decoded; other calls unchanged."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise RequestError("the arguments of a message's tool call are not valid JSON") from None
    return call | {"function": function | {"arguments": arguments}}


def encode_bad_words(tokenizer: Any, words: Seq[str]) -> list[list[int]]:
    """The token ids of each word at the start of a text and after a space, without duplicates."""
    texts = [text for word in words for text in (word, " " + word.lstrip(" "))]
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False).input_ids
    return [list(token_ids) for token_ids in dict.fromkeys(map(tuple, encoded)) if token_ids]
