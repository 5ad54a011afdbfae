"""Token masks of one answer under a grammar."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from slipstream.sampling.grammars.footprint import GrammarMemory

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Grammar:
    """The grammar of one answer.

    Masks are a function of the text alone: nothing has to be rolled back after a rejected draft. Internally there is a
    tree of matchers below the current text, each a copy of its parent's with one more token. (A copy takes about 50 ns
    for each token of the text. Rolling one matcher back would be cheaper, but with llguidance 1.9.1 masks are sometimes
    too narrow after a rollback in a recursive grammar.)

    Stop tokens are allowed exactly where the grammar accepts the text so far, whatever their bytes are. The model's end
    tokens that are not stop tokens of this request are never allowed.
    """

    def __init__(
        self,
        start: LLMatcher,
        end_token_ids: Iterable[int],
        stop_token_ids: Iterable[int],
        vocab_size: int,
        footprint: GrammarMemory | None = None,
    ) -> None:
        """`start` is a matcher that has consumed nothing; only copies of it consume tokens. `vocab_size` is the width
        of the target's logits. `footprint` is shared by all copies of `start`."""
        self._start = start
        self._footprint = footprint or GrammarMemory()
        self._vocab_size = vocab_size
        self._stop = frozenset(token for token in stop_token_ids if token < vocab_size)
        self._ends = self._stop | frozenset(end_token_ids)
        self._stop_bits = bits(self._stop)
        self._text_bits = (1 << vocab_size) - 1 & ~bits(self._ends)
        self._output: list[int] = []
        self._matchers: dict[tuple[int, ...], LLMatcher | None] = {(): start}
        """Path to the matcher after `_output` and that path; None where the grammar rejects it."""
        self._masks: dict[tuple[int, ...], int] = {}
        """Path to the mask after `_output` and that path."""

    def copy(self) -> Grammar:
        """The same grammar for another answer."""
        return Grammar(self._start, self._ends, self._stop, self._vocab_size, self._footprint)

    def mask(self, output: Seq[int], path: Seq[int] = ()) -> int:
        """The tokens that may follow `output` and `path`, token i as bit i.

        0 after a stop token and after a text that the grammar rejects.
        """
        self._turn_to(list(output))
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._compute(key)
        return self._masks[key]

    def allowed(self, output: Seq[int], paths: Seq[Seq[int]], width: int) -> torch.Tensor:
        """`mask` of each path as booleans, [len(paths), width]."""
        num_bytes, within = (width + 7) // 8, (1 << width) - 1
        rows = [(self.mask(output, path) & within).to_bytes(num_bytes, "little") for path in paths]
        packed = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), num_bytes)
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=width, bitorder="little")).bool()

    def forced(self, output: Seq[int], path: Seq[int] = ()) -> int | None:
        """The only token that may follow, unless it ends the answer; None where several may follow."""
        mask = self.mask(output, path)
        if mask.bit_count() != 1 or not mask & self._text_bits:
            return None
        return mask.bit_length() - 1

    def ended(self, output: Seq[int]) -> bool:
        """True where only a stop token may follow, or nothing."""
        return not self.mask(output) & self._text_bits

    def accepts(self, output: Seq[int]) -> bool:
        """True where `output`, without stop tokens, is a complete text of the grammar."""
        self._turn_to(list(output))
        matcher = self._matcher(())
        return matcher is not None and not matcher.is_error() and bool(matcher.is_accepting())

    def _turn_to(self, output: list[int]) -> None:
        """Make `output` the current text; matchers and masks below it are kept, all others dropped."""
        if output == self._output:
            return
        length = len(self._output)
        if output[:length] == self._output:
            taken = tuple(output[length:])
            root = self._behind(taken)
            self._matchers = _below(taken, self._matchers)
            self._masks = _below(taken, self._masks)
        else:
            root = self._advance(self._start, output)
            self._matchers, self._masks = {}, {}
        self._matchers[()] = root
        self._output = output

    def _behind(self, taken: tuple[int, ...]) -> LLMatcher | None:
        """The matcher after `_output` and `taken`; tokens without a matcher are consumed in one call."""
        known = min(len(taken), max(map(len, self._matchers)))
        while taken[:known] not in self._matchers:
            known -= 1
        above = self._matchers[taken[:known]]
        return above if above is None or known == len(taken) else self._advance(above, taken[known:])

    def _matcher(self, path: tuple[int, ...]) -> LLMatcher | None:
        if path not in self._matchers:
            above = self._matcher(path[:-1])
            self._matchers[path] = None if above is None else self._advance(above, path[-1:])
        return self._matchers[path]

    def _advance(self, matcher: LLMatcher, token_ids: Seq[int]) -> LLMatcher | None:
        """A copy that has consumed the tokens; None where it rejects one of them, or one is an end token."""
        if not self._ends.isdisjoint(token_ids):
            return None
        copy = matcher.deep_copy()
        taken = self._footprint.during(lambda: copy.try_consume_tokens(list(token_ids)), time.thread_time)
        return copy if taken == len(token_ids) and not self._failed(copy) else None

    def _compute(self, path: tuple[int, ...]) -> int:
        matcher = self._matcher(path)
        if matcher is None:
            return 0
        allowed = self._footprint.during(matcher.compute_bitmask, time.thread_time)
        mask = int.from_bytes(allowed, "little") & self._text_bits
        accepts = matcher.is_accepting()
        if self._failed(matcher):
            return 0
        return mask | self._stop_bits if accepts else mask

    def _failed(self, matcher: LLMatcher) -> bool:
        """True where nothing may follow, or a limit of llguidance or of memory is exceeded."""
        if self._footprint.exceeded:
            logger.warning("a grammar exceeds its memory limit, so its answers end")
            return True
        if matcher.is_error() and not is_dead_end(matcher):
            first_line = matcher.get_error().partition("\n")[0]
            logger.warning("a grammar exceeds a limit, so its answer ends: %s", first_line)
        return bool(matcher.is_error())


def is_dead_end(matcher: LLMatcher) -> bool:
    """True where llguidance's error only means that nothing may follow."""
    return bool(matcher.get_error().startswith("NoExtension"))


def _below(taken: tuple[int, ...], nodes: dict[tuple[int, ...], T]) -> dict[tuple[int, ...], T]:
    """The values of paths that begin with `taken`, keyed by the rest of the path."""
    return {path[len(taken) :]: value for path, value in nodes.items() if path[: len(taken)] == taken}


def bits(token_ids: Iterable[int]) -> int:
    """A set of tokens as an integer, token i as bit i."""
    tokens = np.fromiter(token_ids, dtype=np.int64)
    flags = np.zeros(tokens.max(initial=-1) + 1, dtype=bool)
    flags[tokens] = True
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
