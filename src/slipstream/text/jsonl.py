"""Users' JSON lines: one object a line; errors name the file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import RequestError

Message = dict[str, Any]
"""Keys that a message has at least: `role` and `content`."""


def read_text(file: Path) -> str:
    """The file's text; raises `RequestError` when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(f"there is no file {str(file)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {str(file)!r} as text: {error}") from None


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """('FILE, line N', object) for each non-blank line; raises `RequestError` for a line that is not a JSON object."""
    for number, line in enumerate(
        read_text(file).split("\n"), start=1
    ):  # JSON strings may hold other line breaks
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RequestError(f"{where} is not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise RequestError(f"{where} must be a JSON object, got {line.strip()[:40]}")
        yield where, row


def check_messages(messages: Any, where: str) -> list[Message]:
    """`messages`, checked to be a conversation; raises `RequestError`."""
    if not isinstance(messages, list):
        raise RequestError(f'{where} needs a list of messages like {{"role": "user", "content": "…"}}')
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise RequestError(f'{where}: a message is {{"role": "…", "content": "…"}}, got {message!r}')
    return messages


def up_to_last_user(messages: Any, where: str) -> tuple[list[Message], list[Message]]:
    """(conversation up to the last user message, recorded answers after it); raises `RequestError` without the
    former."""
    messages = check_messages(messages, where)
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise RequestError(f"{where} has no message to answer")
    return messages[:end], messages[end:]
