"""Answers on disk as they come, so that an audit that ends early can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import msgspec

from slipstream.errors import ConfigError
from slipstream.tools.audit.records import AuditReply

FILE = "answers.jsonl"


class AuditJournal:
    """The replies of each side by request. Without a file they are kept in memory only.

    The first line of the file says what is sent. A journal of another audit is refused.
    """

    def __init__(self, file: Path | None = None, resume: bool = False) -> None:
        self._file = file
        self._resume = resume
        self._stream: IO[str] | None = None
        self._replies: dict[tuple[str, int], AuditReply] = {}
        self.num_resumed = 0
        """Replies that were there already."""

    def open(self, key: dict[str, Any]) -> None:
        """Begin the audit that `key` describes, or go on with it; raises `ConfigError` where the file is of another."""
        if self._file is None:
            return
        found = self._read(key) if self._resume and self._file.is_file() else []
        self._replies = {
            (entry["side"], entry["reply"]["request"]): msgspec.convert(entry["reply"], AuditReply)
            for entry in found
        }
        self.num_resumed = len(self._replies)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._file.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {str(self._file)!r}: {error.strerror}") from None
        self._write({"audit": key})
        for entry in found:
            self._write(entry)

    def _read(self, key: dict[str, Any]) -> list[dict[str, Any]]:
        """The entries of a file that describes the same audit; a line that was cut off is dropped."""
        assert self._file is not None
        entries: list[dict[str, Any]] = []
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                entries.append(json.loads(line))
            except ValueError:
                break
        if not entries or entries[0].get("audit") != json.loads(json.dumps(key)):
            changed = sorted(
                name for name in key if not entries or entries[0].get("audit", {}).get(name) != key[name]
            )
            raise ConfigError(
                f"{str(self._file)!r} holds the answers of another audit ({', '.join(changed)} differ); "
                "give the same arguments to --resume, or leave it out to begin anew"
            )
        return entries[1:]

    def get(self, side: str, request: int) -> AuditReply | None:
        """The reply that is there, None where it must be requested."""
        return self._replies.get((side, request))

    def add(self, side: str, reply: AuditReply) -> None:
        """Keep a reply; failed ones are kept in memory only, so that a resumed audit sends them again."""
        self._replies[side, reply.request] = reply
        if reply.error is None:
            self._write({"side": side, "reply": reply.as_json()})

    def side(self, side: str) -> dict[int, AuditReply]:
        """All replies of a side, by request."""
        return {request: reply for (name, request), reply in self._replies.items() if name == side}

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _write(self, entry: dict[str, Any]) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._stream.flush()
