"""Text to tokens and back, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slipstream.draft.token_bytes import TokenBytes
from slipstream.engine.inputs import encode_chat
from slipstream.errors import RequestError, VocabularyMismatchError
from slipstream.serve.errors import ApiError
from slipstream.serve.schema import Message

T = TypeVar("T")


class Tokens:
    """The tokenizer, used from one thread of its own: long prompts hold up no stream."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_prompt_tokens = max_prompt_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipstream-tokenizer")
        try:
            said = TokenBytes(tokenizer, "the served model")
            self._bytes, self._special = said.ordinary, said.special
        except VocabularyMismatchError:  # a family whose tokens do not spell bytes
            self._bytes, self._special = {}, {}

    async def prompts(self, prompt: str | Seq[str] | Seq[int] | Seq[Seq[int]]) -> list[list[int]]:
        """The token ids of every prompt of a completion; raises `ApiError` 400 for what cannot be answered."""
        many = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not many:
            raise ApiError(400, "prompt is an empty list", param="prompt", code="invalid_value")
        return [
            self._checked(list(one) if not isinstance(one, str) else await self.encode(one), "prompt")  # type: ignore[arg-type]
            for one in many
        ]

    async def chat(self, messages: Seq[Message], options: Mapping[str, Any] | None) -> list[int]:
        """The token ids of a conversation; raises `ApiError` 400 for what cannot be answered."""
        return self._checked(await self.encode_chat(messages, options), "messages")

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids."""
        return await self._run(
            lambda: list(
                self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids
            )
        )

    async def encode_chat(self, messages: Seq[Message], options: Mapping[str, Any] | None) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer."""
        plain = [_plain(number, message) for number, message in enumerate(messages)]
        try:
            return await self._run(lambda: encode_chat(self._tokenizer, plain, options))
        except RequestError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from None

    async def decode(self, token_ids: Seq[int]) -> str:
        """The text of the token ids, special tokens included."""
        self._check_known(token_ids, "tokens")
        return str(await self._run(lambda: self._tokenizer.decode(list(token_ids))))

    def text_of(self, token_id: int) -> str:
        """One token's own text; a byte that is no character alone shows as a replacement character."""
        said = self._bytes.get(token_id)
        if said is not None:
            return said.decode(errors="replace")
        return self._special.get(token_id) or str(self._tokenizer.decode([token_id]))

    def bytes_of(self, token_id: int) -> list[int]:
        """One token's own bytes."""
        said = self._bytes.get(token_id)
        return list(self.text_of(token_id).encode() if said is None else said)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _checked(self, token_ids: list[int], param: str) -> list[int]:
        if not token_ids:
            raise ApiError(
                400, f"{param} has no tokens; give at least one", param=param, code="invalid_value"
            )
        self._check_known(token_ids, param)
        if len(token_ids) > self._max_prompt_tokens:
            message = (
                f"{param} has {len(token_ids)} tokens, and at most {self._max_prompt_tokens} fit; shorten it"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return token_ids

    def _check_known(self, token_ids: Seq[int], param: str) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                message = f"{param} has token id {token_id}; this model's ids are 0 to {self._vocab_size - 1}"
                raise ApiError(400, message, param=param, code="invalid_value")


def _plain(number: int, message: Message) -> dict[str, Any]:
    """The message as a chat template reads it: its text in one piece, and only the fields that were given."""
    fields = message.model_dump(exclude_unset=True)
    if not isinstance(message.content, list):
        return fields
    texts: list[str] = []
    for part in message.content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            param = f"messages.{number}.content"
            message_ = f"{param} has a part of type {part.get('type')!r}; this model reads text only"
            raise ApiError(400, message_, param=param, code="invalid_value")
        texts.append(part["text"])
    return fields | {"content": "".join(texts)}
