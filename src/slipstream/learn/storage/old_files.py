"""Takes over what earlier releases left in a folder: a ring of segments, and files of JSON."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import CorruptRecordError, LearnError
from slipstream.learn.records.served import ServedRecord, tenant_keys
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.tables import insert_record, is_forgotten, put_document

_FRAME = struct.Struct("<4sIIQ")
"""Mark, length of the payload, CRC-32 of number and payload, number."""
_MARK = b"SLR1"


def take_over(connection: sqlite3.Connection, folder: LearnFolder) -> None:
    """Move their content into the database and delete them; interrupted at any instant, the next call completes it.

    Raises `LearnError` where a server of an earlier release still writes there, or a file cannot be read.
    """
    with folder.held_by_one_server():
        connection.execute("BEGIN IMMEDIATE")
        try:
            _take_over_json(connection, folder)
            for file in sorted((folder.path / "ring").glob("*.ring")):
                _take_over_segment(connection, file)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        for file in [
            *folder.old_files,
            *(folder.path / f".{name}.lock" for name in ("ring", "state", "events")),
        ]:
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink(missing_ok=True)


def _take_over_json(connection: sqlite3.Connection, folder: LearnFolder) -> None:
    forgotten, state, events = (
        folder.path / name for name in ("forgotten.json", "state.json", "events.jsonl")
    )
    if forgotten.exists():
        rows = list(_json(forgotten).items())
        connection.executemany("INSERT OR REPLACE INTO forgotten VALUES (?, ?)", rows)
    if state.exists():
        put_document(connection, "state", json.dumps(_json(state)))
    if events.exists():
        for line in events.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # a crash cut it off
                connection.execute("INSERT INTO events (value) VALUES (?)", (json.dumps(json.loads(line)),))


def _json(file: Path) -> dict[str, object]:
    try:
        return dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise LearnError(
            f"{str(file)!r} cannot be used: {error}; remove it to serve the base drafter"
        ) from None


def _take_over_segment(connection: sqlite3.Connection, file: Path) -> None:
    with file.open("rb") as stream, contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        identity = json.loads(stream.readline(4096))  # a writer may have died before the line was whole
        del identity["slipstream_ring"]
        put_document(connection, "identity", json.dumps(identity))
        data = stream.read()
        for number, payload in _frames(data):
            with contextlib.suppress(CorruptRecordError):
                record = ServedRecord.decoded(payload)
                if not is_forgotten(connection, tenant_keys(record.tenant), record.created_s):
                    insert_record(connection, record, payload, number)


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and payload of the whole frames, up to the first that is not: there a writer died."""
    at = 0
    while at + _FRAME.size <= len(data):
        mark, length, crc, number = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + length]
        at += _FRAME.size + length
        if (
            mark != _MARK
            or len(payload) < length
            or zlib.crc32(payload, zlib.crc32(struct.pack("<Q", number))) != crc
        ):
            return
        yield number, payload
