"""How much text a token can stand for, so that what cannot fit the context is known before it is tokenised."""

from __future__ import annotations

from typing import Any

from slipstream.text.token_bytes import TokenBytes

SHRINKS = 4
"""How far a tokenizer may shorten text before it reads it: composed characters have at least a third of the bytes."""


def max_bytes_a_token(tokenizer: Any, said: TokenBytes | None) -> int | None:
    """UTF-8 bytes of text that one token of `tokenizer` stands for at most; `said` are its tokens' bytes where known.

    Tokenizers that write characters in another form, or drop spaces beside special tokens, get `SHRINKS` times their
    longest token. None where one token may stand for any text that is unknown.
    """
    if said is None or len(said.single_bytes()) < 256:
        return None
    longest = max(map(len, [*said.ordinary.values(), *(text.encode() for text in said.special.values())]))
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    is_plain = backend.normalizer is None and not any(token.lstrip or token.rstrip for token in added)
    return longest if is_plain else SHRINKS * longest
