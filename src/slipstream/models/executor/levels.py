"""What is drawn of drafts on a device, a level at a time, without the host: from shapes that it knows beforehand.

The same operators draw in passes that are computed one by one and in a recording of all of them (`recorded_drafts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.proposal import ROOT
from slipstream.models.cuda.choice import choose
from slipstream.models.cuda.filters import filtered, limits
from slipstream.models.executor.recording import on_device
from slipstream.models.rows import RowGroup
from slipstream.sampling.noise import gumbel_of_bits, token_counters, uniform_bits

NOT_FINITE = -1
"""In place of a token: its logits are not finite."""


class Levels(ABC):
    """The levels of some drafts so far. All tensors lie on one device."""

    tokens: Tensor
    """int64 [drafts * fed]: the tokens that the next pass is fed with, draft after draft."""
    ranks: Tensor | None = None
    """int64: what is to be added to the entries that the rows of the next pass see; None: nothing."""
    above: Tensor | None = None
    """int64 [drafts * fed]: the row of the last level that each row of the next continues; None: the same one."""

    @abstractmethod
    def take(self, logits: Tensor) -> None:
        """The next level, from `logits` [drafts * fed, vocab]; at first there is a row for each draft."""

    @abstractmethod
    def drawn(self) -> Tensor:
        """All that the host wants to know, int64."""


class DraftShape(Protocol):
    """What drafts have in common that one recording serves, besides their number; it can be hashed."""

    @property
    def num_numbers(self) -> int:
        """Rows of `PendingDrafts.numbers`."""

    @property
    def fed(self) -> tuple[int, ...]:
        """Rows of a draft in each pass behind the first."""

    def levels(self, numbers: Tensor) -> Levels:
        """Begin to draw; `numbers` are those of `PendingDrafts`."""


class PendingDrafts(Protocol):
    """Some drafts that are drawn together behind the wanted rows of a pass, as the host knows them."""

    @property
    def shape(self) -> DraftShape: ...

    def numbers(self) -> NDArray[np.int64]:
        """[rows, drafts]: what their levels read."""

    def fill_in(self, numbers: Tensor) -> None:
        """Write what the device alone knows into `numbers` that lie there, [rows, at least drafts]."""

    def rows(self, level: int, scratch: range) -> list[RowGroup]:
        """The rows of pass `level`, from 1 on: so many a draft as `fed` says, though it may have ended. Those of an
        ended one are stored in `scratch`. In place of token ids stand -1, -2 and so on."""


@dataclass(frozen=True)
class BlankDrafts:
    """Drafts of no text, to record what is to come."""

    shape: DraftShape
    number: int

    def numbers(self) -> NDArray[np.int64]:
        return np.zeros((self.shape.num_numbers, self.number), np.int64)

    def fill_in(self, numbers: Tensor) -> None:
        """There is nothing to write."""

    def rows(self, level: int, scratch: range) -> list[RowGroup]:
        return blank_rows(self.number * self.shape.fed[level - 1], scratch)


def blank_rows(number: int, scratch: range) -> list[RowGroup]:
    """Rows of no text, whose logits are wanted."""
    sizes = [min(len(scratch), number - row) for row in range(0, number, len(scratch))]
    return [RowGroup(scratch, 0, [0] * size, range(size)) for size in sizes]


def draw_levels(
    levels: Levels, depth: int, step: Callable[[int, Tensor | None], tuple[Tensor, Tensor | None]]
) -> Tensor:
    """Draw `depth` levels. `step` computes the logits of a level, and states if any; it is given the states of the
    level before, each row that of the row which it continues."""
    states: Tensor | None = None
    for level in range(depth):
        logits, states = step(level, states)
        levels.take(logits)
        if level + 1 < depth and states is not None and levels.above is not None:
            states = states[levels.above]
    return levels.drawn()


def draw_marginals(shape: DraftShape, numbers: Tensor, logits: Tensor) -> Tensor:
    """Draw all levels of drafts of this shape from `logits` [drafts * levels, vocab], which all nodes of a level share.

    `numbers` are those of the drafts.
    """
    fed = (1, *shape.fed)
    of_levels = logits.view(numbers.shape[1], len(fed), -1)
    levels = shape.levels(numbers)
    with on_device(logits.device):
        return draw_levels(
            levels,
            len(fed),
            lambda level, _: (of_levels[:, level].repeat_interleave(fed[level], dim=0), None),
        )


def choose_level(logits: Tensor, temperatures: Tensor, filters: Tensor | None, keys: Tensor) -> Tensor:
    """A token of each row of `logits` [rows, vocab]; `NOT_FINITE` of a row that is not.

    temperatures float32, `filters` the int64 of `filter_numbers` and keys int64 belong to the rows.
    """
    kept = logits
    if filters is not None:  # of a row that needs more than they look at, the tokens that they look at
        kept, _ = filtered(logits, temperatures, *limits(filters))
    tokens: Tensor = choose(kept, keys, temperatures)
    return tokens.masked_fill(~logits.amax(-1).isfinite(), NOT_FINITE)


class ChainsShape(NamedTuple):
    """Chains of up to `depth` tokens."""

    depth: int
    num_tokens: int
    """Tokens from this id on are never drafted."""
    filters: bool
    """Whether some tokens are drawn among those that filters leave."""

    @property
    def num_numbers(self) -> int:
        return 4 + self.depth

    @property
    def fed(self) -> tuple[int, ...]:
        return (1,) * (self.depth - 1)

    def levels(self, numbers: Tensor) -> Levels:
        """`numbers` are those of `Chains.numbers`."""
        return ChainLevels(self, numbers)


class ChainLevels(Levels):
    """Chains of which each has a row in every pass."""

    def __init__(self, shape: ChainsShape, numbers: Tensor) -> None:
        self._shape, self._numbers = shape, numbers
        self._temperatures = numbers[0].view(torch.float64).float()
        self._drawn: list[Tensor] = []

    def take(self, logits: Tensor) -> None:
        filters = self._numbers[1:4] if self._shape.filters else None
        logits, keys = logits[:, : self._shape.num_tokens], self._numbers[4 + len(self._drawn)]
        self.tokens = choose_level(logits, self._temperatures, filters, keys)
        self._drawn.append(self.tokens)

    def drawn(self) -> Tensor:
        """[depth, chains]: what stands behind a chain's end means nothing."""
        return torch.stack(self._drawn)


class TreesShape(NamedTuple):
    """Trees whose every level has a fixed number of nodes."""

    widths: tuple[int, ...]
    """Nodes of each level."""
    top_k: int
    """Tokens that are looked at below each node."""
    vocab_size: int
    """Tokens from this id on are never drafted."""
    coupled: bool
    """Whether trees may be drawn with the target's noise."""
    filters: bool
    """Whether some tokens are looked at among those that filters leave."""

    @property
    def num_numbers(self) -> int:
        return 5 + len(self.widths)

    @property
    def fed(self) -> tuple[int, ...]:
        """Nodes of each level but the last whose children are looked at, the best ones."""
        return tuple(min(self.top_k, width) for width in self.widths[:-1])

    def levels(self, numbers: Tensor) -> Levels:
        """`numbers` are those of `DeviceTrees.numbers`."""
        return TreeLevels(self, numbers)


@dataclass(slots=True)
class TreeLevel:
    """Nodes of one depth of all trees, the best first."""

    token_ids: Tensor
    """int64 [trees, width]"""
    parents: Tensor
    """int64 [trees, width]: ranks in the level before."""
    scores: Tensor
    """[trees, width]: log of the product of the probabilities on the path."""
    paths: Tensor
    """int64 [trees, width, depth]: the ranks of the nodes on the path, the node's own last."""


class TreeLevels(Levels):
    """Trees of one shape."""

    def __init__(self, shape: TreesShape, numbers: Tensor) -> None:
        self._shape = shape
        self._temperatures = numbers[0].view(torch.float64).float()
        self._is_noisy, self._limits, self._keys = numbers[1] > 0, numbers[2:5], numbers[5:]
        self._is_finite = torch.ones_like(self._is_noisy)
        self._levels: list[TreeLevel] = []

    def take(self, logits: Tensor) -> None:
        shape, level, trees = self._shape, len(self._levels), len(self._is_finite)
        width, above = shape.widths[level], shape.fed[level - 1] if level else 1
        logits = logits[:, : shape.vocab_size]
        self._is_finite = self._is_finite & logits.amax(-1).isfinite().view(trees, above).all(1)
        if shape.filters:  # of a row that needs more than they look at, the tokens that they look at
            own = [part.repeat_interleave(above) for part in (self._temperatures, *limits(self._limits))]
            logits, _ = filtered(logits, *own)
        log_probs = self._log_probs(level, logits.float().view(trees, above, -1))
        best_below = log_probs.topk(shape.top_k, dim=-1)  # [trees, above, top_k]
        scores = best_below.values
        if level:
            scores = scores + self._levels[-1].scores[:, :above, None]
        best = scores.flatten(1).topk(width)
        parents = best.indices // shape.top_k
        token_ids = best_below.indices.flatten(1).gather(1, best.indices)
        paths = torch.arange(width, device=logits.device).expand(trees, width)[:, :, None]
        if level:
            before = self._levels[-1].paths.gather(1, parents[:, :, None].expand(-1, -1, level))
            paths = torch.cat([before, paths], dim=-1)
        self._levels.append(TreeLevel(token_ids, parents, best.values, paths))
        if level < len(shape.fed):
            self._feed(shape.fed[level], above)

    def _feed(self, fed: int, above: int) -> None:
        """The best `fed` nodes of the last level come next; the level had `above` rows a tree."""
        last = self._levels[-1]
        self.tokens = last.token_ids[:, :fed].flatten()
        self.ranks = last.paths[:, :fed].flatten()
        begins = torch.arange(len(last.parents), device=last.parents.device)[:, None] * above
        self.above = (last.parents[:, :fed] + begins).flatten()

    def _log_probs(self, level: int, logits: Tensor) -> Tensor:
        """[trees, above, vocab], with the target's noise for those that are drawn with it."""
        log_probs = (logits / self._temperatures[:, None, None]).log_softmax(-1)
        if not self._shape.coupled:
            return log_probs
        # Not those that are kept: a recording outlives them.
        counters = token_counters.__wrapped__(logits.shape[-1], logits.device)
        noise = gumbel_of_bits(uniform_bits(self._keys[level][:, None] + counters))  # [trees, vocab]
        drawn = (log_probs.double() + noise[:, None]).log_softmax(-1)
        return torch.where(self._is_noisy[:, None, None], drawn, log_probs.double())

    def drawn(self) -> Tensor:
        """[trees, 2 * nodes + depths]: tokens, parents and the ranks of all paths, level after level. All tokens of a
        tree with a row that was not finite are `NOT_FINITE`."""
        levels = self._levels
        tokens = torch.cat([level.token_ids for level in levels], dim=1)
        tokens = tokens.masked_fill(~self._is_finite[:, None], NOT_FINITE)
        begins = list(accumulate(self._shape.widths[:-2], initial=0))
        parents = [torch.full_like(levels[0].parents, ROOT)]
        parents += [level.parents + begin for level, begin in zip(levels[1:], begins, strict=False)]
        return torch.cat([tokens, *parents, *(level.paths.flatten(1) for level in levels)], dim=1)
