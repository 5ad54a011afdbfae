"""Takes over what earlier releases left in a folder: a ring of segments, and files of JSON.

The folder may have a database already, where a server went back to an earlier release for a while: nothing in it is
lost, and what the files add to it is added once.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import CorruptRecordError, LearnError
from slipstream.learn.records.served import ServedRecord, tenant_keys
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.tables import count_from, document, insert_record, is_forgotten, put_document

_FRAME = struct.Struct("<4sIIQ")
"""Mark, length of the payload, CRC-32 of number and payload, number."""
_MARK = b"SLR1"


def take_over(connection: sqlite3.Connection, folder: LearnFolder) -> None:
    """Move their content into the database and delete them; interrupted at any instant, the next call completes it.

    Raises `LearnError` where a server of an earlier release still writes there, or a file cannot be read.
    """
    connection.execute("BEGIN IMMEDIATE")  # waits for another process that takes them over
    try:
        with folder.held_by_one_server():
            copy_old_files(connection, folder)
            connection.execute("COMMIT")
            for file in [
                *reversed(folder.old_files),  # the ring last: a reader sees at once that files go
                *(folder.path / f".{name}.lock" for name in ("ring", "state", "events")),
            ]:
                if file.is_dir():
                    shutil.rmtree(file)
                else:
                    file.unlink(missing_ok=True)
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def copy_old_files(connection: sqlite3.Connection, folder: LearnFolder) -> None:
    """Add what the files hold, and is not there yet, to the database; they stay. Raises `LearnError`."""
    _copy_json(connection, folder)
    for file in sorted((folder.path / "ring").glob("*.ring")):
        if file.stem.isdigit():
            _copy_segment(connection, file)


def _copy_json(connection: sqlite3.Connection, folder: LearnFolder) -> None:
    forgotten, state, events = (
        folder.path / name for name in ("forgotten.json", "state.json", "events.jsonl")
    )
    if forgotten.exists():
        advice = (
            "repair it, an object of hashes of tenants with the seconds since 1970 until which each is forgotten: "
            "without it, what was deleted may be learned again"
        )
        with _advising(forgotten, advice):
            until_s = {key: float(value) for key, value in json.loads(forgotten.read_bytes()).items()}
        connection.executemany(
            "INSERT INTO forgotten VALUES (?, ?) ON CONFLICT (tenant_key) "
            "DO UPDATE SET until_s = max(until_s, excluded.until_s)",
            until_s.items(),
        )
    if state.exists():
        with _advising(state, "remove it to serve the base drafter; records, versions and events stay"):
            _copy_state(connection, json.loads(state.read_bytes()))
    if events.exists():
        there = {text for [text] in connection.execute("SELECT value FROM events")}
        for line in events.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # a crash cut it off
                event = json.loads(line)
                if isinstance(event, dict) and (text := json.dumps(event)) not in there:
                    connection.execute("INSERT INTO events (value) VALUES (?)", (text,))


def _copy_state(connection: sqlite3.Connection, old: Any) -> None:
    """What the database says of versions in use stays; what the old state forbids is forbidden there too."""
    new = dict(old)
    text = document(connection, "state")
    if text is not None:
        try:
            kept = dict(json.loads(text))
        except (ValueError, TypeError):  # its reader tells that it is damaged
            return
        new = {
            **kept,
            "number": 1 + max(one.get("number", 0) for one in (kept, old)),
            "frozen": any(one.get("frozen", False) for one in (kept, old)),
            "retired": {**old.get("retired", {}), **kept.get("retired", {})},
            "rebuild_since_s": max(one.get("rebuild_since_s", 0.0) for one in (kept, old)),
        }
    put_document(connection, "state", json.dumps(new))


@contextlib.contextmanager
def _advising(file: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        raise LearnError(f"{str(file)!r} cannot be used: {error}; {advice}") from None


def _copy_segment(connection: sqlite3.Connection, file: Path) -> None:
    count_from(connection, int(file.stem))  # a segment is named by its first number, and may be empty
    with file.open("rb") as stream, contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        identity = json.loads(stream.readline(4096))  # a writer may have died before the line was whole
        del identity["slipstream_ring"]
        known = document(connection, "identity")
        if known is None:
            put_document(connection, "identity", json.dumps(identity))
        elif json.loads(known) != identity:
            raise LearnError(
                f"{str(file)!r} holds answers of another model or chat template than the database beside it; "
                f"move {str(file.parent)!r} elsewhere"
            )
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
