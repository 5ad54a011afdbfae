"""Keys and values of what encoders have made: of each sequence computed once, and read by all of its passes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.kv.segments import CHUNK, SegmentAccounting

TRIAL = -1
"""Owner of the entries that trials read, which belong to no sequence."""


def encoded_slots(num_positions: int) -> int:
    """Slots that one sequence takes whose encoder input has so many positions."""
    return -(-(num_positions + 2) // CHUNK) * CHUNK


def _ids(count: int, num_positions: int) -> range:
    """What the accounting calls the entries: others for each length, as none of them is that of a shorter input."""
    return range(num_positions, num_positions + count)


class EncodedEntries:
    """The entries that the layers of a decoder attend to across, in bounded memory.

    A sequence is an *owner*, as in `SlotAccounting`. What a finished one leaves is kept until others need the room, and
    is reused by a sequence of the same account and encoder input.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.accounting = SegmentAccounting(pool.num_slots, pool.move)

    def __contains__(self, owner: int) -> bool:
        return owner in self.accounting

    def open(self, owner: int, num_positions: int, account: str) -> bool:
        """Give `owner` room; returns whether its entries are there already.

        `account` names whose they are and the encoder input. Raises `AssertionError` where there is no room: a cache is
        made for as many sequences as run together.
        """
        # The last one is never reused, see `SlotAccounting.open`: it stands for none.
        reused = self.accounting.open(owner, _ids(num_positions + 1, num_positions), account)
        if reused is None:
            raise AssertionError(f"no room for the {num_positions} encoded positions of sequence {owner}")
        if reused < num_positions:
            self.accounting.truncate(owner, 0)
        return reused == num_positions

    def write(self, owner: int, entries: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Keep the keys and values of each layer, [kv_heads, positions, dim] each."""
        num_positions = entries[0][0].shape[1]
        where = self.pool.index(self.accounting.slots(owner)[:num_positions])
        for layer, (keys, values) in enumerate(entries):
            self.pool.write(layer, where, keys, values)
        self.accounting.commit(owner, _ids(num_positions, num_positions))

    def read(self, owner: int | None, layer: int) -> tuple[Tensor, Tensor]:
        """As `EncodedKeys.read`."""
        owner = TRIAL if owner is None else owner
        held = self.accounting.slots(owner)[: self.accounting.num_valid(owner)]
        return self.pool.read(layer, self.pool.index(held))

    def close(self, owner: int) -> None:
        """End `owner`'s claim, if it has one."""
        if owner in self.accounting:
            self.accounting.close(owner)
