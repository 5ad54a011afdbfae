"""The most text that a token can represent: text that cannot fit the context is refused before it is tokenised."""

from __future__ import annotations

from typing import Any

from slipstream.text.token_bytes import TokenBytes

SHRINKS = 4
"""The most that normalisation may shorten a text: composed characters have at least a third of the bytes."""


def max_bytes_a_token(tokenizer: Any, said: TokenBytes | None) -> int | None:
    """The most UTF-8 bytes of text that one token of `tokenizer` represents; `said` are its tokens' bytes where
    known.

    Tokenizers that write characters in another form, or drop spaces beside special tokens, get `SHRINKS` times their
    longest token. None where one token may represent unknown text of any length.
    """
    if said is None or len(said.single_bytes()) < 256:
        return None
    longest = max(map(len, [*said.ordinary.values(), *(text.encode() for text in said.special.values())]))
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    is_plain = backend.normalizer is None and not any(token.lstrip or token.rstrip for token in added)
    return longest if is_plain else SHRINKS * longest
