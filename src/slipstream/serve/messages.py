"""Conversations as clients send them, as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.serve.errors import ApiError
from slipstream.serve.schema import Message, is_too_deep
from slipstream.serve.tool_formats import ToolFormat
from slipstream.serve.tools import described


def for_template(
    messages: Seq[Message], spelled: ToolFormat | None, tools: Seq[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The messages, each with its text in one piece and only the fields that were given.

    Arguments of calls are decoded, as templates expect them. A template that does not know tools has `spelled`: then
    calls are written into the text in that format, and what `tools` there are into the system's message.
    Raises `ApiError` 400 that names the message.
    """
    plain = [_plain(number, message, spelled) for number, message in enumerate(messages)]
    if spelled is None or not tools:
        return plain
    text = described(tools, spelled)
    if plain and plain[0]["role"] == "system" and isinstance(plain[0].get("content"), str):
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(number: int, message: Message, spelled: ToolFormat | None) -> dict[str, Any]:
    fields = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        fields["content"] = _joined(f"messages.{number}.content", message.content)
    if "tool_calls" not in fields:
        return fields
    calls = fields.pop("tool_calls")
    if not calls:
        return fields
    decoded = _decoded(f"messages.{number}.tool_calls", calls)
    fields["content"] = fields.get("content") or ""
    if spelled is None:
        return fields | {"tool_calls": decoded}
    written = spelled.written(
        [
            (call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False))
            for call in decoded
        ]
    )
    return fields | {"content": fields["content"] + written}


def _joined(param: str, parts: list[dict[str, Any]]) -> str:
    """The text of parts; others cannot be read."""
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            message = f"{param} has a part of type {part.get('type')!r}; this model reads text only"
            raise ApiError(400, message, param=param, code="invalid_value")
    return "".join(part["text"] for part in parts)


def _decoded(param: str, calls: Any) -> list[dict[str, Any]]:
    """The calls of an earlier answer with their arguments as objects."""
    message = f"{param} is a list of calls as an answer has them, their arguments a JSON object as text"
    try:
        decoded = [
            call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
            for call in calls
        ]
        if not all(
            isinstance(call["function"]["name"], str)
            and isinstance(call["function"]["arguments"], dict)
            and not is_too_deep(call)
            for call in decoded
        ):
            raise TypeError
    except (TypeError, KeyError, ValueError, RecursionError):
        raise ApiError(400, message, param=param, code="invalid_value") from None
    return decoded
