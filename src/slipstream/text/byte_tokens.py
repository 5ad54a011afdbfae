"""A vocabulary in bytes, for llguidance."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.text.token_bytes import TokenBytes


@dataclass
class ByteTokens:
    """A tokenizer in the interface that llguidance takes: each token's bytes, and an encoder. Plain values, which can
    be sent to another process."""

    tokens: list[bytes]
    """By token id."""
    special_token_ids: list[int]
    ends: list[int]
    """The end tokens, at least one."""
    token_of: dict[bytes, int]
    """Ids of the ordinary tokens by their bytes."""

    bos_token_id = None

    def __post_init__(self) -> None:
        self.eos_token_id = self.ends[0]
        self._longest = max(map(len, self.token_of))

    @classmethod
    def of(cls, token_bytes: TokenBytes, num_tokens: int, ends: Seq[int]) -> ByteTokens:
        """Make it from the tokens' bytes; `ends` are the end tokens, at least one."""
        ordinary, special = token_bytes.ordinary, token_bytes.special
        tokens = [ordinary.get(token, b"") for token in range(num_tokens)]
        special_token_ids = sorted({*(token for token in special if token < num_tokens), *ends})
        for token in special_token_ids:
            tokens[token] = special.get(token, f"<|{token}|>").encode()
        return cls(tokens, special_token_ids, list(ends), token_bytes.by_bytes())

    def __call__(self, text: bytes) -> list[int]:
        """Token ids of `text`, the longest match first; raises `ValueError` for a byte without a token."""
        token_ids: list[int] = []
        while text:
            lengths = range(min(self._longest, len(text)), 0, -1)
            length = next((n for n in lengths if text[:n] in self.token_of), None)
            if length is None:
                raise ValueError(f"no token has the bytes {text[:1]!r}")
            token_ids.append(self.token_of[text[:length]])
            text = text[length:]
        return token_ids
