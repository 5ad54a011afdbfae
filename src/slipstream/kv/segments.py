"""The contiguous layout of the cache: a sequence's slots are one segment. No tensors: the pool moves entries.

A sequence's entries lie in one segment, in the order of its tokens, so that attention reads them without a copy.
Segments grow in place where they can and are moved where they cannot. A later prompt takes a retained segment over, or
copies the common part.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from slipstream.kv.prefix import BLOCK, PrefixIndex, block_keys
from slipstream.kv.slots import Held, Move, SharedPrefix, SlotAccounting

CHUNK = 64
"""Segments are sized in multiples of this many slots, so that a growing one moves rarely."""


@dataclass(eq=False, slots=True)
class Segment:
    """A contiguous run of slots. `token_ids` are the tokens whose entries are valid, from `start` on."""

    start: int
    capacity: int
    tenant: str
    owner: int | None
    """The sequence that writes here; None once retained."""
    token_ids: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    last_used: int = 0
    family: int | None = None
    """Number that segments share whose first `num_shared` entries are copies of each other; None for no copy."""
    num_shared: int = 0

    @property
    def end(self) -> int:
        return self.start + self.capacity

    @property
    def slots(self) -> range:
        return range(self.start, self.start + self.capacity)


class SegmentAccounting(SlotAccounting):
    """Every owner has one segment; see `SlotAccounting` for the contract."""

    unit: ClassVar[int] = CHUNK

    def __init__(self, num_slots: int, move: Move, prefix_caching: bool = True) -> None:
        super().__init__(num_slots, move, prefix_caching)
        self._segments: list[Segment] = []  # by start
        self._by_owner: dict[int, Segment] = {}
        self._index: PrefixIndex[Segment] = PrefixIndex()
        self._clock = 0
        self._num_families = 0

    @property
    def num_owners(self) -> int:
        return len(self._by_owner)

    @property
    def num_held(self) -> int:
        return sum(segment.capacity for segment in self._by_owner.values())

    @property
    def num_retained(self) -> int:
        return sum(segment.capacity for segment in self._segments if segment.owner is None)

    def __contains__(self, owner: int) -> bool:
        return owner in self._by_owner

    def slots(self, owner: int) -> range:
        return self._by_owner[owner].slots

    def token_ids(self, owner: int) -> Sequence[int]:
        return self._by_owner[owner].token_ids

    def open(self, owner: int, token_ids: Sequence[int], tenant: str = "", reuse: bool = True) -> int | None:
        reuse = reuse and self._prefix_caching
        source, common = self._index.longest(token_ids, tenant) if reuse else (None, 0)
        common = min(common, len(token_ids) - 1)
        size = len(token_ids) + 1
        retained = source is not None and source.owner is None
        nothing_lost = source is not None and common >= len(source.token_ids) - BLOCK
        segment = None
        if source is not None and not (retained and nothing_lost):
            segment = self._allocate(size, keep=source)
            if segment is not None:
                self._move(source.start, segment.start, common)
                segment.token_ids = list(token_ids[:common])
                self._make_kin(source, segment, common)
        if segment is None and source is not None and retained:
            segment = source
            self._truncate(segment, common)
        if segment is None:
            segment = self._allocate(size)
            common = 0
        if segment is None:
            return None
        segment.owner, segment.tenant, segment.last_used = owner, tenant, self._tick()
        self._by_owner[owner] = segment
        self._index_tokens(segment)
        if not self.reserve(owner, size):
            self.close(owner)
            return None
        return common

    def shared(self, owner: int) -> SharedPrefix | None:
        segment = self._by_owner[owner]
        return None if segment.family is None else SharedPrefix(segment.family, segment.num_shared)

    def reserve(self, owner: int, num_tokens: int) -> bool:
        segment = self._by_owner[owner]
        if segment.capacity >= num_tokens:
            return True
        with_headroom = _round_up(num_tokens + num_tokens // 4)
        return self._grow(segment, with_headroom) or self._grow(segment, num_tokens)

    def commit(self, owner: int, token_ids: Sequence[int]) -> None:
        segment = self._by_owner[owner]
        segment.token_ids.extend(token_ids)
        if len(segment.token_ids) > segment.capacity:
            raise AssertionError(f"sequence {owner} committed beyond its {segment.capacity} slots")
        self._index_tokens(segment)

    def truncate(self, owner: int, num_tokens: int) -> None:
        segment = self._by_owner[owner]
        if num_tokens < len(segment.token_ids):
            self._truncate(segment, num_tokens)

    def close(self, owner: int, retain: bool = True) -> None:
        segment = self._by_owner.pop(owner)
        segment.owner = None
        segment.last_used = self._tick()
        reusable = retain and self._prefix_caching and len(segment.token_ids) >= BLOCK
        if not reusable or self._is_covered(segment):
            self._free(segment)

    def clear(self) -> None:
        for segment in [s for s in self._segments if s.owner is None]:
            self._free(segment)

    def contents(self) -> Iterator[Held]:
        for segment in self._segments:
            yield Held(segment.tenant, segment.token_ids, segment.slots[: len(segment.token_ids)])

    def integrity(self) -> list[str]:
        faults: list[str] = []
        end = 0
        for segment in self._segments:
            if segment.start < end:
                faults.append(f"segment at {segment.start} overlaps the one before it, which ends at {end}")
            if len(segment.token_ids) > segment.capacity:
                faults.append(f"segment at {segment.start} holds more tokens than slots")
            end = segment.end
        if end > self.num_slots:
            faults.append(f"segments end at {end}, beyond the {self.num_slots} slots")
        owned = {id(s) for s in self._segments if s.owner is not None}
        if owned != {id(s) for s in self._by_owner.values()}:
            faults.append("owners and segments disagree")
        present = {id(segment) for segment in self._segments}
        if any(id(segment) not in present for _, segment in self._index.entries()):
            faults.append("the prefix index names a segment that is gone")
        for segment in self._segments:
            if self._prefix_caching and segment.keys != list(block_keys(segment.token_ids, segment.tenant)):
                faults.append(f"segment at {segment.start} is indexed under another text than it holds")
        return faults

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _index_tokens(self, segment: Segment) -> None:
        if self._prefix_caching:
            self._index.extend(segment)

    def _is_covered(self, segment: Segment) -> bool:
        """True when another segment already holds all the entries of this one."""
        self._index.truncate(segment, 0)
        _, common = self._index.longest(segment.token_ids, segment.tenant)
        self._index.extend(segment)
        return common == len(segment.token_ids)

    def _make_kin(self, source: Segment, copy: Segment, num_shared: int) -> None:
        """The first `num_shared` entries of `copy` were copied from `source`.

        The copy joins the source's family unless that has less than half of it; then the two begin one of their own.
        """
        if source.family is None or 2 * source.num_shared < num_shared:
            self._num_families += 1
            source.family, source.num_shared = self._num_families, num_shared
        copy.family, copy.num_shared = source.family, min(source.num_shared, num_shared)

    def _truncate(self, segment: Segment, num_tokens: int) -> None:
        self._index.truncate(segment, num_tokens)
        segment.num_shared = min(segment.num_shared, num_tokens)
        del segment.token_ids[num_tokens:]

    def _free(self, segment: Segment) -> None:
        self._index.truncate(segment, 0)
        self._segments.remove(segment)

    def _allocate(self, size: int, keep: Segment | None = None) -> Segment | None:
        """A new segment of at least `size` slots, evicting retained ones other than `keep` as needed."""
        for capacity in (_round_up(size), size):
            while (start := self._find_gap(capacity)) is None:
                if not self._make_room(capacity, self._segments[-1] if self._segments else None, keep):
                    break
            if start is not None:
                segment = Segment(start, capacity, "", None)
                insort(self._segments, segment, key=lambda s: s.start)
                return segment
        return None

    def _grow(self, segment: Segment, capacity: int) -> bool:
        """Enlarge in place, or move to a gap that is large enough."""
        while True:
            position = self._segments.index(segment)
            last = position + 1 == len(self._segments)
            limit = self.num_slots if last else self._segments[position + 1].start
            if limit - segment.start >= capacity:
                segment.capacity = capacity
                return True
            start = self._find_gap(capacity)
            if start is not None:
                self._relocate(segment, start)
                segment.capacity = capacity
                self._segments.sort(key=lambda s: s.start)
                return True
            if not self._make_room(capacity - segment.capacity, segment, segment):
                return False

    def _find_gap(self, capacity: int) -> int | None:
        """Start of the first gap of at least `capacity` slots."""
        end = 0
        for segment in self._segments:
            if segment.start - end >= capacity:
                return end
            end = segment.end
        return end if self.num_slots - end >= capacity else None

    def _make_room(self, missing: int, after: Segment | None, keep: Segment | None) -> bool:
        """Evict one retained segment, or gather the free slots behind `after`; False when neither can help.

        Evicting is cheap and gathering copies live entries, so gathering waits until there is ample free room or
        nothing left to evict.
        """
        free = self.num_slots - sum(s.capacity for s in self._segments)
        retained = [s for s in self._segments if s.owner is None and s is not keep]
        if retained and free < 2 * missing:
            self._free(min(retained, key=lambda s: s.last_used))
            return True
        if free >= missing and after is not None:
            return self._gather_free_slots(after)
        return False

    def _gather_free_slots(self, after: Segment) -> bool:
        """Pack the segments up to `after` to the left and the others to the right; False if nothing moved."""
        split = self._segments.index(after) + 1
        moved = False
        end = 0
        for segment in self._segments[:split]:
            moved |= self._relocate(segment, end)
            end = segment.end
        start = self.num_slots
        for segment in reversed(self._segments[split:]):
            start -= segment.capacity
            moved |= self._relocate(segment, start)
        return moved

    def _relocate(self, segment: Segment, start: int) -> bool:
        if segment.start == start:
            return False
        # Entries that a step in flight writes behind the valid ones move with them.
        count = len(segment.token_ids) if segment.owner is None else segment.capacity
        self._move(segment.start, start, count)
        segment.start = start
        return True


def _round_up(size: int) -> int:
    return -(-size // CHUNK) * CHUNK
