"""The last served answers, bounded by bytes: on disk, where they outlive the process, or in memory."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

from slipstream.errors import CorruptRecordError, LearnError, RecordTooLargeError
from slipstream.learn.records.served import Purpose, ServedRecord, tenant_key, tenant_keys
from slipstream.learn.storage.database import WAIT_S, LearnDatabase
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.tables import (
    as_text,
    document,
    insert_record,
    is_forgotten,
    put_document,
)

DEFAULT_BYTES = 256 * 2**20
MIN_BYTES = 64 * 2**10
NUM_PARTS = 8
"""A ring takes no record that is larger than such a part."""
EMPTY_EVERY_S = 60.0
"""How often the database's log is emptied."""
MAX_LOG_BYTES = 16 * 2**20
"""Size of the log beyond which it is emptied at once."""
_AT_ONCE = 16
"""Records that are read in one transaction."""


@dataclass(frozen=True, slots=True)
class RingIdentity:
    """Whose answers a ring holds: those of another model or template teach something else."""

    model_hash: str
    template_hash: str

    def check(self, found: RingIdentity, where: str) -> None:
        """Raise `LearnError` where `found` is another one."""
        for name in ("model", "template"):
            mine, other = (getattr(one, f"{name}_hash") for one in (self, found))
            if mine != other:
                what = "model" if name == "model" else "chat template"
                raise LearnError(
                    f"{where} is of another {what} ({other[:12]}, this is {mine[:12]}); "
                    "give --learn another folder, or remove this one"
                )


@dataclass(frozen=True, slots=True)
class RingInfo:
    """How full a ring is."""

    num_records: int
    num_bytes: int
    """Bytes of the records themselves; in a file they take whole pages."""
    max_bytes: int
    """0 where it is not known: only the writer knows it."""
    first: int = -1
    last: int = -1
    """Numbers of the records that are there; -1 without any."""


class Ring:
    """Records in the order in which they came; the oldest are dropped as new ones need room.

    One process appends; others may read, and forget, at any time. Killed at any instant, all records that were appended
    are there, and no half one is read. May be used by several threads.
    """

    def __init__(
        self, folder: LearnFolder | None, identity: RingIdentity, max_bytes: int = DEFAULT_BYTES
    ) -> None:
        """In memory where `folder` is None. Raises `LearnError` where the folder's ring is of another model or
        template, or of another server that runs, or cannot be written."""
        if max_bytes < MIN_BYTES:
            raise LearnError(f"a ring has at least {MIN_BYTES:,} bytes, got {max_bytes:,}")
        self.identity = identity
        self._max_bytes = max_bytes
        self._room = 0
        self._counted: int | None = None
        """`PRAGMA data_version` when `_room` was counted: it changes where another connection has changed anything."""
        self._emptied_s = -math.inf
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as opening:
            if folder is not None:
                folder.create()
            self._database = LearnDatabase(folder, stays_open=True)
            opening.callback(self._database.close)
            if folder is not None:
                opening.enter_context(folder.held_by_one_server())
                folder.clear_leftovers()
                if (found := ring_identity(folder)) is not None:
                    identity.check(found, f"the ring in {str(folder.path)!r}")
                with self._database.writing() as connection:
                    self._make_room(connection, 0)  # it may have been allowed more
            self._open = opening.pop_all()

    def append(self, record: ServedRecord) -> int | None:
        """Keep a record; returns its number, None where it is older than its tenant's being forgotten.

        Raises `RecordTooLargeError` for one that is larger than an eighth of the ring, and `LearnError` for a record of
        another model or template and where it cannot be written. The ring is then as it was.
        """
        self.identity.check(RingIdentity(record.model_hash, record.template_hash), "the record")
        data = record.encoded()
        num_bytes, limit = len(data), self._max_bytes // NUM_PARTS
        if num_bytes > limit:
            raise RecordTooLargeError(
                f"a record of {num_bytes:,} bytes is not kept: an eighth of the ring is {limit:,} bytes; "
                "raise --learn-bytes"
            )
        try:
            with self._database.writing() as connection:
                if is_forgotten(connection, tenant_keys(record.tenant), record.created_s):
                    return None
                self._make_room(connection, num_bytes)
                if document(connection, "identity") is None:
                    put_document(connection, "identity", json.dumps(asdict(self.identity)))
                number = insert_record(connection, record, data)
                self._room -= (
                    num_bytes  # within the transaction, so that no other thread's append comes between
                )
        except BaseException:
            self._counted = None
            raise
        return number

    def read(
        self,
        purpose: Purpose | None = None,
        tenant: str | None = None,
        task: str | None = None,
        after: int = -1,
    ) -> Iterator[ServedRecord]:
        """The records with a number above `after`, the oldest first, of one purpose, tenant or task if given."""
        return _read(self._database, purpose, tenant, task, after)

    def forget(self, tenant: str) -> int:
        """As `forget_records`."""
        with self._database.writing() as connection:
            num = _forget(connection, tenant)
            self._counted = None  # after the deletion: another thread may count before it
        self._database.empty_log(WAIT_S)
        return num

    def status(self) -> RingInfo:
        """How full it is."""
        return _info(self._database, self._max_bytes)

    def tidy(self, readers_running: Callable[[], AbstractContextManager[None]]) -> None:
        """Empty the database's log now and then; within `readers_running` no reader is stopped."""
        now_s = time.monotonic()
        if now_s - self._emptied_s < EMPTY_EVERY_S and self._database.log_bytes < MAX_LOG_BYTES:
            return
        self._emptied_s = now_s
        if not self._database.empty_log():
            with readers_running():
                self._database.empty_log(WAIT_S)

    def close(self) -> None:
        """Let another server write to the ring; records in memory stay as long as the object does."""
        self._open.close()

    def _make_room(self, connection: sqlite3.Connection, num_bytes: int) -> None:
        """Delete the oldest records as far as that is needed."""
        [version] = connection.execute("PRAGMA data_version").fetchone()
        if version != self._counted:
            [total] = connection.execute("SELECT total(num_bytes) FROM records").fetchone()
            self._room, self._counted = self._max_bytes - int(total), version
        last, room = -1, self._room
        if room < num_bytes:
            for number, size in connection.execute("SELECT number, num_bytes FROM records ORDER BY number"):
                last, room = number, room + size
                if room >= num_bytes:
                    break
            connection.execute("DELETE FROM records WHERE number <= ?", (last,))
        self._room = room


def read_ring(
    folder: LearnFolder,
    purpose: Purpose | None = None,
    tenant: str | None = None,
    task: str | None = None,
    after: int = -1,
) -> Iterator[ServedRecord]:
    """The records of a folder's ring for those who only read it; see `Ring.read`."""
    return _read(LearnDatabase(folder), purpose, tenant, task, after)


def ring_info(folder: LearnFolder) -> RingInfo:
    """How full a folder's ring is."""
    return _info(LearnDatabase(folder), 0)


def ring_identity(folder: LearnFolder) -> RingIdentity | None:
    """Whose answers a folder's ring holds; None before the first one."""
    with LearnDatabase(folder).reading() as connection:
        found = document(connection, "identity")
    return None if found is None else RingIdentity(**json.loads(found))


def forget_records(folder: LearnFolder, tenant: str) -> int:
    """Delete the records of a tenant, and of those below it, from a folder's ring of any model; returns how many.

    From then on nothing of theirs that began before is written again, or learned from (`check_remembered`).
    """
    database = LearnDatabase(folder)
    with database.writing() as connection:
        num = _forget(connection, tenant)
    database.empty_log(WAIT_S)
    return num


def remove_older(folder: LearnFolder, before_s: float, now_s: float | None = None) -> int:
    """Delete the records of answers that began before a time, seconds since 1970; returns how many.

    One that seems to begin after `now_s` was made with a wrong clock: its age is not known, so it is deleted too.
    Where nothing was ever kept, nothing is made. Raises `LearnError`.
    """
    if not folder.is_used:
        return 0
    now_s = time.time() if now_s is None else now_s
    database = LearnDatabase(folder)
    with database.writing() as connection:
        num = connection.execute(
            "DELETE FROM records WHERE created_s < ? OR created_s > ?", (before_s, now_s)
        ).rowcount
    if num:
        database.empty_log()
    return num


def check_remembered(folder: LearnFolder, keys: tuple[str, ...], read_s: float) -> None:
    """Raise `LearnError` where records of these `tenant_keys` that were read at `read_s` have been forgotten since."""
    with LearnDatabase(folder).reading() as connection:
        if is_forgotten(connection, keys, read_s):
            raise LearnError("it learned from records that have been forgotten since; it is not kept")


def _read(
    database: LearnDatabase, purpose: Purpose | None, tenant: str | None, task: str | None, after: int
) -> Iterator[ServedRecord]:
    wanted = {"purpose": purpose, "tenant": tenant, "task": task}
    given = {name: as_text(value) for name, value in wanted.items() if value is not None}
    where = "".join(f" AND {name} = ?" for name in given)
    query = f"SELECT number, crc, data FROM records WHERE number > ?{where} ORDER BY number LIMIT {_AT_ONCE}"
    while True:
        with database.reading() as connection:
            rows = connection.execute(query, (after, *given.values())).fetchall()
        for number, crc, data in rows:
            if zlib.crc32(data) == crc:
                with contextlib.suppress(CorruptRecordError):  # written by another release
                    yield ServedRecord.decoded(data, number)
        if len(rows) < _AT_ONCE:
            return
        after = rows[-1][0]


def _info(database: LearnDatabase, max_bytes: int) -> RingInfo:
    with database.reading() as connection:
        num, total, first, last = connection.execute(
            "SELECT count(*), total(num_bytes), coalesce(min(number), -1), coalesce(max(number), -1) FROM records"
        ).fetchone()
    return RingInfo(num, int(total), max_bytes, first, last)


def _forget(connection: sqlite3.Connection, tenant: str) -> int:
    connection.execute("INSERT OR REPLACE INTO forgotten VALUES (?, ?)", (tenant_key(tenant), time.time()))
    return connection.execute("DELETE FROM records WHERE belongs_to(tenant, ?)", (as_text(tenant),)).rowcount
