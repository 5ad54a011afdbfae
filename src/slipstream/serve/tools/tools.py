"""The tools of a request, which of them must be called, and the grammar of valid calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.sampling.grammars.compiler import WHITESPACE
from slipstream.sampling.structured import StructuredOutput
from slipstream.serve.api.errors import invalid
from slipstream.serve.api.schema import ChatBody, NamedTool, Tool
from slipstream.serve.tools.formats import ToolFormat


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call, and how."""

    format: ToolFormat
    tools: list[dict[str, Any]]
    """The client's descriptions, for the chat template."""
    callable: tuple[tuple[str, str], ...]
    """Name and JSON schema of the arguments of each function that may be called."""
    schemas: tuple[str, ...]
    """The JSON schemas of the arguments of all tools, not compiled yet."""
    must_call: bool
    many: bool
    """More than one call is allowed."""

    def grammar(self, special: Mapping[str, int], answer_schema: str | None = None) -> StructuredOutput:
        """The grammar: free text, or JSON under `answer_schema`, until the mark of a call; after it only valid
        calls.

        `special` are the model's added tokens. A token that spells a part of the format is allowed in its place;
        the others are allowed in free text.
        """
        return StructuredOutput(grammar="\n".join(_rules(self, special, answer_schema)))


def tool_use(body: ChatBody, tool_format: ToolFormat) -> ToolUse | None:
    """The tools of a request; None without any, and where none may be called. Raises `ApiError` 400 for tools that
    cannot be called.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools and choice not in (None, "none", "auto"):
        message = "tool_choice asks for a call, but there are no tools; give some, or leave tool_choice out"
        raise invalid(message, "tool_choice")
    if not tools or choice == "none":
        return None
    schemas: dict[str, str] = {}
    for number, tool in enumerate(tools):
        name = tool.function.name
        if name in schemas:
            raise invalid(f"tools has two functions called {name!r}; their names must differ", "tools")
        schemas[name] = _arguments_schema(number, tool)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in schemas:
            message = f"tool_choice names the function {name!r}, which is not among the tools"
            raise invalid(message, "tool_choice")
    may_call = {name: schemas[name]} if isinstance(choice, NamedTool) else schemas
    return ToolUse(
        tool_format,
        [tool.model_dump(exclude_none=True) for tool in tools],
        tuple(may_call.items()),
        tuple(schemas.values()),
        must_call=choice not in (None, "auto"),
        many=body.parallel_tool_calls is not False
        and tool_format.between is not None
        and not isinstance(choice, NamedTool),
    )


def _arguments_schema(number: int, tool: Tool) -> str:
    """The schema of a function's arguments; raises `ApiError` 400 unless they are an object."""
    param = f"tools.{number}.function.parameters"
    schema = dict(tool.function.parameters or {"properties": {}, "additionalProperties": False})
    if schema.setdefault("type", "object") != "object":
        raise invalid(f"{param}: arguments are an object, so the schema's type must be 'object'", param)
    if tool.function.strict:
        schema = _closed(schema)
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE} | dict(schema.get("x-guidance") or {})
    return json.dumps(schema)


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties` false in its objects. Objects that set it themselves, or that combine
    several schemas, stay as they are."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            closed[key] = {name: _closed(inner) for name, inner in schema[key].items()}
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    if "properties" not in schema:
        for key in ("anyOf", "oneOf", "prefixItems"):
            if isinstance(schema.get(key), list):
                closed[key] = [_closed(inner) for inner in schema[key]]
    elif not {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"} & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _rules(use: ToolUse, special: Mapping[str, int], answer_schema: str | None) -> list[str]:
    """The grammar in llguidance's variant of Lark's syntax, a rule a line."""
    form = use.format

    def said(text: str) -> str:
        """The rule of a fixed text, in which an added token may be the token or be spelled."""
        marks = [token for token in special if token in text]
        parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
        return " ".join(
            f"({json.dumps(part)} | <[{special[part]}]>)" if part in special else json.dumps(part)
            for part in parts
            if part
        )

    first = form.begin + form.head
    rules = [
        *(
            f"f{i}: {said(name + form.middle)} %json {schema}"
            for i, (name, schema) in enumerate(use.callable)
        ),
        "call: (" + " | ".join(f"f{number}" for number in range(len(use.callable))) + f") {said(form.tail)}",
        f"more: {said((form.between or '') + form.head)} call",
        f"calls: call {'more* ' if use.many else ''}{said(form.end)}",
    ]
    if use.must_call:
        return [f"start: {said(first)} calls", *rules]
    if answer_schema is not None:
        return [f"start: answer | {said(first)} calls", f"answer: %json {answer_schema}", *rules]
    behind = said(first.removeprefix(form.mark))
    token = special.get(form.mark)
    others = sorted(token for text, token in special.items() if text != form.mark)
    text = "(TEXT other)* " if others else ""
    before = "TEXT " if form.anywhere else ""
    by_token = f" | {text}{before}<[{token}]> {behind} calls" if token is not None else ""
    spelled = (text if form.anywhere else "") + "mark"
    return [
        f"start: {text}TEXT | {spelled} {behind} calls{by_token}",
        "TEXT: /(.|\\n)*/",
        f"mark[lazy]: {before}{json.dumps(form.mark)}",
        *([f"other: <[{','.join(map(str, others))}]>"] if others else []),
        *rules,
    ]


def described(tools: Seq[Mapping[str, Any]], form: ToolFormat) -> str:
    """A description of the tools for the system message, where the chat template has none."""
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    example = form.written([("FUNCTION", '{"PARAMETER": "VALUE"}')])
    return "\n".join(["You can call these functions:", *lines, "A call is written as", example])
