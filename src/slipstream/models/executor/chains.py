"""Whole draft chains: how the tokens of each are chosen, and what was drawn so far."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.pending import PendingNumbers
from slipstream.kv.slots import SlotMap
from slipstream.kv.upload import across, upload
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu.structs import ChainsStruct, DrawingStruct
from slipstream.models.cuda.filters import NO_FILTERS, filter_numbers, filters_of
from slipstream.models.executor.levels import NOT_FINITE, ChainsShape, choose_level
from slipstream.models.executor.recording import on_device
from slipstream.models.rows import RowGroup
from slipstream.sampling.noise import choose_rows
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor

ENDED = -2
"""In place of a token: the chain ends, for lack of confidence."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How the tokens of one chain are chosen from the draft's logits."""

    temperature: float
    """0: each is the most probable token."""
    keys: Seq[int]
    """Keys of the noise at each position that the chain may reach; see `slipstream.sampling.noise`."""
    top_k: int = 0
    """0: no filter; the others' are 1 and 0. They are those of `SamplingParams`."""
    top_p: float = 1.0
    min_p: float = 0.0
    least_confidence: float = 0.0
    """The chain ends before the product of the highest probabilities falls below this."""
    earlier: Seq[int] = ()
    """Keys of the positions before those, where the host does not know at which of all these the chain begins."""
    shift: Tensor | None = None
    """int64 [1]: which it is, counted from where `keys` say."""
    greedy: bool = False
    """Always the most probable token: temperature and filters count for the confidence only."""

    @property
    def is_blind(self) -> bool:
        """Whether the chain goes on however probable its tokens are."""
        return not self.least_confidence

    @property
    def filters(self) -> tuple[int, float, float]:
        """top-k, top-p and the logarithm of min-p where they decide about tokens."""
        is_drawn = self.temperature > 0 and not self.greedy
        return filters_of(self.top_k, self.top_p, self.min_p) if is_drawn else NO_FILTERS

    @property
    def struct(self) -> DrawingStruct:
        return DrawingStruct(
            self.min_p,
            self.top_p,
            self.least_confidence,
            self.temperature or 1.0,
            self.top_k,
            self.temperature > 0 and not self.greedy,
        )


class _End(NamedTuple):
    """The end of a text that a chain is drawn behind."""

    slots: SlotMap
    num_entries: int
    num_certain: int
    owner: int | None

    def row(self, level: int, token_ids: Seq[int]) -> RowGroup:
        """The row of a chain's last token, which level `level` is drawn behind."""
        rows = RowGroup(self.slots, self.num_entries + level - 1, token_ids, [0])
        rows.num_certain, rows.owner = self.num_certain, self.owner
        return rows


class Chains:
    """One chain for each row of a pass whose logits are wanted.

    An executor draws them level by level with `take`, or in one call that reads and writes `struct`, as chain.h says.
    """

    def __init__(
        self, draws: Seq[Draw], num_tokens: int, may_pend: bool = False, onto: torch.device | None = None
    ) -> None:  # fmt: skip
        """Tokens from id `num_tokens` on are never drafted. With `may_pend` chains that are drawn a pass a level may be
        `PendingNumbers`: the tokens of a level then go to the next on the device, and the host does not wait for any.
        They lie on the device `onto` in the end, None: where they were drawn.
        """
        self._may_pend, self._onto = may_pend, onto
        self.lengths: Seq[int] = [len(draw.keys) for draw in draws]
        """The most tokens of each chain."""
        self.depth = max(self.lengths)
        self.drawn: list[list[int]] = [[] for _ in draws]
        """The tokens of each chain so far; one that ends before its length ends with `NOT_FINITE` or `ENDED`."""
        self._ends: list[_End] = []
        """Where each chain begins."""
        self._draws = draws
        self._num_tokens = num_tokens
        self._likely = [1.0] * len(draws)

    @property
    def pends(self) -> bool:
        """Whether they are `PendingNumbers` where they are drawn a pass a level."""
        return self._may_pend and all(draw.is_blind for draw in self._draws)

    def begin(self, rows: ForwardBatch) -> None:
        """The chains begin behind the wanted rows of this pass.

        Raises `ValueError` where they do not fit behind them, or their entries have no slots.
        """
        lengths = iter(self.lengths)
        self._ends = []
        for group in rows.groups:
            for row in group.logit_rows:
                length = next(lengths, 0)
                if length < 1:
                    raise ValueError(f"{len(self.lengths)} chains for {rows.num_logit_rows} rows")
                needed = group.num_before + row + length  # the last token of a chain has no entry
                if needed > len(group.slots):
                    raise ValueError(
                        f"a chain of {length} tokens needs {needed} slots, and there are {len(group.slots)}"
                    )
                if group.tail_seen is not None and row >= group.num_chain:
                    raise ValueError(
                        "a chain begins behind a row that sees all before it, not behind a tree's"
                    )
                self._ends.append(
                    _End(group.slots, group.num_before + row + 1, group.num_certain, group.owner)
                )
        if next(lengths, None) is not None:
            raise ValueError(f"{len(self.lengths)} chains for {rows.num_logit_rows} rows")

    def draw(self, rows: ForwardBatch, run: Callable[[ForwardBatch, list[int]], Tensor]) -> Seq[Seq[int]]:
        """Draw all chains behind the wanted rows, a pass a level; `run` computes the logits of a pass.

        It is given the rows of the level, one a chain that goes on, and which of the wanted rows of the pass before
        each continues; none in the first pass.
        """
        self.begin(rows)
        if self.pends:
            return self.draw_pending(rows, run)
        before = list(range(len(self._ends)))
        growing = self.take(run(rows, []))
        while growing:
            above = [before.index(chain) for chain in growing]
            below = []
            for chain in growing:
                drawn, end = self.drawn[chain], self._ends[chain]
                below.append(end.row(len(drawn), drawn[-1:]))
            before, growing = growing, self.take(run(ForwardBatch(below), above), growing)
        return self.drawn

    def draw_pending(
        self, rows: ForwardBatch, run: Callable[[ForwardBatch, list[int]], Tensor]
    ) -> list[PendingNumbers]:
        """As `draw`, without reading a token."""
        logits = run(rows, [])
        with on_device(logits.device):
            return self.pending(self._draw_all(logits, run))

    def _draw_all(self, logits: Tensor, run: Callable[[ForwardBatch, list[int]], Tensor]) -> Tensor:
        """The tokens [depth, chains], from the logits of the first pass on."""
        device, number = logits.device, len(self.lengths)
        drawn = torch.empty(self.depth, number, dtype=torch.int64, device=device)
        numbers = upload(self.numbers(), device)
        self.fill_in(numbers)
        temperatures = numbers[0].view(torch.float64).float()
        growing = list(range(number))
        for level in range(self.depth):
            above = [place for place, chain in enumerate(growing) if self.lengths[chain] > level]
            growing = [growing[place] for place in above]
            if level:
                batch = ForwardBatch([self._row(chain, level) for chain in growing])
                batch.drafted = drawn[level - 1]
                logits = run(batch, above)
            some = slice(None) if len(growing) == number else upload(growing, device)
            filters = numbers[1:4, some] if self.shape.filters else None
            own = logits[:, : self._num_tokens]
            drawn[level][some] = choose_level(own, temperatures[some], filters, numbers[4 + level][some])
        return drawn

    def pending(self, drawn: Tensor) -> list[PendingNumbers]:
        """The chains, from the tokens [depth, chains] that a device has drawn."""
        drawn = across(drawn, self._onto)
        return [PendingNumbers(drawn[:length, chain]) for chain, length in enumerate(self.lengths)]

    @cached_property
    def shape(self) -> ChainsShape:
        """See `levels.PendingDrafts`, as for `numbers`, `fill_in` and `rows`."""
        has_filters = any(draw.filters != NO_FILTERS for draw in self._draws)
        return ChainsShape(self.depth, self._num_tokens, has_filters)

    def rows(self, level: int, scratch: range) -> list[RowGroup]:
        return [
            self._row(chain, level) if level < length else RowGroup(scratch, 0, [0], [0])
            for chain, length in enumerate(self.lengths)
        ]

    def _row(self, chain: int, level: int) -> RowGroup:
        """The row of a chain's last token, which level `level` is drawn behind."""
        row = self._ends[chain].row(level, [-1 - chain])
        row.shift = self._draws[chain].shift
        return row

    def fill_in(self, numbers: Tensor) -> None:
        """The keys of where the chains begin, which the device alone may know, into `numbers` that lie there."""
        most = max(len(draw.earlier) for draw in self._draws)
        if not most:
            return
        device, number = numbers.device, len(self._draws)
        keys = np.zeros((most + self.depth, number), np.uint64)
        for chain, draw in enumerate(self._draws):
            own = [*draw.earlier, *draw.keys]
            keys[most - len(draw.earlier) :][: len(own), chain] = own
        none = torch.zeros(1, dtype=torch.int64, device=device)
        shifts = torch.cat([none if draw.shift is None else draw.shift.to(device) for draw in self._draws])
        levels = torch.arange(most, most + self.depth, device=device)[:, None] + shifts
        known = upload(keys.view(np.int64), device)
        numbers[4:, :number] = known.gather(0, levels.clamp(min=0))  # greedy ones have none

    def numbers(self) -> NDArray[np.int64]:
        """[4 + depth, chains]: the bits of the temperatures as float64, the filters, and the keys' bits, 0 behind a
        chain's end."""
        numbers = np.zeros((4 + self.depth, len(self._draws)), np.int64)
        heats = [0.0 if draw.greedy else draw.temperature for draw in self._draws]
        numbers[0] = np.array(heats, np.float64).view(np.int64)
        numbers[1:4] = filter_numbers([draw.filters for draw in self._draws])
        for chain, draw in enumerate(self._draws):
            numbers[4 : 4 + len(draw.keys), chain] = np.array(draw.keys, np.uint64).view(np.int64)
        return numbers

    def draw_levels(self, logits: Callable[[list[int]], Tensor], firsts: Seq[int]) -> list[list[int]]:
        """Draw all chains from logits that do not depend on what is drawn.

        `logits` gives those of some rows, [n, vocab]; a chain's levels are the rows from its own of `firsts` on.
        """
        growing, level = list(range(len(firsts))), 0
        while growing:
            growing = self.take(logits([firsts[chain] + level for chain in growing]), growing)
            level += 1
        return self.drawn

    def take(self, logits: Tensor, growing: Seq[int] | None = None) -> list[int]:
        """Add a token to each of the chains `growing` (None: all), from `logits` [growing, vocab]; those that go on.

        The host reads from the device once, or once more where a chain may end for lack of confidence.
        """
        growing = range(len(self._draws)) if growing is None else growing
        logits = logits[:, : self._num_tokens]
        scores, keys = self._scores(logits, growing)
        likely = self._confidences(scores, growing)
        finite = logits.amax(-1).isfinite()
        chosen = torch.where(finite, choose_rows(scores, keys).to(finite.device), NOT_FINITE).tolist()
        going = []
        for chain, token_id, confidence in zip(growing, chosen, likely, strict=True):
            ends = token_id != NOT_FINITE and confidence < self._draws[chain].least_confidence
            self._likely[chain] = confidence
            self.drawn[chain].append(ENDED if ends else token_id)
            if token_id != NOT_FINITE and not ends and len(self.drawn[chain]) < self.lengths[chain]:
                going.append(chain)
        return going

    def take_level(self, growing: Seq[int]) -> list[int]:
        """As `take`, of a level that kernels have drawn in `struct`."""
        level, going = len(self.drawn[growing[0]]), []
        for chain in growing:
            token_id = self._token_ids[chain * self.depth + level]
            self.drawn[chain].append(token_id)
            if token_id not in (NOT_FINITE, ENDED) and level + 1 < self.lengths[chain]:
                going.append(chain)
        return going

    def _scores(self, logits: Tensor, growing: Seq[int]) -> tuple[Tensor, list[int | None]]:
        """What the tokens are chosen from, [growing, vocab], and the keys of the noise; None: the largest wins."""
        if all(self._draws[chain].temperature == 0 for chain in growing):
            return logits, [None] * len(growing)
        rows: list[Tensor] = []
        keys: list[int | None] = []
        for number, chain in enumerate(growing):
            draw, row = self._draws[chain], logits[number : number + 1]
            if draw.temperature:
                row = self._processors[chain].log_probs(row, [], [[]])
            rows.append(row)
            is_drawn = draw.temperature and not draw.greedy
            keys.append(draw.keys[len(self.drawn[chain])] if is_drawn else None)
        return torch.cat(rows), keys

    def _confidences(self, scores: Tensor, growing: Seq[int]) -> list[float]:
        """The product of the highest probabilities of each chain, this level's included."""
        if not any(self._draws[chain].least_confidence for chain in growing):
            return [1.0] * len(growing)
        highest = (scores.amax(-1) - scores.logsumexp(-1)).tolist()
        return [self._likely[chain] * math.exp(peak) for chain, peak in zip(growing, highest, strict=True)]

    @cached_property
    def _processors(self) -> list[LogitsProcessor]:
        """What each chain's temperature and filters do."""
        return [
            LogitsProcessor(
                SamplingParams(
                    temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p, min_p=draw.min_p
                ),
                (),
                (),
                (),
                self._num_tokens,
            )
            for draw in self._draws
        ]

    @cached_property
    def struct(self) -> ChainsStruct:
        """For kernels that draw all chains in one call; what they drew, `take_struct` reads."""
        self._lengths = array("q", self.lengths)
        self._drawings = (DrawingStruct * len(self._draws))(*(draw.struct for draw in self._draws))
        self._keys = array("Q")
        for draw in self._draws:
            self._keys.extend(draw.keys)
            self._keys.extend([0] * (self.depth - len(draw.keys)))
        self._confidences_of_struct = array("d", [1.0]) * len(self._draws)
        self._token_ids = array("q", [NOT_FINITE]) * (len(self._draws) * self.depth)
        lengths, keys, confidences, token_ids = (
            numbers.buffer_info()[0]
            for numbers in (self._lengths, self._keys, self._confidences_of_struct, self._token_ids)
        )
        drawings = ctypes.addressof(self._drawings)
        return ChainsStruct(self.depth, self._num_tokens, lengths, drawings, keys, confidences, token_ids)

    def take_struct(self) -> list[list[int]]:
        """`drawn`, as the kernels have left it in `struct`."""
        token_ids = self._token_ids.tolist()
        chains = [token_ids[i * self.depth : i * self.depth + n] for i, n in enumerate(self.lengths)]
        self.drawn = [chain[: chain.index(ENDED) + 1] if ENDED in chain else chain for chain in chains]
        return self.drawn
