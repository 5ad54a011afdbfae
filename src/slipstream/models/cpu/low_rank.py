"""Changes of low rank to packed weights, as the kernels read them (`kernels/low_rank.h`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.models.cpu.structs import LowRankStruct, RankPanelStruct
from slipstream.models.linear.low_rank import LowRankChange


class PackedChange:
    """What is added to some layers whose outputs are stacked. `struct` is passed to the kernels."""

    def __init__(
        self, changes: Sequence[LowRankChange | None], places: Sequence[Tensor], padded: int, panel: int
    ):
        """`places[i]`, int64 [out], says where in the stack the outputs of layer i are, which `changes[i]` is of.

        The stack has `padded` outputs in panels of `panel`. Each panel reads the ranks of its own layers alone.
        """
        firsts = _first_ranks(changes)
        begin, counts = _ranks_of_panels(changes, places, padded // panel, panel)
        offsets = np.cumsum(counts * panel) - counts * panel
        self._panels = np.zeros(padded // panel, dtype=np.dtype(RankPanelStruct))
        self._panels["first"], self._panels["count"], self._panels["offset"] = begin, counts, offsets
        self.down = torch.cat(
            list({id(each.down): each.down for each in changes if each is not None}.values())
        )
        self.down = self.down.float().contiguous()
        self.up = torch.zeros(int(counts.sum()) * panel, dtype=torch.float32, device="cpu")
        starts = torch.from_numpy(offsets - begin * panel)  # where rank 0 would be
        for change, place in zip(changes, places, strict=True):
            if change is not None:
                ranks = firsts[id(change.down)] + torch.arange(len(change.down))
                of_outputs = starts[place // panel] + place % panel
                self.up[of_outputs[:, None] + ranks * panel] = change.up.float()
        self.struct = LowRankStruct(
            len(self.down),
            self.down.shape[1],
            self.down.data_ptr(),
            self.up.data_ptr(),
            self._panels.ctypes.data,
        )

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.down.nbytes + self.up.nbytes + self._panels.nbytes)


def packed_change_bytes(
    changes: Sequence[LowRankChange | None], places: Sequence[Tensor], padded: int, panel: int
) -> int:
    """What a `PackedChange` of the same holds; the changes may be without numbers."""
    _, counts = _ranks_of_panels(changes, places, padded // panel, panel)
    downs = {id(each.down): each.down.numel() for each in changes if each is not None}
    numbers = sum(downs.values()) + int(counts.sum()) * panel
    return numbers * torch.float32.itemsize + padded // panel * np.dtype(RankPanelStruct).itemsize


def _ranks_of_panels(
    changes: Sequence[LowRankChange | None], places: Sequence[Tensor], num_panels: int, panel: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first rank that each panel reads, and how many."""
    firsts = _first_ranks(changes)
    begin = np.full(num_panels, np.iinfo(np.int32).max, dtype=np.int64)
    end = np.zeros(num_panels, dtype=np.int64)
    for change, place in zip(changes, places, strict=True):
        if change is not None:
            touched = np.unique(place.numpy() // panel)
            first = firsts[id(change.down)]
            begin[touched] = np.minimum(begin[touched], first)
            end[touched] = np.maximum(end[touched], first + len(change.down))
    begin = np.minimum(begin, end)
    return begin, end - begin


def _first_ranks(changes: Sequence[LowRankChange | None]) -> dict[int, int]:
    """Return where the numbers of each `down` begin, by its identity: parts of one layer share theirs."""
    firsts: dict[int, int] = {}
    total = 0
    for change in changes:
        if change is not None and id(change.down) not in firsts:
            firsts[id(change.down)] = total
            total += len(change.down)
    return firsts
