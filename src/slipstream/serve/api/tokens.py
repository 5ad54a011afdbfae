"""Text to tokens and back, off the event loop."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.errors import RequestError, VocabularyMismatchError
from slipstream.serve.api.errors import context_exceeded, invalid
from slipstream.serve.api.messages import for_template
from slipstream.serve.api.schema import Message
from slipstream.serve.sized_threads import SizedThreads, size_of
from slipstream.serve.tools.formats import chat_template, shows_tools, tool_format
from slipstream.text.prompts import encode_chat
from slipstream.text.token_bytes import TokenBytes

SHRINKS = 4
"""The most that normalisation may shorten a text: composed characters have at least a third of the bytes."""


class Tokens:
    """The tokenizer, run in threads of its own, so that long prompts delay neither streams nor short prompts.

    Text that could not fit even if all its tokens were the vocabulary's longest is refused before it is tokenised.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        max_prompt_tokens: int | None = None,
        tool_call_parser: str | None = None,
    ) -> None:
        """A prompt leaves one token of the context to answer with, and has at most `max_prompt_tokens` where that is
        less. `tool_call_parser` names the format of tool calls; without one it is found from the chat template."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_prompt_tokens = max_prompt_tokens
        template = chat_template(tokenizer)
        self.tool_format = tool_format(tool_call_parser, template)
        self.special: dict[str, int] = dict(tokenizer.get_added_vocab())
        """Added tokens, which llguidance does not treat as text."""
        self._shows_tools = shows_tools(template)
        tokenizer("", verbose=False)  # fills caches that later concurrent calls only read
        self._threads = SizedThreads("slipstream-tokenizer")
        said: TokenBytes | None = None
        try:
            said = TokenBytes(tokenizer, "the served model")
            self._bytes, self._special = said.ordinary, said.special
        except VocabularyMismatchError:  # a family whose tokens do not spell bytes
            self._bytes, self._special = {}, {}
        longest = max_bytes_a_token(tokenizer, said)
        self._max_text_bytes = None if longest is None else (max_prompt_tokens or max_model_len) * longest

    async def prompts(self, prompt: str | Seq[str] | Seq[int] | Seq[Seq[int]]) -> list[list[int]]:
        """The token ids of every prompt of a completion; raises `ApiError` 400 for a prompt that cannot be served."""
        many = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not many:
            raise invalid("prompt is an empty list", "prompt")
        for one in many:
            if isinstance(one, str):
                self._check_text(one, "prompt")
        return await self._threads.run(
            size_of(many),
            lambda: [
                self._checked(self._encode(one, True) if isinstance(one, str) else list(one), "prompt")  # type: ignore[arg-type]
                for one in many
            ],
        )

    async def chat(
        self,
        messages: Seq[Message],
        options: Mapping[str, Any] | None,
        tools: Seq[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The token ids of a conversation; raises `ApiError` 400 for a prompt that cannot be served."""
        return await self._threads.run(
            size_of(messages, options, tools),
            lambda: self._checked(self._encode_chat(messages, options, tools), "messages"),
        )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids; raises `ApiError` 400 for text that is longer than any prompt."""
        self._check_text(text, "prompt")
        return await self._threads.run(len(text), lambda: self._encode(text, add_special_tokens))

    async def encode_chat(self, messages: Seq[Message], options: Mapping[str, Any] | None) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer; errors as for `encode`."""
        size = size_of(messages, options)
        return await self._threads.run(size, lambda: self._encode_chat(messages, options, None))

    async def decode(self, token_ids: Seq[int]) -> str:
        """The text of the token ids, special tokens included; raises `ApiError` 400 for unknown ids, and for more
        than fit the context."""
        if len(token_ids) > self._max_model_len:
            however = f"tokens has {len(token_ids)} of them; send them in parts"
            raise context_exceeded("tokens", self._max_model_len, however)

        def decode() -> str:
            self._check_known(token_ids, "tokens")
            return str(self._tokenizer.decode(list(token_ids)))

        return await self._threads.run(size_of(token_ids), decode)

    def text_of(self, token_id: int) -> str:
        """One token's own text; incomplete characters are shown as replacement characters."""
        said = self._bytes.get(token_id)
        if said is not None:
            return said.decode(errors="replace")
        return self._special.get(token_id) or str(self._tokenizer.decode([token_id]))

    def bytes_of(self, token_id: int) -> list[int]:
        """One token's own bytes."""
        said = self._bytes.get(token_id)
        return list(self.text_of(token_id).encode() if said is None else said)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    def _encode_chat(
        self,
        messages: Seq[Message],
        options: Mapping[str, Any] | None,
        tools: Seq[dict[str, Any]] | None,
    ) -> list[int]:
        plain = for_template(messages, None if self._shows_tools else self.tool_format, tools)
        try:
            return encode_chat(self._tokenizer, plain, options, tools, self._check_chat)
        except RequestError as error:
            raise invalid(str(error), "messages") from None

    def _check_chat(self, text: str) -> None:
        """Checks the rendered text of a conversation, of which the template may have left out much."""
        self._check_text(text, "messages")

    def _check_text(self, text: str, param: str) -> None:
        """Raise `ApiError` 400 where the text cannot fit in any tokenisation."""
        most = self._max_text_bytes
        if most is not None and (len(text) > most or (4 * len(text) > most and len(text.encode()) > most)):
            however = (
                f"{param} has {len(text)} characters, and the longest prompt could not have more than "
                f"{most} bytes; shorten it"
            )
            raise context_exceeded(param, self._max_model_len, however)

    def _checked(self, token_ids: list[int], param: str) -> list[int]:
        if not token_ids:
            raise invalid(f"{param} has no tokens; give at least one", param)
        most = self._max_prompt_tokens or self._max_model_len - 1
        if len(token_ids) > most:
            however = (
                f"you requested {len(token_ids) + 1} tokens ({len(token_ids)} in {param}, at least 1 to answer)"
                if self._max_prompt_tokens is None
                else f"{param} has {len(token_ids)} tokens, and this server takes at most {most}"
            )
            raise context_exceeded(param, self._max_model_len, f"{however}; shorten it")
        self._check_known(token_ids, param)
        return token_ids

    def _check_known(self, token_ids: Seq[int], param: str) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                message = f"{param} has token id {token_id}; this model's ids are 0 to {self._vocab_size - 1}"
                raise invalid(message, param)


def max_bytes_a_token(tokenizer: Any, said: TokenBytes | None) -> int | None:
    """The most UTF-8 bytes of text that one token of `tokenizer` represents; `said` are its tokens' bytes where
    known.

    Tokenizers that write characters in another form, or drop spaces next to special tokens, get `SHRINKS` times their
    longest token. None where one token may represent unknown text of any length.
    """
    if said is None or len(said.single_bytes()) < 256:
        return None
    longest = max(map(len, [*said.ordinary.values(), *(text.encode() for text in said.special.values())]))
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    is_plain = backend.normalizer is None and not any(token.lstrip or token.rstrip for token in added)
    return longest if is_plain else SHRINKS * longest
