"""Packed weights that are kept from one start to the next, so that they are read instead of packed.

A copy is one file in the cache folder, named by what the verdict on the model has of its weights
(`models/verdicts.py`): the checkpoint's files, the format, the kernels and Slipstream's own sources. It has the
numbers of each `PackedWeight` with codes of 4 or 8 bits, in the order in which they are packed, each behind its size
and a checksum. What is missing or damaged is packed again. All copies together take at most `bound()` bytes: those
that were not used for the longest time go first. They can be removed at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from slipstream.config import cache_folder
from slipstream.core.whole_files import writing_whole
from slipstream.errors import ConfigError

log = logging.getLogger(__name__)

BOUND = "SLIPSTREAM_PACKED_GB"
LEAST_BYTES = 2**25
"""Smaller models are packed in less than a fifth of a second and not kept."""
_LONGEST_WRITE_S = 3600.0
_ENTRY = struct.Struct("<QI")
"""In front of a tensor's numbers: how many bytes they are, and their CRC-32."""
_copy: ContextVar[PackedCopy | None] = ContextVar("packed_copy", default=None)


def bound() -> int:
    """Bytes that all copies may take: `SLIPSTREAM_PACKED_GB`, else 8 GB; with 0 none is kept. Raises `ConfigError`."""
    text = os.environ.get(BOUND, "8")
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < 1e9:
            return int(number * 1e9)
    raise ConfigError(f"{BOUND} must be how many gigabytes packed weights may take, 0 for none; got {text!r}")


def current_copy() -> PackedCopy | None:
    """Where weights that are packed here are read and kept."""
    return _copy.get()


class PackedCopy:
    """The copy of one model's packed weights, whether there is one or not."""

    def __init__(self, name: str) -> None:
        """Raises `ConfigError` as `bound` does."""
        self._bound = bound()
        self._file = cache_folder() / "packed" / f"{name}.weights"
        self._stream: FileIO | None = None
        """None where there is nothing to read, or no more."""
        self._weights: list[Tensor] = []

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let weights that are packed in the body be taken from here."""
        token = _copy.set(self)
        try:
            with contextlib.ExitStack() as opened:
                if self._bound:
                    with contextlib.suppress(OSError):
                        self._stream = opened.enter_context(self._file.open("rb", buffering=0))
                yield
        finally:
            _copy.reset(token)

    def fill(self, tensors: Sequence[Tensor]) -> bool:
        """Read the next weight's numbers into `tensors`; False where they are not there and must be packed."""
        self._weights += tensors
        if self._stream is None:
            return False
        for tensor in tensors:
            if not _read(self._stream, tensor):
                log.warning("packed weights in %s are damaged; they are packed and written anew", self._file)
                self._stream = None
                return False
        return True

    def keep(self) -> None:
        """Write what was packed in the place of the oldest copies, unless all was read or there is no room for it."""
        folder, size = self._file.parent, sum(_ENTRY.size + tensor.nbytes for tensor in self._weights)
        try:
            if self._stream is not None:
                os.utime(self._file)
            elif LEAST_BYTES <= size <= self._bound:
                folder.mkdir(parents=True, exist_ok=True)
                _remove_oldest(folder, self._bound - size)
                if shutil.disk_usage(folder).free < 2 * size:
                    log.info("packed weights are not kept in %s, which is nearly full", folder)
                    return
                with writing_whole(self._file) as stream:
                    for tensor in self._weights:
                        _write(stream, tensor)
            _remove_oldest(folder, self._bound)
        except OSError as error:
            log.info("packed weights cannot be kept in %s (%s)", folder, error.strerror)


def _numbers(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in its own memory."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read(stream: FileIO, tensor: Tensor) -> bool:
    """Fill a tensor; False where the file has another one, a damaged one or none."""
    numbers = _numbers(tensor)
    try:
        head = stream.read(_ENTRY.size)
        if len(head) != _ENTRY.size or _ENTRY.unpack(head)[0] != len(numbers):
            return False
        done = 0
        while done < len(numbers):  # the system reads at most 2 GiB at a time
            count = stream.readinto(numbers[done:])
            if not count:
                return False
            done += count
    except OSError:
        return False
    return bool(_ENTRY.unpack(head)[1] == zlib.crc32(numbers))


def _write(stream: BinaryIO, tensor: Tensor) -> None:
    numbers = _numbers(tensor)
    stream.write(_ENTRY.pack(len(numbers), zlib.crc32(numbers)))
    stream.write(numbers)


def _remove_oldest(folder: Path, most: int) -> None:
    """Remove copies, the one that was not used for the longest time first, until all take at most so many bytes; and
    what writers left that were killed."""
    now = time.time()
    for left in folder.glob(".*.tmp"):
        if now - left.stat().st_mtime > _LONGEST_WRITE_S:
            left.unlink(missing_ok=True)
    found = [(each.stat(), each) for each in folder.glob("*.weights")]
    for state, copy in sorted(found, key=lambda pair: -pair[0].st_mtime):
        most -= state.st_size
        if most < 0:
            copy.unlink(missing_ok=True)
