"""A vocabulary in bytes, for llguidance."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.text.token_bytes import TokenBytes


class ByteTokens:
    """A tokenizer in the interface that llguidance takes: each token's bytes, and an encoder. Picklable."""

    bos_token_id = None

    def __init__(self, token_bytes: TokenBytes, num_tokens: int, ends: Seq[int]) -> None:
        """`token_bytes` are the tokens' bytes; `ends` are the end tokens, at least one."""
        ordinary, special = token_bytes.ordinary, token_bytes.special
        self.tokens = [ordinary.get(token, b"") for token in range(num_tokens)]
        self.special_token_ids = sorted({*(token for token in special if token < num_tokens), *ends})
        for token in self.special_token_ids:
            self.tokens[token] = special.get(token, f"<|{token}|>").encode()
        self.ends = list(ends)
        self.eos_token_id = self.ends[0]
        self._token_of = token_bytes.by_bytes()
        self._longest = max(map(len, self._token_of))

    def __call__(self, text: bytes) -> list[int]:
        """Token ids of `text`, the longest match first; raises `ValueError` for a byte without a token."""
        token_ids: list[int] = []
        while text:
            lengths = range(min(self._longest, len(text)), 0, -1)
            length = next((n for n in lengths if text[:n] in self._token_of), None)
            if length is None:
                raise ValueError(f"no token has the bytes {text[:1]!r}")
            token_ids.append(self._token_of[text[:length]])
            text = text[length:]
        return token_ids
