"""Which tokens may follow a text that must keep to a grammar."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)


class Grammar:
    """The constraint on one answer.

    Its answers are a function of the text alone: whoever asks about a node of a tree need not put anything back. Inside
    is one matcher, moved from text to text by rollback, and a memory of the masks around the text asked about last.

    Stop tokens, whatever they say as text, are allowed exactly where the grammar accepts the text so far. The model's
    end tokens that are no stop tokens of this request never are.
    """

    def __init__(
        self, start: LLMatcher, end_token_ids: Iterable[int], stop_token_ids: Iterable[int], vocab_size: int
    ) -> None:
        """`start` is a matcher that has consumed nothing, and never will: it is copied. `vocab_size` is the width of
        the target's logits."""
        self._start = start
        self._vocab_size = vocab_size
        self._stop = frozenset(stop_token_ids)
        self._ends = self._stop | frozenset(end_token_ids)
        self._stop_bits = _bits(self._stop)
        self._text_bits = (1 << vocab_size) - 1 & ~_bits(self._ends)
        self._matcher = start.deep_copy()
        self._consumed: list[int] = []
        """What the matcher stands behind."""
        self._output: list[int] = []
        self._masks: dict[tuple[int, ...], int] = {}
        """What may follow `_output` and each path."""

    def copy(self) -> Grammar:
        """The same constraint for another answer."""
        return Grammar(self._start, self._ends, self._stop, self._vocab_size)

    def mask(self, output: Seq[int], path: Seq[int] = ()) -> int:
        """The tokens that may follow `output` and `path`, token i as bit i.

        0 behind a stop token, and behind a text that the grammar refuses.
        """
        self._turn_to(list(output))
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._compute([*self._output, *key])
        return self._masks[key]

    def allowed(self, output: Seq[int], paths: Seq[Seq[int]], width: int) -> torch.Tensor:
        """`mask` of each path as booleans, [len(paths), width]."""
        num_bytes, within = (width + 7) // 8, (1 << width) - 1
        rows = [(self.mask(output, path) & within).to_bytes(num_bytes, "little") for path in paths]
        packed = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), num_bytes)
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=width, bitorder="little")).bool()

    def forced(self, output: Seq[int], path: Seq[int] = ()) -> int | None:
        """The one token that may follow, where there is just one and it does not end the answer."""
        mask = self.mask(output, path)
        if mask.bit_count() != 1 or not mask & self._text_bits:
            return None
        return mask.bit_length() - 1

    def ended(self, output: Seq[int]) -> bool:
        """True where nothing may follow but a stop token."""
        return not self.mask(output) & self._text_bits

    def _turn_to(self, output: list[int]) -> None:
        """Make `output` the text around which masks are remembered. Those of the path it took stay known."""
        if output == self._output:
            return
        length = len(self._output)
        taken = tuple(output[length:])
        if output[:length] == self._output:
            self._masks = {
                path[len(taken) :]: mask for path, mask in self._masks.items() if path[: len(taken)] == taken
            }
            self._roll_back(min(length, len(self._consumed)))
        else:
            self._masks = {}
        self._output = output

    def _compute(self, text: list[int]) -> int:
        if not self._move_to(text):
            return 0
        mask = int.from_bytes(self._matcher.compute_bitmask(), "little") & self._text_bits
        accepts = self._matcher.is_accepting()
        if self._matcher.is_error():
            self._fail()
            return 0
        return mask | self._stop_bits if accepts else mask

    def _move_to(self, text: list[int]) -> bool:
        """Put the matcher behind `text`; False where the grammar refuses it."""
        common = min(len(self._consumed), len(self._output))
        if self._consumed[:common] != text[:common]:
            common = 0
        for mine, asked in zip(self._consumed[common:], text[common:], strict=False):
            if mine != asked:
                break
            common += 1
        self._roll_back(common)
        wanted = text[common:]
        ordinary = next((i for i, token in enumerate(wanted) if token in self._ends), len(wanted))
        taken = self._matcher.try_consume_tokens(wanted[:ordinary]) if ordinary else 0
        self._consumed += wanted[:taken]
        if self._matcher.is_error():
            self._fail()
            return False
        return taken == len(wanted)

    def _roll_back(self, length: int) -> None:
        if length < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - length)
            del self._consumed[length:]

    def _fail(self) -> None:
        """A matcher that has failed stays so: begin again with a fresh one, and let nothing follow this text."""
        logger.warning("the grammar cannot be followed further: %s", self._matcher.get_error())
        self._matcher = self._start.deep_copy()
        self._consumed = []


def _bits(token_ids: Iterable[int]) -> int:
    return sum(1 << token for token in set(token_ids))
