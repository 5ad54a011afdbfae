"""The text that a caller expects as the answer, in the target's tokens and in bytes.

An expected text is tokenised once. Tokens are compared by their bytes, because after a difference the target may cut
the same words otherwise: then the text goes on in the middle of a token, whose rest is tokenised anew.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import accumulate
from typing import Any

from slipstream.errors import PredictionError, VocabularyMismatchError
from slipstream.text.block_index import BlockIndex
from slipstream.text.prediction import Prediction
from slipstream.text.retokenize import Encoder
from slipstream.text.token_bytes import TokenBytes

MENDED_BYTES = 48
"""So many bytes behind a cut through a token are tokenised anew, up to the end of the token that they end in."""

SCANNED_BYTES = 8192
"""So much of the text is searched as it is; the places of a longer one are looked up."""


def _mark(token_id: int) -> bytes:
    """Bytes that stand for a token without any: they begin with one that no text has."""
    return b"\xff" + token_id.to_bytes(4, "big")


class ExpectedText:
    """An expected answer. It never changes, so the answers of one request share it."""

    def __init__(
        self,
        token_ids: Seq[int],
        bytes_of: Callable[[int], bytes] = _mark,
        encode: Callable[[bytes], Seq[int]] | None = None,
    ) -> None:
        """`bytes_of` gives the bytes of any token, and `encode` the tokens of bytes within a text. Without `encode`
        nothing is tokenised anew."""
        self.token_ids = tuple(token_ids)
        self.bytes_of = bytes_of
        self._encode = encode
        pieces = [bytes_of(token_id) for token_id in self.token_ids]
        self.data = b"".join(pieces)
        self.starts = (0, *accumulate(map(len, pieces)))
        """Where each token begins in `data`, and the end."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __deepcopy__(self, memo: dict[int, object]) -> ExpectedText:
        return self

    def token_after(self, offset: int) -> int:
        """The first token that begins at `offset` of the bytes, or behind it; the number of tokens at the end."""
        return bisect_left(self.starts, offset)

    def token_at(self, offset: int) -> int:
        """The token in which `offset` lies; the number of tokens at the end."""
        return min(bisect_right(self.starts, offset) - 1, len(self.token_ids))

    @cached_property
    def _index(self) -> BlockIndex:
        return BlockIndex(self.data)

    def find(self, passage: bytes, begin: int) -> int:
        """Return where a passage of at least `block_index.LEAST_BYTES` is: at `begin` of the bytes or behind it, else
        the first place before; -1 where it is nowhere. Only the first search of a long text takes the longer the longer
        it is."""
        near = self.data.find(passage, begin, begin + SCANNED_BYTES)
        if near >= 0 or (begin == 0 and len(self.data) <= SCANNED_BYTES):
            return near
        if len(self.data) <= SCANNED_BYTES:
            return self.data.find(passage)
        return self._index.find(passage, begin)

    def tokens_from(self, offset: int, num: int) -> tuple[int, ...]:
        """The next tokens after the first `offset` bytes, at most `num`; a cut through a token is mended."""
        first = self.token_after(offset)
        if first < len(self.starts) and self.starts[first] == offset:
            return self.token_ids[first : first + num]
        if self._encode is None:
            return ()
        last = self.token_after(min(offset + MENDED_BYTES, len(self.data)))
        mended = tuple(self._encode(self.data[offset : self.starts[last]]))
        return (*mended, *self.token_ids[last : last + num])[:num]


class PredictionEncoder:
    """Makes the expected texts of one target."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int) -> None:
        """`vocab_size` is the width of the logits, `max_model_len` the most tokens of prompt and answer together."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    @cached_property
    def _encoder(self) -> Encoder | None:
        """None where the tokens of the target do not represent bytes: then they are compared as such."""
        try:
            return Encoder(self._tokenizer, TokenBytes(self._tokenizer, "the target"))
        except (VocabularyMismatchError, AttributeError):
            return None

    def tokens(self, prediction: Prediction) -> tuple[int, ...]:
        """The tokens of what is expected; raises `PredictionError` where it is too long or not of this vocabulary.

        May be called from any thread.
        """
        encoder = self._encoder
        if not isinstance(prediction, str):
            token_ids: Seq[int] = prediction
        elif encoder is None:
            token_ids = self._tokenizer(prediction, add_special_tokens=False, verbose=False).input_ids
        else:
            data = prediction.encode()
            if len(data) > self._max_model_len * max(map(len, encoder.tokens.ordinary.values())):
                raise PredictionError(
                    f"the prediction has {len(data)} bytes, but prompt and answer together may have "
                    f"{self._max_model_len} tokens; shorten it"
                )
            token_ids, _ = encoder.encode(data)
        if len(token_ids) > self._max_model_len:
            raise PredictionError(
                f"the prediction has {len(token_ids)} tokens, but prompt and answer together may have "
                f"{self._max_model_len}; shorten it"
            )
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self._vocab_size:
                raise PredictionError(
                    f"token id {token_id} in the prediction is outside the vocabulary; use 0 to {self._vocab_size - 1}"
                )
        return tuple(token_ids)

    def encode(self, prediction: Prediction) -> ExpectedText:
        """The expected text of a prediction, or of what `tokens` has made of it; errors as there.

        May be called from any thread.
        """
        token_ids, encoder = self.tokens(prediction), self._encoder
        if encoder is None:
            return ExpectedText(token_ids)
        tokens = encoder.tokens

        def bytes_of(token_id: int) -> bytes:
            if token_id in tokens.special:
                return tokens.special[token_id].encode()
            return tokens.ordinary.get(token_id) or _mark(token_id)

        def rest(data: bytes) -> Seq[int]:
            token_ids, _ = encoder.encode(data)
            return [token_id for token_id in token_ids if token_id < self._vocab_size]

        return ExpectedText(token_ids, bytes_of, rest)
