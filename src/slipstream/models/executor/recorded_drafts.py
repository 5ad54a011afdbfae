"""Whole drafts as one recording: all passes over their levels, and what is drawn between them.

The host knows beforehand where every row of every level lies and what it sees, but for the tokens and ranks that the
device draws. So one buffer holds the numbers of all passes, one copy fills it, and one replay draws all.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.kv.upload import upload
from slipstream.models.attention.base import AttentionPass
from slipstream.models.attention.triton import TritonAttention
from slipstream.models.batch import BatchTensors, Bucket, ForwardBatch
from slipstream.models.cuda.attention_plan import AttentionPlan
from slipstream.models.cuda.tree_attention import Reads
from slipstream.models.executor.levels import DraftShape, PendingDrafts, draw_levels, draw_marginals
from slipstream.models.executor.pass_layout import ROWS, WANTED, PassLayout, PassShape, doubled, plan_sizes
from slipstream.models.executor.recording import Graph, RecordedPass, on_device, why_not_recorded

log = logging.getLogger(__name__)

MOST_FIRST_ROWS = 256
"""Rows of the first pass up to which drafts are recorded: more are those of prompts, whose sizes are many."""
LEAST_SEEN = 16
"""The smallest arrays of single entries."""

Plan = Callable[[ForwardBatch, KVPool], AttentionPlan]


class DraftStep(Protocol):
    """Computes one level."""

    def __call__(
        self, level: int, rows: ForwardBatch, attention: AttentionPass, given: Tensor | None, /
    ) -> tuple[Tensor, Tensor | None]:
        """The logits of the wanted rows, and states [rows, ...] where the next level starts from some. `given`
        [rows, ...] are those that the rows start from, at level 0 what `FirstStates` says."""


class FirstStates(NamedTuple):
    """What the rows of the first pass start from: read from where it lies while it is replayed."""

    read: Callable[[Tensor], Tensor]
    """int64 [rows] -> [rows, ...]"""
    places: Seq[int]
    """Of each row."""


class DraftRecorder:
    """Records drafts of one model or head, one graph for each shape, and replays them."""

    def __init__(self, graph: type[Graph], device: torch.device) -> None:
        self._graph, self._device = graph, device
        self._recorded: weakref.WeakKeyDictionary[KVPool, dict[Hashable, RecordedPass[Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.RLock()
        self.num_replayed = 0
        """Drafts of any number of texts that a graph drew."""
        self.refused: Counter[str] = Counter()
        """Drafts that none did, by why."""
        self.failure: str | None = None
        """Why drafts of this model cannot be recorded."""

    def draw(
        self, pool: KVPool, shape: Hashable, numbers: Seq[NDArray[np.int64]], compute: Callable[..., Tensor],
        fill_in: Callable[..., None] | None = None,
    ) -> Tensor | None:  # fmt: skip
        """What `compute` yields for tensors with these numbers; None where it cannot be recorded. `shape` says all that
        it depends on besides. `pool` is a cache that it writes to. `fill_in` is given the tensors before, and writes
        what the device alone knows."""
        if self.failure is not None:
            return self.refuse(self.failure)
        sizes = [part.size for part in numbers]

        def compute_all(buffer: Tensor) -> Tensor:
            return compute(*torch.split(buffer, sizes))

        with on_device(self._device), self._lock:
            recorded = self._recorded.setdefault(pool, {})
            if shape not in recorded:
                recorded[shape] = RecordedPass(self._graph(), sum(sizes), self._device, compute_all)
            try:
                flat = np.concatenate([part.ravel() for part in numbers])
                uploaded = upload(flat, self._device)
                if fill_in is not None:
                    fill_in(*torch.split(uploaded, sizes))
                drawn = recorded[shape].replay(uploaded).clone()
            except RuntimeError as error:
                self.failure = why_not_recorded(error)
                self._recorded.clear()  # no graph is replayed any more
                log.warning("drafts are not recorded: %s", self.failure)
                return self.refuse(self.failure)
        self.num_replayed += 1
        return drawn

    def refuse(self, reason: str) -> Tensor | None:
        """Count drafts that are not drawn by a graph; None, for the caller to hand on."""
        self.refused[reason] += 1
        return None


class RecordedRows(NamedTuple):
    """The rows of one pass of a recording, padded, and where their numbers lie."""

    rows: ForwardBatch
    plan: AttentionPlan
    shape: PassShape

    @classmethod
    def of(cls, rows: ForwardBatch, plan: AttentionPlan, bucket: Bucket, least: float = 0.0) -> RecordedRows:
        """Padded rows, with room for as many partials as their plan has, or `least` a row."""
        sizes = plan_sizes(rows.num_rows, max(plan.sizes.num_partials, int(least * rows.num_rows)))
        return cls(rows, plan, PassShape(bucket, sizes, (), False, False))

    @property
    def layout(self) -> PassLayout:
        return PassLayout(self.shape, self.rows.buffer.size)

    def numbers(self) -> NDArray[np.int64]:
        return self.layout.numbers(self.rows, self.plan, None)

    def views(self, part: Tensor) -> BatchTensors:
        return self.rows.views(self.layout.part(part, "batch"))

    def attention(self, pool: KVPool, views: BatchTensors, part: Tensor) -> TritonAttention:
        items, partials = self.layout.part(part, "items"), self.layout.part(part, "partials")
        return TritonAttention(
            pool, Reads.of(views, items.view(-1, 5), partials), self.shape.plan.num_partials
        )


def draw_by_passes(
    recorder: DraftRecorder, rows: ForwardBatch, pool: KVPool, drafts: PendingDrafts, plan: Plan, step: DraftStep,
    given: FirstStates | None = None, rows_per_draft: int = 2,
) -> Tensor | None:  # fmt: skip
    """What the levels of `drafts` have drawn behind the wanted rows, a pass of `step` a level; None where that cannot
    be recorded. `rows_per_draft` is how many rows of a text the first pass has at most, unless the text lags behind."""
    number, fed = doubled(rows.num_logit_rows), (1, *drafts.shape.fed)
    usual = rows_per_draft * number
    reason = refusal(rows.num_rows, usual, number, max(fed), pool)
    if reason is not None:
        return recorder.refuse(reason)
    passes = _passes(rows, pool, drafts, plan, room_for(rows.num_rows, usual))
    if not all(each.rows.contiguous for each in passes):
        return recorder.refuse("slots that are not consecutive")
    table = with_room(drafts.numbers(), number)
    places = np.array([[] if given is None else given.places], np.int64)
    places = with_room(places, passes[0].rows.num_rows)
    shape: DraftShape = drafts.shape

    def compute(table: Tensor, places: Tensor, *parts: Tensor) -> Tensor:
        levels = shape.levels(table.view(-1, number))

        def run(level: int, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
            own, part = passes[level], parts[level]
            views = own.views(part)
            if level:
                views = views.filled(levels.tokens, levels.ranks)
            own.rows.read(part.device, views)
            begun = None if given is None else given.read(places) if states is None else _padded(states, own)
            logits, made = step(level, own.rows, own.attention(pool, views, part), begun)
            return logits, None if made is None else made[views.logit_rows]

        return draw_levels(levels, len(passes), run)

    def fill_in(table: Tensor, places: Tensor, *parts: Tensor) -> None:
        drafts.fill_in(table.view(-1, number))
        shifts = passes[0].rows.shifts
        if given is not None and shifts is not None:
            places[: len(shifts)] += shifts.to(places.device)
        for level, (own, part) in enumerate(zip(passes, parts, strict=True)):
            drafted = (
                None if level else own.rows.drafted
            )  # the tokens of later levels are filled in as they are drawn
            own.views(part).fill_in(drafted, None, own.rows.shifts)

    key = (number, shape, tuple(each.shape for each in passes), given is not None)
    return recorder.draw(pool, key, [table, places, *(each.numbers() for each in passes)], compute, fill_in)


def draw_by_one_pass(
    recorder: DraftRecorder, rows: ForwardBatch, pool: KVPool, drafts: PendingDrafts, plan: Plan, step: DraftStep,
    given: FirstStates | None = None,
) -> Tensor | None:  # fmt: skip
    """As `draw_by_passes`, from one pass: a draft's levels are its wanted rows, all alike for the nodes of a level."""
    depth, shape = 1 + len(drafts.shape.fed), drafts.shape
    number = doubled(rows.num_logit_rows // depth)
    usual = 2 * depth * number  # the masks, and what a whole draft has become
    reason = refusal(rows.num_rows, usual, number, max((depth, *shape.fed)), pool)
    if reason is not None:
        return recorder.refuse(reason)
    bucket = Bucket(room_for(rows.num_rows, usual), number * depth, LEAST_SEEN)
    padded = ForwardBatch(rows.groups, bucket, pool.scratch)
    if not padded.contiguous:
        return recorder.refuse("slots that are not consecutive")
    own = RecordedRows.of(padded, plan(padded, pool), bucket)
    places = np.array([[] if given is None else given.places], np.int64)

    def compute(table: Tensor, places: Tensor, part: Tensor) -> Tensor:
        views = own.views(part)
        padded.read(part.device, views)
        begun = None if given is None else given.read(places)
        logits, _ = step(0, padded, own.attention(pool, views, part), begun)
        return draw_marginals(shape, table.view(-1, number), logits)

    numbers = [with_room(drafts.numbers(), number), with_room(places, padded.num_rows), own.numbers()]
    return recorder.draw(pool, ("one pass", number, shape, own.shape, given is not None), numbers, compute)


def refusal(num_rows: int, usual: int, number: int, widest: int, pool: KVPool) -> str | None:
    """Why drafts are not recorded that begin with so many rows, where `usual` are many, and of which a pass has up to
    `widest` wanted rows each of `number`."""
    if not pool.scratch:
        return "a cache without slots for rows that fill a pass"
    if num_rows > min(max(MOST_FIRST_ROWS, usual), ROWS[-1]) or number * widest > most_wanted(widest):
        return "too many rows"
    return None


def room_for(num_rows: int, usual: int) -> int:
    """The rows of a bucket for so many, and for `usual` ones unless these are many."""
    return next(size for size in ROWS if size >= max(num_rows, min(usual, MOST_FIRST_ROWS)))


def most_wanted(widest: int) -> int:
    """The most rows of a pass of drafts whose logits are wanted, of which a draft has up to `widest`. Of trees' rows
    more is kept while they are drawn."""
    return WANTED[-1] if widest == 1 else WANTED[0]


def with_room(numbers: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """[rows, n], with zeros behind them up to [rows, width]."""
    return np.pad(numbers, ((0, 0), (0, width - numbers.shape[1])))


def _passes(
    rows: ForwardBatch, pool: KVPool, drafts: PendingDrafts, plan: Plan, first_rows: int
) -> list[RecordedRows]:  # fmt: skip
    """The passes of all levels. Of those behind the first all have room for the same attention."""
    number, fed = doubled(rows.num_logit_rows), drafts.shape.fed
    seen = [LEAST_SEEN, *(max(LEAST_SEEN, number * count * depth) for depth, count in enumerate(fed, 1))]
    padded: list[tuple[ForwardBatch, Bucket]] = []
    for level, (count, num_seen) in enumerate(zip((1, *fed), seen, strict=True)):
        groups = drafts.rows(level, pool.scratch) if level else rows.groups
        num_rows = room_for(number * count, 0) if level else first_rows
        bucket = Bucket(num_rows, number * count, num_seen)
        padded.append((ForwardBatch(groups, bucket, pool.scratch), bucket))
    plans = [plan(each, pool) for each, _ in padded]
    most = max([each.sizes.num_partials / each.sizes.num_rows for each in plans[1:]], default=0.0)
    return [
        RecordedRows.of(each, own, bucket, most if level else 0.0)
        for level, ((each, bucket), own) in enumerate(zip(padded, plans, strict=True))
    ]


def _padded(states: Tensor, own: RecordedRows) -> Tensor:
    """A row for each of a pass."""
    return torch.nn.functional.pad(states, (0, 0, 0, own.rows.num_rows - len(states)))
