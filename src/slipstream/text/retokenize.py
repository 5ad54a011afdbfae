"""Incremental retokenisation: a growing text of one tokenizer in the tokens of another."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

from slipstream.text.common_prefix import common_prefix_length
from slipstream.text.token_bytes import TokenBytes, match_special

LOOKBEHIND = (4, 24)
"""(least, most) tokens before appended text that are encoded again: from the least on, up to the start of a word."""
_SPACE = b" \n\t\r"
_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")


class Encoder:
    """Encodes bytes as they occur in the middle of a text: without a prefix, without special tokens, and with byte
    tokens for invalid UTF-8."""

    def __init__(self, tokenizer: Any, tokens: TokenBytes) -> None:
        self.tokens = tokens
        self._backend = _for_continuations(tokenizer.backend_tokenizer, tokens)
        self._single_bytes = tokens.single_bytes()

    def encode(self, data: bytes) -> tuple[list[int], list[bytes]]:
        """Token ids and the share of `data` that each encodes: b"" where a token completes an earlier token's
        character. Bytes without a token are in no share."""
        token_ids: list[int] = []
        shares: list[bytes] = []
        for part in _NOT_UTF8.split(data.decode("utf-8", "surrogateescape")):
            if _NOT_UTF8.match(part):
                known = [
                    byte for byte in part.encode("utf-8", "surrogateescape") if byte in self._single_bytes
                ]
                token_ids += [self._single_bytes[byte] for byte in known]
                shares += [bytes([byte]) for byte in known]
            elif part:
                encoding = self._backend.encode(part, add_special_tokens=False)
                if not encoding.ids:
                    continue
                ends = [0, *(end for _, end in encoding.offsets)]
                ends[-1] = len(part)
                token_ids += encoding.ids
                shares += [part[a:b].encode() for a, b in pairwise(ends)]
        return token_ids, shares


def first_to_encode(shares: Seq[bytes | None]) -> int:
    """Index of the first token to encode again, with all after it, when text is appended. A share of None is a special
    token; encoding never reaches across it."""
    least, most = LOOKBEHIND
    first = len(shares)
    while first > 0 and len(shares) - first < most:
        before = shares[first - 1]
        if before is None:
            break
        first -= 1
        if len(shares) - first >= least and before[:1] in _SPACE and before:
            break
    while first < len(shares) and shares[first] == b"":
        first += 1
    return first


class Translation:
    """One sequence's text in another tokenizer's tokens.

    `token_ids` begins with that tokenizer's own prefix, such as a begin-of-text token. Special tokens that it does not
    have are spelled out. Only the last few tokens are encoded again when the text grows.
    """

    def __init__(
        self, source: TokenBytes, encoder: Encoder, special: dict[int, int], front: Seq[int]
    ) -> None:
        self._source, self._encoder, self._special = source, encoder, special
        self._num_read = 0
        self._unread = b""
        self.token_ids = list(front)
        self._shares: list[bytes | None] = [None] * len(front)

    def update(self, source_ids: Seq[int]) -> int:
        """Read the new tokens of `source_ids`, the whole text; returns the number of leading tokens left unchanged."""
        kept = len(self.token_ids)
        for token in source_ids[self._num_read :]:
            if token in self._special:
                kept = min(kept, self._encode())
                their = self._special[token]
                if self._num_read or self.token_ids != [their]:  # no second begin-of-text token
                    self.token_ids.append(their)
                    self._shares.append(None)
            elif token in self._source.special:
                self._unread += self._source.special[token].encode()
            else:
                self._unread += self._source.ordinary.get(token, b"")
            self._num_read += 1
        return min(kept, self._encode())

    def _encode(self) -> int:
        """Encode the unread text and re-encode the tokens before it; returns the number of tokens left unchanged."""
        if not self._unread:
            return len(self.token_ids)
        first = first_to_encode(self._shares)
        again = b"".join(share or b"" for share in self._shares[first:])
        token_ids, shares = self._encoder.encode(again + self._unread)
        kept = first + common_prefix_length(self.token_ids[first:], token_ids)
        self.token_ids[first:] = token_ids
        self._shares[first:] = shares
        self._unread = b""
        return kept


class Translator:
    """Makes a `Translation` from the target's tokens to the draft's for each sequence."""

    def __init__(self, target: Any, draft: Any, target_name: str, draft_name: str) -> None:
        """`target` and `draft` are fast Transformers tokenizers; raises `VocabularyMismatchError` unless the tokens of
        both represent bytes."""
        self.target, self.draft = TokenBytes(target, target_name), TokenBytes(draft, draft_name)
        self._encoder = Encoder(draft, self.draft)
        self.special = match_special(self.target, self.draft)
        front = draft("")["input_ids"]
        self._front = front[:1] if front and front[0] == self.draft.roles["bos_token_id"] else []

    def begin(self) -> Translation:
        """The translation of an empty text."""
        return Translation(self.target, self._encoder, self.special, self._front)

    def tokens_per_token(self) -> float:
        """Draft tokens per target token, at least 1: an average over a thousand tokens of the target's vocabulary. An
        upper estimate, since the tokens of real texts are mostly in both vocabularies."""
        said = list(self.target.ordinary.values())
        sample = said[:: max(len(said) // 1000, 1)]
        return max(1.0, sum(len(self._encoder.encode(token)[0]) for token in sample) / max(len(sample), 1))


def _for_continuations(backend: Any, tokens: TokenBytes) -> Any:
    """A copy of the tokenizer without special treatment of a text's beginning and end."""
    state = json.loads(backend.to_str())
    state.update(truncation=None, padding=None, post_processor=None)
    state["normalizer"] = _inner(state["normalizer"], "normalizers")
    state["pre_tokenizer"] = _inner(state["pre_tokenizer"], "pretokenizers")
    if (
        state["model"]["type"] == "Unigram"
    ):  # its special tokens are pieces, which would match in ordinary text
        pieces = state["model"]["vocab"]
        for added in state["added_tokens"]:
            if added["id"] in tokens.special:
                added["content"] = f"\U0010ffff{added['id']}"
        for number in tokens.special:
            if number < len(pieces):
                pieces[number][0] = f"\U0010ffff{number}"
    copy = Tokenizer.from_str(json.dumps(state))
    copy.encode_special_tokens = True
    return copy


def _inner(part: dict[str, Any] | None, members: str) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer without special treatment of a text's beginning and end."""
    if part is None or part["type"] in ("Prepend", "Strip"):
        return None
    if part["type"] == "Sequence":
        kept = [inner for inner in (_inner(member, members) for member in part[members]) if inner]
        return {**part, members: kept} if kept else None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return part
