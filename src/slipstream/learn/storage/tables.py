"""The tables of a folder's database, and what a record's row holds."""

from __future__ import annotations

import sqlite3
import zlib

from slipstream.learn.records.served import ServedRecord

FORMAT = 1
"""Raised when another release could misread the tables."""

_TABLES = """
CREATE TABLE IF NOT EXISTS records (
  number INTEGER PRIMARY KEY AUTOINCREMENT, purpose TEXT NOT NULL, tenant TEXT NOT NULL, task TEXT NOT NULL,
  created_s REAL NOT NULL, num_bytes INTEGER NOT NULL, crc INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS records_by_age ON records (created_s, num_bytes);
CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS forgotten (tenant_key TEXT PRIMARY KEY, until_s REAL NOT NULL);
"""
"""`documents` holds JSON: `identity`, whose answers the records are, and `state`; `events` a JSON object a row."""


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables of a database that has none."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {FORMAT}; COMMIT")


def insert_record(
    connection: sqlite3.Connection, record: ServedRecord, data: bytes, number: int | None = None
) -> int:
    """Add a record, encoded as `data`; returns its number.

    That is `number` where one is given and no other record has it, else the next one. With a `number`, a record that is
    there already is not added again.
    """
    what = record.created_s, len(data), zlib.crc32(data)
    if number is not None:
        same = "SELECT number FROM records WHERE created_s = ? AND num_bytes = ? AND crc = ?"
        if (row := connection.execute(same, what).fetchone()) is not None:
            return int(row[0])
        if connection.execute("SELECT 1 FROM records WHERE number = ?", (number,)).fetchone() is not None:
            number = None
    if number is None:
        [number] = connection.execute(
            "SELECT coalesce(max(seq) + 1, 0) FROM sqlite_sequence WHERE name = 'records'"
        ).fetchone()
    names = (as_text(one) for one in (record.purpose, record.tenant, record.task))
    connection.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (number, *names, *what, data))
    return int(number)


def count_from(connection: sqlite3.Connection, number: int) -> None:
    """Give the next record at least this number."""
    connection.execute(
        "INSERT INTO sqlite_sequence (name, seq) SELECT 'records', -1 "
        "WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'records')"
    )
    connection.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'records'", (number - 1,))


def as_text(name: str) -> str:
    """A name as a column holds it: what no UTF-8 can say is escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def put_document(connection: sqlite3.Connection, name: str, value: str) -> None:
    """Replace a document."""
    connection.execute("INSERT OR REPLACE INTO documents VALUES (?, ?)", (name, value))


def document(connection: sqlite3.Connection, name: str) -> str | None:
    """A document's text; None where there is none."""
    row = connection.execute("SELECT value FROM documents WHERE name = ?", (name,)).fetchone()
    return None if row is None else str(row[0])


def is_forgotten(connection: sqlite3.Connection, keys: tuple[str, ...], began_s: float) -> bool:
    """Whether what began then, of any of these `tenant_keys`, has been forgotten since."""
    until_s = dict(connection.execute("SELECT tenant_key, until_s FROM forgotten"))
    return any(began_s <= until_s.get(key, -1.0) for key in keys)
