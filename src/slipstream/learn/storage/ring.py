"""The last served answers, bounded by bytes, here in memory; `disk_ring` keeps them where they outlive a crash."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from slipstream.errors import LearnError, RecordTooLargeError
from slipstream.learn.records.privacy import belongs_to
from slipstream.learn.records.served import Purpose, ServedRecord
from slipstream.learn.storage.segments import RingIdentity

DEFAULT_BYTES = 256 * 2**20
MIN_BYTES = 64 * 2**10
NUM_PARTS = 8
"""A ring drops its oldest records by about such a part, and takes no record that is larger than one."""


@dataclass(frozen=True, slots=True)
class RingFacts:
    """How full a ring is."""

    num_records: int
    num_bytes: int
    max_bytes: int
    first: int = -1
    last: int = -1
    """Numbers of the records that are there; -1 without any."""


class Ring(Protocol):
    """Records in the order in which they came; the oldest are dropped as new ones need room."""

    identity: RingIdentity

    def append(self, record: ServedRecord) -> int | None:
        """Keep a record; returns its number, None where it is older than its tenant's being forgotten.

        Raises `RecordTooLargeError` for one that is larger than an eighth of the ring, and `LearnError` for a record of
        another model or template and where it cannot be written. The ring is then as it was.
        """
        ...

    def read(
        self,
        purpose: Purpose | None = None,
        tenant: str | None = None,
        task: str | None = None,
        after: int = -1,
    ) -> Iterator[ServedRecord]:
        """The records with a number above `after`, the oldest first, of one purpose, tenant or task if asked."""
        ...

    def forget(self, tenant: str) -> int:
        """Delete all records of a tenant, and of those below it; returns how many. See `Forgotten`."""
        ...

    def facts(self) -> RingFacts:
        """How full it is."""
        ...

    def close(self) -> None:
        """Append nothing more."""
        ...


def is_wanted(
    record: ServedRecord, purpose: Purpose | None, tenant: str | None, task: str | None, after: int
) -> bool:
    """Whether `Ring.read` gives a record out."""
    return (
        record.number > after
        and purpose in (None, record.purpose)
        and tenant in (None, record.tenant)
        and task in (None, record.task)
    )


def check_bytes(max_bytes: int) -> None:
    """Raise `LearnError` for a ring that is too small for records."""
    if max_bytes < MIN_BYTES:
        raise LearnError(f"a ring has at least {MIN_BYTES:,} bytes, got {max_bytes:,}")


def too_large(num_bytes: int, limit: int) -> RecordTooLargeError:
    """What to tell of a record that does not fit into an eighth of the ring."""
    return RecordTooLargeError(
        f"a record of {num_bytes:,} bytes is not kept: an eighth of the ring is {limit:,} bytes; raise --learn-bytes"
    )


class MemoryRing:
    """A ring in memory, which ends with the process. May be used by several threads."""

    def __init__(self, identity: RingIdentity, max_bytes: int = DEFAULT_BYTES) -> None:
        check_bytes(max_bytes)
        self.identity = identity
        self._max_bytes = max_bytes
        self._frames: deque[tuple[int, str, bytes]] = deque()
        """Number, tenant, record."""
        self._num_bytes = 0
        self._next = 0
        self._forgotten_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def append(self, record: ServedRecord) -> int | None:
        """See `Ring`."""
        self.identity.check(RingIdentity(record.model_hash, record.template_hash), "the record")
        data = record.encoded()
        if len(data) > (limit := self._max_bytes // NUM_PARTS):
            raise too_large(len(data), limit)
        with self._lock:
            for owner, until_s in self._forgotten_s.items():
                if record.created_s <= until_s and belongs_to(record.tenant, owner):
                    return None
            while self._num_bytes + len(data) > self._max_bytes:
                self._num_bytes -= len(self._frames.popleft()[2])
            self._frames.append((self._next, record.tenant, data))
            self._num_bytes += len(data)
            self._next += 1
            return self._next - 1

    def read(
        self,
        purpose: Purpose | None = None,
        tenant: str | None = None,
        task: str | None = None,
        after: int = -1,
    ) -> Iterator[ServedRecord]:
        """See `Ring`."""
        with self._lock:
            frames = list(self._frames)
        for number, _, data in frames:
            record = ServedRecord.decoded(data, number)
            if is_wanted(record, purpose, tenant, task, after):
                yield record

    def forget(self, tenant: str) -> int:
        """See `Ring`."""
        with self._lock:
            self._forgotten_s[tenant] = time.time()
            before = len(self._frames)
            self._frames = deque(one for one in self._frames if not belongs_to(one[1], tenant))
            self._num_bytes = sum(len(data) for _, _, data in self._frames)
            return before - len(self._frames)

    def facts(self) -> RingFacts:
        """See `Ring`."""
        with self._lock:
            ends = (self._frames[0][0], self._frames[-1][0]) if self._frames else (-1, -1)
            return RingFacts(len(self._frames), self._num_bytes, self._max_bytes, *ends)

    def close(self) -> None:
        """See `Ring`; the records stay as long as the object does."""
