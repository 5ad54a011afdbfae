"""What the learner's process writes on its standard error, in a file of bounded size: why it died is read there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from slipstream.learn.folder import write_whole

MAX_BYTES = 2**20
"""Bytes of the file; beyond it the older half is dropped."""
_MAX_LINE = 4096


class LearnerLog:
    """`learner.log`, for its owner alone; what cannot be written is lost, since nothing waits for it."""

    def __init__(self, file: Path, max_bytes: int = MAX_BYTES) -> None:
        self.file = file
        self._max_bytes = max_bytes

    def follow(self, stream: IO[str]) -> None:
        """Keep what comes until the stream ends; it is always read to its end, so that no writer ever waits."""
        with stream:
            while text := stream.readline(_MAX_LINE):
                try:
                    self.add(text)
                except OSError:
                    continue

    def add(self, text: str) -> None:
        """Append a text; raises `OSError`."""
        handle = os.open(self.file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        with os.fdopen(handle, "ab") as stream:
            stream.write(text.encode("utf-8", "backslashreplace"))
            size = stream.tell()
        if size > self._max_bytes:
            data = self.file.read_bytes()
            half = len(data) - self._max_bytes // 2
            write_whole(self.file, data[data.find(b"\n", half) + 1 or half :])
