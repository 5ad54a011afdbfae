"""What happened while the drafter learned, and why: one line an event, refused candidates among them."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from slipstream.errors import LearnError
from slipstream.learn.storage.folder import LearnFolder, write_whole

MAX_BYTES = 4 * 2**20
"""Bytes of the file; beyond it the older half is dropped."""


class EventLog:
    """`events.jsonl`: objects with `time_s` and `event`. A last line that was cut off by a crash is not read."""

    def __init__(self, folder: LearnFolder, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def add(self, event: str, **facts: Any) -> None:
        """Write an event down; `facts` are plain values, and name no tenant but by its `tenant_key`.

        Raises `LearnError` where it cannot be written.
        """
        line = json.dumps({"time_s": round(time.time(), 3), "event": event, **facts}, ensure_ascii=False)
        file = self._folder.events
        try:
            with self._folder.lock("events"):
                if file.is_file() and file.stat().st_size > self._max_bytes:
                    data = file.read_bytes()
                    write_whole(file, data[data.index(b"\n", len(data) // 2) + 1 :])
                handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
                with os.fdopen(handle, "rb+") as stream:
                    size = stream.seek(0, os.SEEK_END)
                    begin = b""
                    if size:
                        stream.seek(size - 1)
                        begin = b"" if stream.read(1) == b"\n" else b"\n"  # the line before was cut off
                    stream.write(begin + line.encode("utf-8", "surrogatepass") + b"\n")
                    stream.flush()
                    os.fsync(stream.fileno())
        except OSError as error:
            raise self._folder.unwritable(error) from None

    def read(self, last: int | None = None) -> list[dict[str, Any]]:
        """The events in their order, or the `last` of them; raises `LearnError` where the file cannot be read."""
        try:
            lines = self._folder.events.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LearnError(f"cannot read {str(self._folder.events)!r}: {error.strerror}") from None
        found: list[dict[str, Any]] = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return found if last is None else found[len(found) - last :]
