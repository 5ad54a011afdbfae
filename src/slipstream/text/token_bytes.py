"""The bytes of a vocabulary's tokens, so that tokens of different tokenizers can be compared.

Two families of tokenizers represent bytes differently: byte-level ones write each byte as one printable character (`Ġ`
is a space), SentencePiece-like ones write `▁` for a space and `<0x0A>` for a byte that no piece covers. Compared as
strings they share few tokens, compared as bytes most common words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from slipstream.errors import VocabularyMismatchError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ROLES = ("bos_token_id", "eos_token_id")


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level vocabularies: printable bytes are themselves, the others begin at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


class TokenBytes:
    """The bytes of every ordinary token of one tokenizer, and its special tokens."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """`tokenizer` is a fast Transformers one, called `name` in messages. Raises `VocabularyMismatchError` for a
        family whose tokens do not represent bytes (WordPiece, whole words)."""
        backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special} | set(
            tokenizer.all_special_ids
        )
        self.special: dict[int, str] = {}
        """Special token to its content."""
        self.ordinary: dict[int, bytes] = {}
        self.spelled: set[int] = set()
        """Byte tokens of a SentencePiece-like vocabulary, used only for bytes that no piece covers."""
        self.roles = {role: getattr(tokenizer, role, None) for role in _ROLES}
        byte_level, space = _family(backend, name)
        for token, number in backend.get_vocab(with_added_tokens=True).items():
            byte_piece = None if byte_level else _BYTE_PIECE.fullmatch(token)
            if number in special:
                self.special[number] = token
            elif number in added:
                self.ordinary[number] = token.encode()
            elif byte_level:
                self.ordinary[number] = _bytes_of(token)
            elif byte_piece:
                self.ordinary[number] = bytes([int(byte_piece[1], 16)])
                self.spelled.add(number)
            else:
                self.ordinary[number] = token.replace(space, " ").encode()

    def by_bytes(self) -> dict[bytes, int]:
        """Bytes to one token with them: pieces are preferred to byte tokens, then lower ids to higher."""
        best: dict[bytes, int] = {}
        for number in (*sorted(self.ordinary.keys() - self.spelled), *sorted(self.spelled)):
            best.setdefault(self.ordinary[number], number)
        best.pop(b"", None)
        return best

    def single_bytes(self) -> dict[int, int]:
        """Byte to the token of that single byte, where there is one; byte tokens are preferred."""
        ranked = sorted(self.ordinary, key=lambda number: (number not in self.spelled, number))
        singles: dict[int, int] = {}
        for number in ranked:
            said = self.ordinary[number]
            if len(said) == 1:
                singles.setdefault(said[0], number)
        return singles


def match_special(ours: TokenBytes, theirs: TokenBytes) -> dict[int, int]:
    """Our special tokens to theirs, one to one: by equal content, else by role (begin or end of text)."""
    look = {content: number for number, content in theirs.special.items()}
    pairs = {number: look[content] for number, content in ours.special.items() if content in look}
    for role in _ROLES:
        our, their = ours.roles[role], theirs.roles[role]
        if our is not None and their is not None and our not in pairs and their not in pairs.values():
            pairs[our] = their
    return pairs


def shared_tokens(ours: TokenBytes, theirs: TokenBytes) -> dict[int, int]:
    """Our tokens to theirs with the same bytes, one to one; special tokens are matched by `match_special`."""
    said = theirs.by_bytes()
    pairs = {number: said[token] for token, number in ours.by_bytes().items() if token in said}
    return dict(sorted((pairs | match_special(ours, theirs)).items()))


def _bytes_of(token: str) -> bytes:
    """The bytes of a byte-level token; a token with other characters is taken literally."""
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


def _family(backend: Any, name: str) -> tuple[bool, str]:
    """(True, " ") for a byte-level vocabulary, else (False, the character that it writes for a space)."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    parts = {part["type"]: part for part in _parts(state)}
    if "ByteLevel" in parts:
        return True, " "
    if "Metaspace" in parts:
        return False, parts["Metaspace"]["replacement"]
    if "Replace" in parts and parts["Replace"]["content"] == " ":
        return False, parts["Replace"]["pattern"]["String"]
    raise VocabularyMismatchError(
        f"the tokens of {name!r} do not represent bytes (neither byte-level nor SentencePiece-like); "
        "use a model with another tokenizer"
    )


def _parts(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A decoder's parts; those of a sequence decoder one by one."""
    if state.get("type") == "Sequence":
        for part in state["decoders"]:
            yield from _parts(part)
    elif state:
        yield state
