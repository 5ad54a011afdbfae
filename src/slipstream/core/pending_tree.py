"""A tree of draft tokens that a device has grown and the host has not read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from slipstream.core.proposal import Proposal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class PendingTree(Proposal):
    """The host knows how many nodes each level has, but neither their tokens nor their parents: both are pending.

    Nodes are numbered level after level, the best of a level first; its number in the level is a node's *rank*.
    """

    widths: tuple[int, ...] = ()
    """Nodes of each level."""
    ranks: torch.Tensor | None = None
    """int64 [the sum of all depths]: for each node the ranks of the nodes on its path, itself included."""

    def __post_init__(self) -> None:
        """What the host does not know is not checked."""

    @property
    def is_chain(self) -> bool:
        return max(self.widths) == 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        return tuple(level for level, width in enumerate(self.widths, 1) for _ in range(width))

    def first_paths(self) -> list[list[int]]:
        """For each node the best nodes of the levels down to its own; `ranks` are to be added."""
        firsts = list(accumulate(self.widths[:-1], initial=0))
        return [firsts[:depth] for depth in self.depths]
