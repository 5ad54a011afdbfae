"""Parses tool calls out of an answer's text while it is streamed."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from slipstream.serve.tools.formats import ToolFormat

_ID_ALPHABET = string.ascii_letters + string.digits
ID_LENGTH = 9
"""The only length of ids that the chat templates of Mistral's models accept; other models accept any."""


@dataclass(slots=True)
class ToolCall:
    """One call, as far as it has been read."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_LENGTH)))

    def message(self) -> dict[str, Any]:
        """The call in the shape of a message."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class CallReader:
    """Reads one answer that follows the grammar of `ToolUse`. Text that may be the beginning of a call's mark is
    held back. An answer that was cut off may have arguments that are incomplete JSON.
    """

    def __init__(self, tool_format: ToolFormat) -> None:
        self.calls: list[ToolCall] = []
        self._format = tool_format
        self._rest = ""  # read, and not yet returned
        self._begun = False  # some text has been returned
        self._lead: str | None = None  # the fixed text that comes next; None in free text
        self._scan: _ObjectScan | None = None  # within arguments

    @property
    def is_within_call(self) -> bool:
        """Whether the last call's arguments are incomplete."""
        return self._scan is not None

    def feed(self, text: str, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """The free text, and the new parts of calls in the shape of a stream's deltas, one a call.

        `last` is true once the answer has ended.
        """
        self._rest += text
        content = self._free_text(last) if self._lead is None and self._scan is None else ""
        parts: dict[int, dict[str, Any]] = {}
        while self._read_name(parts) or self._read_arguments(parts):
            pass
        return content, list(parts.values())

    def _free_text(self, last: bool) -> str:
        """The text that is certainly not part of a call; a mark begins a call."""
        form, mark = self._format, self._format.mark
        at = self._rest.find(mark) if form.anywhere else (0 if self._rest.startswith(mark) else -1)
        if at >= 0 and (form.anywhere or not self._begun):
            content, self._rest = self._rest[:at], self._rest[at + len(mark) :]
            self._lead = (form.begin + form.head).removeprefix(mark)
            return content
        held = 0
        if not last and (form.anywhere or not self._begun):
            longest = min(len(mark) - 1, len(self._rest))
            held = next((n for n in range(longest, 0, -1) if mark.startswith(self._rest[-n:])), 0)
            held = held if form.anywhere or held == len(self._rest) else 0
        content, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
        self._begun = self._begun or bool(content)
        return content

    def _read_name(self, parts: dict[int, dict[str, Any]]) -> bool:
        """Begin a call whose name is complete."""
        if self._lead is None or not self._rest.startswith(self._lead):
            return False
        name, middle, rest = self._rest[len(self._lead) :].partition(self._format.middle)
        if not middle:
            return False
        call = ToolCall(name)
        parts[len(self.calls)] = {"index": len(self.calls), **call.message()}
        self.calls.append(call)
        self._lead, self._rest, self._scan = None, rest, _ObjectScan()
        return True

    def _read_arguments(self, parts: dict[int, dict[str, Any]]) -> bool:
        """Return the new part of a call's arguments."""
        if self._scan is None or not self._rest:
            return False
        length = self._scan.feed(self._rest)
        piece, self._rest = self._rest[:length], self._rest[length:]
        index = len(self.calls) - 1
        self.calls[-1].arguments += piece
        part = parts.setdefault(index, {"index": index, "function": {"arguments": ""}})
        part["function"]["arguments"] += piece
        if self._scan.ended:
            form, self._scan = self._format, None
            self._lead = form.tail + (form.between or "") + form.head
        return True


class _ObjectScan:
    """Finds where a JSON object ends."""

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """The number of characters of `text` that belong to the object."""
        for number, character in enumerate(text, start=1):
            if self._in_string:
                closes = character == '"' and not self._escaped
                self._escaped = character == "\\" and not self._escaped
                self._in_string = not closes
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    return number
        return len(text)
