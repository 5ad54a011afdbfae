"""Streaming detokenisation: text is released once no partial character or stop string can change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from slipstream.text.stop_strings import StopStrings

CONTEXT_TOKENS = range(6, 12)
"""Prompt tokens that the decoder gets first, so that a leading space is decoded as in running text. More than the least
are used where fewer would begin inside a character."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Released text, and whether a draft token or the target's own yielded it."""

    text: str
    from_draft: bool


class TextStream:
    """Decodes one answer token by token, finds stop strings, and releases text that can no longer change.

    Text that may be the beginning of a stop string is held back until it is known not to be. A character whose bytes
    are spread over several tokens is released with the last of them. A stop string that is a special token is found
    where the model chooses that token, also where special tokens are left out of the text.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(
            ids=self._context(prompt_token_ids), skip_special_tokens=skip_special_tokens
        )
        self._stop = StopStrings(stop)
        self._hidden_stops = _hidden(self._backend, stop) if skip_special_tokens else {}
        self._include_stop = include_stop
        self._undecoded: list[int] = []
        self._boundaries: list[tuple[int, bool]] = []  # (end of a token's text, from_draft)
        self._released = 0
        self.text = ""
        """Everything decoded so far; cut at the stop string once one was found."""

    def push(self, token_id: int, from_draft: bool, check_stop: bool = True) -> str | None:
        """Add a committed token; returns the stop string that it completes, if any, and cuts the text there."""
        if check_stop and (hidden := self._hidden_stops.get(token_id)) is not None:
            self.flush(from_draft)
            if self._include_stop:
                self._append(hidden, from_draft)
            return hidden
        self._undecoded.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:  # a sampler may draw bytes that begin no character, for which the decoder raises
            piece = self._replaced()
            self._stream = DecodeStream(
                ids=self._context(self._undecoded[-1:]), skip_special_tokens=self._skip_special_tokens
            )
        if piece is None:
            return None
        self._undecoded.clear()
        searched = len(self.text)
        self._append(piece, from_draft)
        return self._find_stop(searched) if check_stop else None

    def flush(self, from_draft: bool = False) -> None:
        """Decode what is left at the end of the answer, with replacement characters for incomplete ones."""
        rest = self._replaced()
        self._undecoded.clear()
        self._append(rest, from_draft)

    def take(self, finished: bool) -> list[Piece]:
        """The text released since the last call, in one piece a token; all remaining text when `finished`."""
        end = len(self.text) if finished else len(self.text) - self._stop.pending
        pieces: list[Piece] = []
        for boundary, from_draft in self._boundaries:
            stop = min(boundary, end)
            if stop > self._released:
                pieces.append(Piece(self.text[self._released : stop], from_draft))
                self._released = stop
        self._boundaries = [b for b in self._boundaries if b[0] > self._released]
        return pieces

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The fewest last tokens of the prompt that decode to whole characters; none where that takes too many."""
        for length in CONTEXT_TOKENS:
            context = list(prompt_token_ids[-length:])
            if "\ufffd" not in self._backend.decode(context, skip_special_tokens=False):
                return context
        return []

    def _replaced(self) -> str:
        """The undecoded tokens as text, with replacement characters for invalid bytes."""
        text: str = self._backend.decode(self._undecoded, skip_special_tokens=self._skip_special_tokens)
        return text

    def _append(self, text: str, from_draft: bool) -> None:
        self.text += text
        self._stop.follow(text)
        self._boundaries.append((len(self.text), from_draft))

    def _find_stop(self, searched: int) -> str | None:
        """The earliest stop string that is not within `text[:searched]`; cuts the text there."""
        found = self._stop.find(self.text, searched) if self._stop else None
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop


def _hidden(backend: Any, stop: Sequence[str]) -> dict[int, str]:
    """The stop strings that are special tokens, by token id: decoding without special tokens never shows them."""
    if not stop:
        return {}
    # Not by what it decodes to: a lone space of SentencePiece decodes to nothing as well.
    added = backend.get_added_tokens_decoder()
    return {
        token_id: token.content
        for token_id, token in added.items()
        if token.special and token.content in stop
    }


class NoText(TextStream):
    """The stream of a request with `detokenize=False`: nothing is decoded."""

    def push(self, token_id: int, from_draft: bool, check_stop: bool = True) -> None:
        """Does nothing."""

    def flush(self, from_draft: bool = False) -> None:
        """Does nothing."""
