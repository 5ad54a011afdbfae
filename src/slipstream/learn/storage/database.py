"""The database of a folder of learning: one SQLite file, which a server, its learner and `slipstream learn` share."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import LearnError
from slipstream.learn.records.privacy import belongs_to
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.old_files import copy_old_files, take_over
from slipstream.learn.storage.tables import FORMAT, make_tables

WAIT_S = 30.0
"""How long one writer waits for another one."""


class LearnDatabase:
    """A folder's database, or one in memory that ends with the object. May be used by several threads.

    It keeps a write-ahead log: who reads never makes a writer wait, and a process that is killed loses nothing that it
    has committed. What is deleted is overwritten with zeros. A reader may be stopped at any instant
    (`background.pace`), so every read is a short transaction; while one is stopped, the log grows (`empty_log`).
    """

    def __init__(self, folder: LearnFolder | None, *, stays_open: bool = False) -> None:
        """`stays_open` keeps one connection for writes, until `close`; the log is then not synced at each commit, so
        that where the machine loses power the last ones may be lost. Raises `LearnError`."""
        self._folder = folder
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._preview: LearnDatabase | None = None
        if stays_open or folder is None:
            with self._explained():
                self._connection = self._connect()
                self._connection.execute("PRAGMA synchronous = NORMAL")

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection on which each statement reads for itself; a database that is not there is empty.

        Nothing on disk changes: what an earlier release left is read into memory, and stays until somebody writes.
        """
        with self._explained(), contextlib.ExitStack() as ending:
            if self._folder is None:
                assert self._connection is not None
                ending.enter_context(self._lock)
                yield self._connection
            elif (preview := self._preview_of(self._folder)) is not None:
                yield ending.enter_context(preview.reading())
            else:
                yield ending.enter_context(contextlib.closing(self._connect(writes=False)))

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A connection in a transaction, which is committed at the end of the body, or undone where that raises."""
        with self._explained(), self._lock, contextlib.ExitStack() as closing:
            connection = self._connection
            if connection is None:
                connection = closing.enter_context(contextlib.closing(self._connect()))
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def empty_log(self, wait_s: float = 0.0) -> bool:
        """Have the log's content in the file alone, and free pages given back: what was deleted is then nowhere.

        False where a reader was in the way for `wait_s`.
        """
        if self._folder is None:
            return True
        with self._explained(), contextlib.closing(self._connect()) as connection:
            connection.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page
            connection.execute(f"PRAGMA busy_timeout = {int(wait_s * 1000)}")
            [is_busy, *_] = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return not is_busy

    @property
    def log_bytes(self) -> int:
        """Size of the log."""
        try:
            return 0 if self._folder is None else self._log_file.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def _log_file(self) -> Path:
        assert self._folder is not None
        return Path(f"{self._folder.database}-wal")

    def close(self) -> None:
        """Close the connection that stays open; one that is in memory stays as long as the object does."""
        with self._lock:
            if self._folder is not None and self._connection is not None:
                self._connection.close()
                self._connection = None

    def _preview_of(self, folder: LearnFolder) -> LearnDatabase | None:
        """What the database will be once the old files have been taken over, read once; None where there are none."""
        while old_files := folder.old_files:
            if self._preview is not None:
                return self._preview
            preview = LearnDatabase(None)
            assert preview._connection is not None
            with contextlib.closing(self._connect(writes=False)) as connection:
                connection.backup(preview._connection)
            with contextlib.suppress(FileNotFoundError):
                copy_old_files(preview._connection, folder)
                if folder.old_files == old_files:  # else they are in the database now
                    self._preview = preview
        return None

    def _connect(self, writes: bool = True) -> sqlite3.Connection:
        folder, target, is_fixed = self._folder, ":memory:", False
        if folder is not None and writes:
            with contextlib.suppress(FileExistsError):  # SQLite would let others read it
                os.close(os.open(folder.database, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if folder is not None and folder.database.exists():
            target = str(folder.database)
            # Where no log is there or can be made, SQLite reads only a file that it is told does not change.
            is_fixed = not (writes or self._log_file.exists() or os.access(folder.path, os.W_OK))
            if is_fixed:
                target = f"{folder.database.absolute().as_uri()}?immutable=1"
        connection = sqlite3.connect(
            target, WAIT_S, isolation_level=None, check_same_thread=False, uri=is_fixed
        )
        try:
            connection.create_function("belongs_to", 2, belongs_to, deterministic=True)
            connection.execute("PRAGMA secure_delete = ON").fetchall()
            [found] = connection.execute("PRAGMA user_version").fetchone()
            if found > FORMAT:
                raise LearnError(
                    f"{str(folder and folder.database)!r} was written by a later release of slipstream"
                )
            if found < FORMAT:
                make_tables(connection)
            if folder is not None and writes and folder.old_files:
                take_over(connection, folder)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if self._folder is None:
                raise LearnError(f"records cannot be kept in memory: {error}") from None
            if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                raise LearnError(
                    f"{str(self._folder.database)!r} is damaged: {error}; sqlite3's .recover may save what it holds; "
                    "remove it to serve the base drafter"
                ) from None
            raise self._folder.unwritable(error) from None
