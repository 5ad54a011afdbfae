"""A file of framed records: what was written whole can be read, whatever became of what came after it."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptRecordError, LearnError
from slipstream.learn.storage.folder import write_whole

FORMAT = 1
SUFFIX = ".ring"
_FRAME = struct.Struct("<4sIIQ")
"""Mark, length of the payload, CRC-32 of number and payload, number."""
_MARK = b"SLR1"
_NUMBER = struct.Struct("<Q")
FRAME_BYTES = _FRAME.size


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
class Frame:
    """One record as it lies in a segment."""

    number: int
    payload: bytes

    def encoded(self) -> bytes:
        """Return the frame with its head."""
        crc = zlib.crc32(self.payload, zlib.crc32(_NUMBER.pack(self.number)))
        return _FRAME.pack(_MARK, len(self.payload), crc, self.number) + self.payload


def segment_files(folder: Path) -> list[Path]:
    """The segments of a ring, the oldest first; they are named by the number of their first record."""
    try:
        return sorted(one for one in folder.iterdir() if one.suffix == SUFFIX and one.stem.isdigit())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LearnError(f"cannot read {str(folder)!r}: {error.strerror}") from None


def segment_file(folder: Path, first: int) -> Path:
    """The segment that begins with record `first`."""
    return folder / f"{first:012d}{SUFFIX}"


def segment_head(identity: RingIdentity) -> bytes:
    """The first line of a segment."""
    return json.dumps({"slipstream_ring": FORMAT, **asdict(identity)}).encode("ascii") + b"\n"


def read_head(file: Path) -> tuple[RingIdentity, int]:
    """(identity, bytes of the head); raises `CorruptRecordError` where the file is no segment."""
    try:
        with file.open("rb") as stream:
            line = stream.readline(4096)
        found: dict[str, Any] = json.loads(line)
        if not line.endswith(b"\n") or found.pop("slipstream_ring") != FORMAT:
            raise ValueError("another format")
        return RingIdentity(**found), len(line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptRecordError(f"{str(file)!r} is no segment of a ring: {error}") from None


def read_frames(file: Path) -> Iterator[Frame]:
    """The whole frames of a segment, up to the first that is not whole: there a writer died, or the disk failed.

    A file that is gone has none. Raises `LearnError` where it cannot be read.
    """
    try:
        _, begin = read_head(file)
        with file.open("rb") as stream:
            stream.seek(begin)
            while True:
                head = stream.read(_FRAME.size)
                if len(head) < _FRAME.size:
                    return
                mark, length, crc, number = _FRAME.unpack(head)
                if mark != _MARK:
                    return
                payload = stream.read(length)
                if len(payload) < length or zlib.crc32(payload, zlib.crc32(_NUMBER.pack(number))) != crc:
                    return
                yield Frame(number, payload)
    except (FileNotFoundError, CorruptRecordError):
        return
    except OSError as error:
        raise LearnError(f"cannot read {str(file)!r}: {error.strerror}") from None


def count_frames(file: Path) -> int:
    """How many frames a segment seems to hold, from their heads alone."""
    try:
        _, at = read_head(file)
        num = 0
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            while at + _FRAME.size <= size:
                stream.seek(at)
                mark, length, _, _ = _FRAME.unpack(stream.read(_FRAME.size))
                at += _FRAME.size + length
                if mark != _MARK or at > size:
                    break
                num += 1
            return num
    except (FileNotFoundError, CorruptRecordError, struct.error):
        return 0
    except OSError as error:
        raise LearnError(f"cannot read {str(file)!r}: {error.strerror}") from None


def rewrite(file: Path, frames: list[Frame]) -> None:
    """Replace a segment by one with these frames only, perhaps none."""
    identity, _ = read_head(file)
    write_whole(file, segment_head(identity) + b"".join(frame.encoded() for frame in frames))


class SegmentWriter:
    """Appends frames to one segment, which it makes."""

    def __init__(self, file: Path, identity: RingIdentity) -> None:
        """Raises `OSError` where the file cannot be made."""
        self.file = file
        handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._stream = os.fdopen(handle, "wb", buffering=0)
        self.num_bytes = 0
        self._write(segment_head(identity))

    def is_in_place(self) -> bool:
        """False where the file has been replaced or removed since, as `forget` does."""
        try:
            found = self.file.stat()
        except FileNotFoundError:
            return False
        own = os.fstat(self._stream.fileno())
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def append(self, frame: bytes) -> None:
        """Hand a frame to the system. Raises `OSError`; the file then ends as before, as far as that is possible.

        A frame that was handed over outlives this process. It is not synced: where the machine loses power, the last
        ones may be lost, which the reader finds.
        """
        self._write(frame)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def _write(self, data: bytes) -> None:
        view, written = memoryview(data), 0
        try:
            while written < len(view):  # a disk that becomes full takes a part
                written += self._stream.write(view[written:]) or 0
        except OSError:
            with contextlib.suppress(OSError):
                self._stream.truncate(self.num_bytes)
                self._stream.seek(self.num_bytes)
            raise
        self.num_bytes += len(data)
