"""The folder in which learning keeps its state: where things are, locks between processes, whole files or none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import LearnError

WRITER_WAIT_S = 2.0
"""How long one waits to add records: a command that takes over an earlier release's files holds the place so long."""


class LearnFolder:
    """`learn.sqlite`, `versions/` and `learner.log` below one path.

    `storage.database` reads and writes the first. Those who write versions, such as a learner and `slipstream learn
    forget`, exclude each other by `lock`; readers need none, since a version is there whole or not at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / "learn.sqlite"
        self.versions = path / "versions"
        self.learner_log = path / "learner.log"
        self.checkpoints = path / "checkpoints"
        """Checkpoints of versions while a server loads them."""

    @property
    def old_files(self) -> list[Path]:
        """What a release before the database left here."""
        names = ("ring", "state.json", "events.jsonl", "forgotten.json")
        return [file for name in names if (file := self.path / name).exists()]

    @property
    def is_used(self) -> bool:
        """Whether a server has learned here."""
        return self.database.is_file() or bool(self.old_files)

    def create(self) -> None:
        """Make the folder for its owner alone; raises `LearnError` where nothing can be written there."""
        try:
            for folder in (self.path, self.versions):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.lock("versions"):
                pass
        except OSError as error:
            raise self.unwritable(error) from None

    def check(self) -> None:
        """Raise `LearnError` unless a server has learned here."""
        if not self.is_used:
            raise LearnError(
                f"{str(self.path)!r} is no folder of slipstream serve --learn: it has no {self.database.name}"
            )

    @contextlib.contextmanager
    def lock(self, name: str, *, waits: bool = True) -> Iterator[None]:
        """Exclude other threads and processes from what `name` guards. Not re-entrant. Raises `BlockingIOError` where
        it is taken and the caller does not wait."""
        handle = os.open(self.path / f".{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(handle)  # which releases the lock, as does the death of the process

    @contextlib.contextmanager
    def held_by_one_server(self) -> Iterator[None]:
        """Be the one who adds records; raises `LearnError` where another process is for more than `WRITER_WAIT_S`."""
        until_s = time.monotonic() + WRITER_WAIT_S
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(self.lock("writer", waits=False))
                    break
                except BlockingIOError:
                    if time.monotonic() >= until_s:
                        raise LearnError(
                            f"another server learns in {str(self.path)!r}; give --learn a folder of this one's own"
                        ) from None
                time.sleep(0.02)
            yield

    def clear_leftovers(self) -> None:
        """Delete what writers who were killed left half written, and the folder that a release before used for
        checkpoints while they were loaded.

        Where a writer is at work it is waited for. Raises `LearnError`.
        """
        try:
            with self.lock("versions"):
                half_written = [*self.versions.glob(".tmp-*"), *self.path.glob(".*.tmp")]
                for leftover in [*half_written, *self.path.glob("lanes")]:
                    if leftover.is_dir():
                        shutil.rmtree(leftover)
                    else:
                        leftover.unlink(missing_ok=True)
        except OSError as error:
            raise self.unwritable(error) from None

    def unwritable(self, error: Exception) -> LearnError:
        """What to tell where a write failed."""
        why = getattr(error, "strerror", None) or error
        return LearnError(
            f"cannot write in {str(self.path)!r}: {why}; give --learn a folder that can be written"
        )
