"""Text of one tokenizer in the tokens of another, kept up to date while the text grows."""

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
"""How many tokens text that is added may change: at least, and, until a word begins there, at most."""
_SPACE = b" \n\t\r"
_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")


class Encoder:
    """Turns bytes into tokens of one tokenizer, as they come in the middle of a text: nothing is put in front, no text
    becomes a special token, and bytes that are no UTF-8 become byte tokens."""

    def __init__(self, tokenizer: Any, tokens: TokenBytes) -> None:
        self.tokens = tokens
        self._backend = _for_continuations(tokenizer.backend_tokenizer, tokens)
        self._single_bytes = tokens.single_bytes()

    def encode(self, data: bytes) -> tuple[list[int], list[bytes]]:
        """Token ids, and the share of `data` that each stands for: b"" where it completes the character of an earlier
        one. Bytes without a token, which few vocabularies have, are in no share."""
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


def anchor(shares: Seq[bytes | None]) -> int:
    """Which of the last tokens to encode again, with all behind it, when text is added; None is a special token, which
    no text reaches across."""
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

    `token_ids` begins with what that tokenizer puts in front of every text. A special token that it does not have
    is spelled out. Only the last few tokens are ever encoded again; they are canonical from word to word.
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
        """Take in what `source_ids`, the whole text, has grown by; returns how many tokens stayed as they were."""
        kept = len(self.token_ids)
        for token in source_ids[self._num_read :]:
            if token in self._special:
                kept = min(kept, self._encode())
                their = self._special[token]
                if self._num_read or self.token_ids != [their]:  # not a second beginning of the text
                    self.token_ids.append(their)
                    self._shares.append(None)
            elif token in self._source.special:
                self._unread += self._source.special[token].encode()
            else:
                self._unread += self._source.ordinary.get(token, b"")
            self._num_read += 1
        return min(kept, self._encode())

    def _encode(self) -> int:
        """Encode the text that was read, and the last tokens before it again; returns how many tokens stayed."""
        if not self._unread:
            return len(self.token_ids)
        first = anchor(self._shares)
        again = b"".join(share or b"" for share in self._shares[first:])
        token_ids, shares = self._encoder.encode(again + self._unread)
        kept = first + common_prefix_length(self.token_ids[first:], token_ids)
        self.token_ids[first:] = token_ids
        self._shares[first:] = shares
        self._unread = b""
        return kept


class Translator:
    """Begins a `Translation` for each sequence: from the target's tokens to the draft's."""

    def __init__(self, target: Any, draft: Any, target_name: str, draft_name: str) -> None:
        """`target` and `draft` are fast Transformers tokenizers; raises `VocabularyMismatchError` where the tokens of
        one do not spell bytes."""
        self.target, self.draft = TokenBytes(target, target_name), TokenBytes(draft, draft_name)
        self._encoder = Encoder(draft, self.draft)
        self._special = match_special(self.target, self.draft)
        front = draft("")["input_ids"]
        self._front = front[:1] if front and front[0] == self.draft.roles["bos_token_id"] else []

    def begin(self) -> Translation:
        """The translation of an empty text."""
        return Translation(self.target, self._encoder, self._special, self._front)

    def tokens_per_token(self) -> float:
        """How many of the draft's tokens one of the target's becomes, on average over a thousand of its vocabulary, but
        at least 1. Those of a text become fewer: common words are short and in both vocabularies."""
        said = list(self.target.ordinary.values())
        sample = said[:: max(len(said) // 1000, 1)]
        return max(1.0, sum(len(self._encoder.encode(token)[0]) for token in sample) / max(len(sample), 1))


def _for_continuations(backend: Any, tokens: TokenBytes) -> Any:
    """A copy of the tokenizer that adds nothing to a text and takes nothing away at its ends."""
    state = json.loads(backend.to_str())
    state.update(truncation=None, padding=None, post_processor=None)
    state["normalizer"] = _inner(state["normalizer"], "normalizers")
    state["pre_tokenizer"] = _inner(state["pre_tokenizer"], "pretokenizers")
    if state["model"]["type"] == "Unigram":  # special tokens are pieces there, and would be found in a text
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
    """A normalizer or pre-tokenizer without what treats the beginning or the end of a text differently."""
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
