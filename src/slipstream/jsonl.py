"""JSON lines as users write them: one object a line, and one error that names file and line for anything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.errors import RequestError

Message = dict[str, Any]
"""At least `role` and `content`."""


def read_text(file: Path) -> str:
    """The file's text; raises `RequestError` when it cannot be had."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(f"there is no file {str(file)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {str(file)!r} as text: {error}") from None


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """'FILE, line N' and the object of each line that is not blank; raises `RequestError` for what is no object."""
    for number, line in enumerate(read_text(file).split("\n"), start=1):  # JSON may hold other line ends
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
    """The messages of a conversation; raises `RequestError` that says what a message looks like."""
    if not isinstance(messages, list):
        raise RequestError(f'{where} needs a list of messages like {{"role": "user", "content": "…"}}')
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise RequestError(f'{where}: a message is {{"role": "…", "content": "…"}}, got {message!r}')
    return messages


def up_to_last_user(messages: Any, where: str) -> tuple[list[Message], list[Message]]:
    """A recorded conversation without the answers at its end, and those; `RequestError` where nothing is left."""
    messages = check_messages(messages, where)
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise RequestError(f"{where} has no message to answer")
    return messages[:end], messages[end:]
