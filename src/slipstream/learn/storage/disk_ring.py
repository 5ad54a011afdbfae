"""A ring on disk: segments of framed records, of which the oldest are deleted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.errors import CorruptRecordError, LearnError
from slipstream.learn.records.privacy import belongs_to
from slipstream.learn.records.served import Purpose, ServedRecord
from slipstream.learn.storage.folder import LearnFolder, write_whole
from slipstream.learn.storage.forgotten import Forgotten
from slipstream.learn.storage.ring import (
    DEFAULT_BYTES,
    NUM_PARTS,
    RingFacts,
    check_bytes,
    is_wanted,
    too_large,
)
from slipstream.learn.storage.segments import (
    FRAME_BYTES,
    Frame,
    RingIdentity,
    SegmentWriter,
    count_frames,
    read_frames,
    read_head,
    rewrite,
    segment_file,
    segment_files,
    segment_head,
)


class DiskRing:
    """A ring in `ring/` of a folder: segments of frames with length and CRC, of which the oldest are deleted.

    One process writes; others may read, and forget, at any time. Killed at any instant, all records that were appended
    are there, and no half one is read.
    """

    def __init__(self, folder: LearnFolder, identity: RingIdentity, max_bytes: int = DEFAULT_BYTES) -> None:
        """Raises `LearnError` where the folder's ring is of another model or template, or cannot be written."""
        check_bytes(max_bytes)
        self.identity = identity
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = max_bytes // NUM_PARTS
        self._forgotten = Forgotten(folder)
        self._writer: SegmentWriter | None = None
        folder.create()
        self._held = _hold(folder)
        try:
            folder.clear_leftovers()  # of a deletion that was killed: old answers may be in them
            check_identity(folder, identity)
            self._next = 1 + _last_number(folder)
        except BaseException:
            os.close(self._held)
            raise
        self._lock = threading.Lock()
        self._counts: dict[Path, tuple[tuple[int, int], int]] = {}
        """By segment: its inode and size, and how many records it holds."""

    def append(self, record: ServedRecord) -> int | None:
        """See `Ring`."""
        self.identity.check(RingIdentity(record.model_hash, record.template_hash), "the record")
        if self._forgotten.has(record.tenant, record.created_s):
            return None
        payload = record.encoded()
        num_bytes = FRAME_BYTES + len(payload)
        limit = self._segment_bytes - len(segment_head(self.identity))
        if num_bytes > limit:
            raise too_large(num_bytes, limit)
        try:
            with self._lock, self._folder.lock("ring"):
                if self._forgotten.has(record.tenant, record.created_s):  # while it waited for the lock
                    return None
                writer = self._with_room(num_bytes)
                number = self._next
                writer.append(Frame(number, payload).encoded())
                self._next += 1
                return number
        except OSError as error:
            self._leave()
            raise self._folder.unwritable(error) from None

    def read(
        self,
        purpose: Purpose | None = None,
        tenant: str | None = None,
        task: str | None = None,
        after: int = -1,
    ) -> Iterator[ServedRecord]:
        """See `Ring`; what is forgotten is not read, even while it is being deleted."""
        yield from read_ring(self._folder, purpose, tenant, task, after)

    def forget(self, tenant: str) -> int:
        """See `Ring`."""
        self._forgotten.add(tenant)
        return remove_from_ring(self._folder, tenant)

    def facts(self) -> RingFacts:
        """See `Ring`. Segments that have not changed since the last call are not read again."""
        files = segment_files(self._folder.ring)
        counts: dict[Path, tuple[tuple[int, int], int]] = {}
        num_bytes = 0
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                stat = file.stat()
                num_bytes += stat.st_size
                stamp = stat.st_ino, stat.st_size
                known = self._counts.get(file)
                same = known is not None and known[0] == stamp
                counts[file] = known if known and same else (stamp, count_frames(file))
        self._counts = counts
        num = sum(count for _, count in counts.values())
        ends = (int(files[0].stem), self._next - 1) if num else (-1, -1)
        return RingFacts(num, num_bytes, self._max_bytes, *ends)

    def close(self) -> None:
        """Close the files and let another server write to the ring."""
        with self._lock:
            self._leave()
            if self._held >= 0:
                os.close(self._held)
                self._held = -1

    def _with_room(self, num_bytes: int) -> SegmentWriter:
        """The segment to write to, with the oldest ones deleted as far as that is needed."""
        writer = self._writer
        if writer is not None and (
            writer.num_bytes + num_bytes > self._segment_bytes or not writer.is_in_place()
        ):
            self._leave()
            writer = None
        if writer is None:
            num_bytes += len(segment_head(self.identity))
        # What is on disk is looked at, not remembered: `forget` and an operator may have deleted segments.
        files = segment_files(self._folder.ring)
        sizes = [_size(file) for file in files]
        total = sum(sizes)
        for file, size in zip(files, sizes, strict=True):
            if total + num_bytes <= self._max_bytes:
                break
            file.unlink(missing_ok=True)
            total -= size
        if writer is None:
            file = segment_file(self._folder.ring, self._next)
            file.unlink(missing_ok=True)  # of a writer that died before its first record
            writer = self._writer = SegmentWriter(file, self.identity)
        return writer

    def _leave(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _hold(folder: LearnFolder) -> int:
    """Become the ring's one writer until the handle is closed; raises `LearnError` where another process is."""
    handle = os.open(folder.path / ".writer.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise LearnError(
            f"another server learns in {str(folder.path)!r}; give --learn a folder of this one's own"
        ) from None
    return handle


def read_ring(
    folder: LearnFolder,
    purpose: Purpose | None = None,
    tenant: str | None = None,
    task: str | None = None,
    after: int = -1,
) -> Iterator[ServedRecord]:
    """The records of a folder's ring for those who only read it; see `Ring.read`."""
    forgotten = Forgotten(folder)
    files = segment_files(folder.ring)
    for place, file in enumerate(files):
        if place + 1 < len(files) and int(files[place + 1].stem) <= after + 1:
            continue  # all of its records are older
        for frame in read_frames(file):
            try:
                record = ServedRecord.decoded(frame.payload, frame.number)
            except CorruptRecordError:  # written by another release
                continue
            if is_wanted(record, purpose, tenant, task, after) and not forgotten.has(
                record.tenant, record.created_s
            ):
                yield record


def ring_facts(folder: LearnFolder) -> RingFacts:
    """How full a folder's ring is; `max_bytes` is 0, since only its writer knows it."""
    files = segment_files(folder.ring)
    numbers = [frame.number for file in files for frame in read_frames(file)]
    return RingFacts(
        len(numbers),
        sum(map(_size, files)),
        0,
        min(numbers, default=-1),
        max(numbers, default=-1),
    )


def check_identity(folder: LearnFolder, identity: RingIdentity) -> None:
    """Raise `LearnError` where a folder's ring is of another model or template."""
    found = ring_identity(folder)
    if found is not None:
        identity.check(found, f"the ring in {str(folder.path)!r}")


def ring_identity(folder: LearnFolder) -> RingIdentity | None:
    """Return whose answers a folder's ring holds; None while it is empty."""
    for file in reversed(segment_files(folder.ring)):
        try:
            return read_head(file)[0]
        except CorruptRecordError:  # a writer died before the head was whole
            continue
        except OSError as error:
            raise LearnError(f"cannot read {str(file)!r}: {error.strerror}") from None
    return None


def remove_from_ring(folder: LearnFolder, tenant: str) -> int:
    """Delete the records of a tenant, and of those below it, from a folder's ring of any model; returns how many."""
    try:
        with folder.lock("ring"):
            files = segment_files(folder.ring)
            return sum(
                remove_frames(folder, file, file == files[-1], lambda frame: _is_of(frame, tenant))
                for file in files
            )
    except OSError as error:
        raise folder.unwritable(error) from None


def remove_older(folder: LearnFolder, before_s: float, now_s: float | None = None) -> int:
    """Delete the records of answers that began before a time, seconds since 1970; returns how many.

    One that seems to begin after `now_s` was made with a wrong clock: nobody knows how old it is, so it is deleted
    too. So is a segment of which nothing can be read, once it was last written before that time. All segments are
    looked at, each under a lock of its own, so that the writer waits for one only. Raises `LearnError`, of a segment
    that cannot be read once all others were looked at.
    """
    now_s = time.time() if now_s is None else now_s
    removed, fault = 0, None
    for file in segment_files(folder.ring):
        try:
            with folder.lock("ring"):
                is_last = segment_files(folder.ring)[-1:] == [file]
                removed += remove_frames(
                    folder, file, is_last, lambda frame: not _is_within(frame, before_s, now_s)
                )
                if not is_last:
                    _remove_unreadable(file, before_s, now_s)
        except LearnError as error:
            fault = error
        except OSError as error:
            raise folder.unwritable(error) from None
    if fault is not None:
        raise fault
    return removed


def _remove_unreadable(file: Path, before_s: float, now_s: float) -> None:
    """Delete a segment that has bytes but no record that can be read, where it was last written too long ago."""
    with contextlib.suppress(FileNotFoundError):
        stat = file.stat()
        is_old = not before_s <= stat.st_mtime <= now_s
        if is_old and stat.st_size and next(read_frames(file), None) is None:
            file.unlink()


def remove_frames(folder: LearnFolder, file: Path, is_last: bool, is_gone: Callable[[Frame], bool]) -> int:
    """Delete the records of a segment that are gone, and the segment where none remains; returns how many."""
    frames = list(read_frames(file))
    kept = [one for one in frames if not is_gone(one)]
    if len(kept) == len(frames):
        return 0
    if is_last and kept[-1:] != frames[-1:]:
        # Numbers count on for ever: an empty segment says which were given.
        identity, _ = read_head(file)
        following = segment_file(folder.ring, frames[-1].number + 1)
        write_whole(following, segment_head(identity))
    if kept:
        rewrite(file, kept)
    else:
        file.unlink(missing_ok=True)
    return len(frames) - len(kept)


def _is_of(frame: Frame, tenant: str) -> bool:
    try:
        return belongs_to(ServedRecord.decoded(frame.payload).tenant, tenant)
    except CorruptRecordError:
        return True  # nobody can tell whose it is, and nobody can read it


def _is_within(frame: Frame, first_s: float, last_s: float) -> bool:
    try:
        return first_s <= ServedRecord.decoded(frame.payload).created_s <= last_s
    except CorruptRecordError:
        return False  # as above


def _last_number(folder: LearnFolder) -> int:
    """The highest number that was given to a record of the ring; -1 for none."""
    files = segment_files(folder.ring)
    if not files:
        return -1
    numbers = [frame.number for frame in read_frames(files[-1])]
    return max(numbers, default=int(files[-1].stem) - 1)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
