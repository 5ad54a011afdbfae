"""What happened while the drafter learned, and why: refused candidates among them."""

from __future__ import annotations

import json
import time
from typing import Any

from slipstream.learn.storage.database import LearnDatabase
from slipstream.learn.storage.folder import LearnFolder

MAX_EVENTS = 10_000
"""Beyond so many the oldest are dropped."""


class EventLog:
    """Objects with `time_s` and `event`, in their order."""

    def __init__(self, folder: LearnFolder, max_events: int = MAX_EVENTS) -> None:
        self._database = LearnDatabase(folder)
        self._max_events = max_events

    def add(self, event: str, **status: Any) -> None:
        """Write an event down; `status` are plain values, and name no tenant but by its `tenant_key`.

        Raises `LearnError` where it cannot be written.
        """
        text = json.dumps({"time_s": round(time.time(), 3), "event": event, **status})
        with self._database.writing() as connection:
            number = connection.execute("INSERT INTO events (value) VALUES (?)", (text,)).lastrowid or 0
            connection.execute("DELETE FROM events WHERE number <= ?", (number - self._max_events,))

    def read(self, last: int = MAX_EVENTS) -> list[dict[str, Any]]:
        """The `last` events in their order; raises `LearnError` where they cannot be read."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT value FROM events ORDER BY number DESC LIMIT ?", (last,)
            ).fetchall()
        events = [json.loads(text) for [text] in reversed(rows)]
        return [event for event in events if isinstance(event, dict)]  # earlier builds took over any JSON
