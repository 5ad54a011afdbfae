"""What a pass is told of the choice of its own tokens, and what it says of the drafts that it checks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.pending import PendingNumbers
from slipstream.core.proposal import Proposal, Verdict
from slipstream.kv.upload import upload
from slipstream.models.cuda.filters import NO_FILTERS, filter_numbers, filters_of
from slipstream.sampling.params import SamplingParams

NUM_ROWS, NUM_FILTER_ROWS = 4, 3
"""Rows of `TokenChoices.table` that are always there, and those for filters."""


class OwnTokens(NamedTuple):
    """How the target's own token is chosen at the root of a proposal and at each of its nodes."""

    keys: Seq[int]
    """[1 + nodes]: of the noise, as the int64 with these bits."""
    params: SamplingParams
    earlier: Seq[int] = ()
    """Those of the positions before the root's, where the host does not know at which of all these it is."""
    shift: Tensor | None = None
    """int64 [1]: which it is, counted from where the keys say."""


@dataclass(slots=True)
class TokenChoices:
    """How the model's own token of each wanted row is chosen, and which of these rows are trees.

    A pass that is given choices walks down each tree along its own tokens, moves the entries of the accepted nodes
    behind those of the text, and before that keeps its hidden states as the features of the pool. Rows that are of no
    tree are chosen greedily, and not looked at.
    """

    keys: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Within a tree row 0 is the root, and row i + 1 node i: each row's parent; -1 for a root."""
    sizes: list[int] = field(default_factory=list)
    """Of a root the rows of its tree, else 0."""
    filters: list[tuple[int, float, float]] = field(default_factory=list)
    """top-k, top-p and the logarithm of min-p."""
    pending: list[Tensor] = field(default_factory=list)
    """Parents that a device knows and the host does not: number i of them, all trees' one after another, stands in
    `parents` as -2 - i."""

    moved: list[tuple[int, Seq[int], Tensor]] = field(default_factory=list)
    """Trees whose root's position a device knows: the root's row, the keys of all positions that it may have and of
    those that follow, and how far it is from the last that it may have."""

    def skip(self, num_rows: int) -> None:
        """The next rows are of no tree."""
        for values in (self.keys, self.parents, self.sizes):
            values += [0] * num_rows
        self.temperatures += [0.0] * num_rows
        self.filters += [NO_FILTERS] * num_rows

    def add(self, own: OwnTokens, proposal: Proposal) -> None:
        """The next rows are this tree."""
        params, size = own.params, 1 + len(proposal)
        filters = filters_of(params.top_k, params.top_p, params.min_p) if params.filters else NO_FILTERS
        if own.shift is not None and own.earlier:
            self.moved.append((len(self.keys), [*own.earlier, *own.keys], own.shift))
        self.keys += own.keys
        self.temperatures += [params.temperature] * size
        parents = proposal.parents
        if isinstance(parents, PendingNumbers) and parents.is_pending:
            before = sum(map(len, self.pending))
            self.parents += [-1, *range(-2 - before, -1 - before - size, -1)]
            self.pending.append(parents.tensor)
        else:
            self.parents += [-1, *(parent + 1 for parent in parents)]
        self.sizes += [size, *([0] * (size - 1))]
        self.filters += [filters] * size

    @property
    def filtered(self) -> bool:
        """Whether any row leaves tokens out."""
        return any(filters != NO_FILTERS for filters in self.filters)

    def table(self, num_wanted: int) -> NDArray[np.int64]:
        """[rows, num_wanted]: keys, temperatures, parents, sizes, and where a row is filtered top-k, top-p and min-p's
        logarithm. Fractions are float64 with the bits of these numbers."""
        rows: list[NDArray[np.int64]] = [
            np.array(self.keys, np.int64),
            np.array(self.temperatures, np.float64).view(np.int64),
            np.array(self.parents, np.int64),
            np.array(self.sizes, np.int64),
        ]
        if self.filtered:
            rows.extend(filter_numbers(self.filters))
        table = np.zeros((len(rows), num_wanted), np.int64)
        table[:, : len(self.keys)] = rows
        return table

    def fill_in(self, table: Tensor) -> Tensor:
        """`table` on a device, with the parents that the host does not know."""
        if self.pending:
            parents = table[2]
            own = torch.cat(self.pending)[(-2 - parents).clamp(min=0)] + 1
            parents.copy_(torch.where(parents < -1, own, parents))
        if self.moved:
            self._fill_in_keys(table[0])
        return table

    def _fill_in_keys(self, keys: Tensor) -> None:
        """The keys of `moved`."""
        rows: list[int] = []
        places: list[int] = []
        flat: list[int] = []
        shifts: list[Tensor] = []
        for root, own, shift in self.moved:
            size = self.sizes[root]
            rows += range(root, root + size)
            places += range(len(flat) + len(own) - size, len(flat) + len(own))
            flat += own
            shifts.append(shift.expand(size))
        numbers = upload([*rows, *places, *flat], keys.device)
        into, at, of = numbers.tensor_split([len(rows), 2 * len(rows)])
        keys[into] = of[at + torch.cat(shifts)]


class PassVerdicts(NamedTuple):
    """What a pass made of its trees, from int64 [5, wanted rows]; what is said of a tree stands at its root."""

    counts: Seq[int]
    """Accepted nodes; -1 where the walk met a row that the pass could not choose for. 0 where no tree begins."""
    last_tokens: Seq[int]
    """The target's own token behind them."""
    lengths: Seq[int]
    """Entries that the sequence has then, which is the position of that token."""
    nodes: Seq[int]
    """From the root on, the accepted nodes in order; what stands behind them means nothing."""
    tokens: Seq[int]
    """Of each row the token that was chosen; -1 where a filter needs more of the row than the pass looks at."""

    @classmethod
    def of(cls, numbers: Seq[int]) -> PassVerdicts:
        """From the numbers of all rows, one row behind the other."""
        width = len(numbers) // len(cls._fields)
        return cls(*(numbers[begin : begin + width] for begin in range(0, len(numbers), width)))

    def verdict(self, root: int) -> Verdict | None:
        """What the pass made of the tree; None where the host must walk."""
        count = self.counts[root]
        if count < 0:
            return None
        return Verdict(tuple(self.nodes[root : root + count]), self.last_tokens[root])
