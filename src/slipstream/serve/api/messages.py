"""Conversations, from what clients send to what chat templates read."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.serve.api.errors import ApiError, invalid
from slipstream.serve.api.schema import Message
from slipstream.serve.network.json_body import has_lone_surrogate, is_too_deep
from slipstream.serve.tools.formats import ToolFormat
from slipstream.serve.tools.tools import described


def for_template(
    messages: Seq[Message], spelled: ToolFormat | None, tools: Seq[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The messages, each with its text in one piece and only the fields that were given.

    Arguments of calls are decoded, as templates expect them. For a template without tools `spelled` is a format:
    calls are written into the text in it, and `tools` into the system message. Raises `ApiError` 400 that names the
    message.
    """
    plain = [_plain(number, message, spelled) for number, message in enumerate(messages)]
    if spelled is None or not tools:
        return plain
    text = described(tools, spelled)
    if plain and plain[0]["role"] in ("system", "developer") and isinstance(plain[0].get("content"), str):
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(number: int, message: Message, spelled: ToolFormat | None) -> dict[str, Any]:
    if message.role == "tool" and not message.tool_call_id:
        param = f"messages.{number}.tool_call_id"
        problem = f"{param} is missing: a tool's message names the call that it answers"
        raise ApiError(400, problem, param=param, code="missing_required_parameter")
    fields = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        fields["content"] = _joined(f"messages.{number}.content", message.content)
    calls = fields.pop("tool_calls", None)
    if message.role == "assistant":
        fields["content"] = fields.get("content") or ""
    if not calls:
        return fields
    fields["content"] = fields.get("content") or ""
    for call in calls:
        call["function"]["arguments"] = _decoded(number, call["function"]["arguments"])
    if spelled is None:
        return fields | {"tool_calls": calls}
    functions = [call["function"] for call in calls]
    written = spelled.written(
        [(one["name"], json.dumps(one["arguments"], ensure_ascii=False)) for one in functions]
    )
    return fields | {"content": fields["content"] + written}


def _joined(param: str, parts: list[dict[str, Any]]) -> str:
    """The joined text of parts; raises `ApiError` 400 for parts of other types."""
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            message = f"{param} has a part of type {part.get('type')!r}; this model reads text only"
            raise invalid(message, param)
    return "".join(part["text"] for part in parts)


def _decoded(number: int, arguments: str) -> dict[str, Any]:
    """The decoded arguments of an earlier call; an empty text has none."""
    if not arguments.strip():
        return {}
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict) or is_too_deep(decoded) or has_lone_surrogate(decoded):
        param = f"messages.{number}.tool_calls"
        raise invalid(f"{param}: the arguments of a call are a JSON object, as text", param)
    return decoded
