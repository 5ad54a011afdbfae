"""The folder in which learning keeps its state: where things are, locks between processes, whole files or none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import LearnError


class LearnFolder:
    """`ring/`, `versions/`, `state.json`, `events.jsonl`, `forgotten.json`, `learner.log` below one path.

    Readers need no lock: every file is replaced as a whole or appended to. Writers of several processes, such as a
    server, its learner and `slipstream learn forget`, exclude each other by `lock`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ring = path / "ring"
        self.versions = path / "versions"
        self.state = path / "state.json"
        self.events = path / "events.jsonl"
        self.forgotten = path / "forgotten.json"
        self.learner_log = path / "learner.log"
        self.lanes = path / "lanes"
        """Checkpoints of versions while a server loads them."""

    def create(self) -> None:
        """Make the folder for its owner alone; raises `LearnError` where nothing can be written there."""
        try:
            for folder in (self.path, self.ring, self.versions):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.lock("state"):
                pass
        except OSError as error:
            raise self.unwritable(error) from None

    def check(self) -> None:
        """Raise `LearnError` unless a server has learned here."""
        if not self.ring.is_dir() and not self.state.is_file():
            raise LearnError(
                f"{str(self.path)!r} is no folder of slipstream serve --learn: it has neither ring nor state.json"
            )

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Exclude other threads and processes from what `name` guards: ring, versions or state. Not re-entrant."""
        handle = os.open(self.path / f".{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)  # which releases the lock, as does the death of the process

    def clear_leftovers(self) -> None:
        """Delete what writers who were killed left half written: of older records, versions and states.

        Where a writer is at work it is waited for. Raises `LearnError`.
        """
        guarded = {
            "ring": [(self.ring, ".*.tmp")],
            "versions": [(self.versions, ".tmp-*")],
            "state": [(self.path, ".state.json.*.tmp"), (self.path, ".forgotten.json.*.tmp")],
            "events": [(self.path, ".events.jsonl.*.tmp"), (self.path, ".learner.log.*.tmp")],
        }
        try:
            for name, places in guarded.items():
                with self.lock(name):
                    for leftover in [one for place, pattern in places for one in place.glob(pattern)]:
                        if leftover.is_dir():
                            shutil.rmtree(leftover)
                        else:
                            leftover.unlink()
        except OSError as error:
            raise self.unwritable(error) from None

    def unwritable(self, error: OSError) -> LearnError:
        """What to tell where a write failed."""
        return LearnError(
            f"cannot write in {str(self.path)!r}: {error.strerror or error}; give --learn a folder that can be written"
        )


def write_whole(file: Path, data: bytes) -> None:
    """Replace a file by `data`: after a crash at any instant it is the old one or the new one, whole."""
    beside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(beside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Have the system write down which files a folder has."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
