"""From committed tokens to text that may be shown: UTF-8 and stop strings are never shown half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from slipstream.text.stop_strings import StopStrings

CONTEXT_TOKENS = range(6, 12)
"""How many prompt tokens the decoder sees first, so that a leading space is decoded as in running text. More are
taken where fewer would begin inside a character."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown now, and whether a draft token or the target's own yielded it."""

    text: str
    from_draft: bool


class TextStream:
    """Decodes one answer token by token, finds stop strings, and releases what can no longer change.

    Text that could be the beginning of a stop string is held back until it is known not to be; a character whose
    bytes are spread over several tokens appears with its last one.
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
        self._include_stop = include_stop
        self._undecoded: list[int] = []
        self._boundaries: list[tuple[int, bool]] = []  # (end of a token's text, from_draft)
        self._released = 0
        self.text = ""
        """Everything decoded so far; cut at the stop string once one was found."""

    def push(self, token_id: int, from_draft: bool, check_stop: bool = True) -> str | None:
        """Add a committed token; returns the stop string that it completes, if any, and cuts the text there."""
        self._undecoded.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except (
            Exception
        ):  # the decoder gives up on bytes that no character begins with; a sampler may draw them
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
        """The answer has ended: decode what is left, replacing bytes that never became a character."""
        rest = self._replaced()
        self._undecoded.clear()
        self._append(rest, from_draft)

    def take(self, finished: bool) -> list[Piece]:
        """The text released since the last call, token by token; everything that is left when `finished`."""
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
        """The prompt's last tokens, as few as decode to whole characters; none where that takes too many."""
        for length in CONTEXT_TOKENS:
            context = list(prompt_token_ids[-length:])
            if "\ufffd" not in self._backend.decode(context, skip_special_tokens=False):
                return context
        return []

    def _replaced(self) -> str:
        """What is not yet decoded, with a replacement for every byte that is no character."""
        text: str = self._backend.decode(self._undecoded, skip_special_tokens=self._skip_special_tokens)
        return text

    def _append(self, text: str, from_draft: bool) -> None:
        self.text += text
        self._stop.follow(text)
        self._boundaries.append((len(self.text), from_draft))

    def _find_stop(self, searched: int) -> str | None:
        """The stop string that begins earliest in the text behind `searched`, less what may reach back."""
        found = self._stop.find(self.text, searched) if self._stop else None
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop


class NoText(TextStream):
    """For who wants no text: nothing is decoded."""

    def push(self, token_id: int, from_draft: bool, check_stop: bool = True) -> None:
        """Nothing becomes of the token."""

    def flush(self, from_draft: bool = False) -> None:
        """There is nothing left."""
