"""What a request's text must conform to: JSON, a schema, a grammar, or tool calls.

The one place where `response_format`, `structured_outputs` and `tools` become sampling parameters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import RequestError
from slipstream.sampling.grammars.compiler import MAX_SOURCE_BYTES, WHITESPACE, check_size
from slipstream.sampling.structured import StructuredOutput
from slipstream.serve.api.errors import ApiError, invalid
from slipstream.serve.api.schema import ChatBody, GenerationBody, ResponseFormat, StructuredOutputs
from slipstream.serve.api.tokens import Tokens
from slipstream.serve.tools.tools import ToolUse, tool_use

Check = Callable[[StructuredOutput, str], Awaitable[None]]
"""Raises `RequestError` for a constraint of a tenant that llguidance cannot follow."""
MAX_GRAMMAR_BYTES = 32 * 2**10
"""The largest grammar, in bytes: one of 110 KB with nested terminals takes the compiler 20 s."""

_KINDS = ("json_", "json_object", "regex", "grammar", "choice")


@dataclass(frozen=True, slots=True)
class Constraint:
    """The constraint on an answer, and the parameter that set it."""

    param: str
    structured: StructuredOutput
    tools: ToolUse | None = None
    shows_special: bool = False
    """Special tokens are part of the constraint, so the text must include them."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of the sampling parameters that it sets."""
        values: dict[str, Any] = {"structured": self.structured}
        return values | {"skip_special_tokens": False} if self.shows_special else values

    def refusal(self, error: RequestError) -> ApiError:
        """The client's error for a constraint that the engine's compiler refused."""
        return invalid(f"{self.param}: {error}", self.param)


async def constraint_of(body: GenerationBody, tokens: Tokens, check: Check, tenant: str) -> Constraint | None:
    """The constraint on the text of an answer; None where it is free. What was checked is reused by `tenant` alone.

    Raises `ApiError` 400 for parameters that contradict each other and for parts that cannot be followed; the
    engine's compiler checks the whole.
    """
    use = requested = None
    # Large values are parsed in another thread, but only where there are any: switching costs more than the check.
    if isinstance(body, ChatBody):
        if body.tools:
            use = await asyncio.to_thread(tool_use, body, tokens.tool_format)
        else:
            tool_use(body, tokens.tool_format)  # raises for an empty choice
    if body.response_format is not None or body.structured_outputs is not None:
        requested = await asyncio.to_thread(_requested, body)
    if use is None:
        return requested
    for number, schema in enumerate(use.schemas):
        param = f"tools.{number}.function.parameters"
        await _check(Constraint(param, StructuredOutput(json_schema=schema)), check, tenant)
    if requested is not None:
        await _check(requested, check, tenant)
    return _with_tools(use, requested, tokens.special)


async def _check(constraint: Constraint, check: Check, tenant: str) -> None:
    try:
        await check(constraint.structured, tenant)
    except RequestError as error:
        raise constraint.refusal(error) from None


def _requested(body: GenerationBody) -> Constraint | None:
    """The constraint on the text itself."""
    given = {
        "response_format": _of_response_format(body.response_format),
        "structured_outputs": _of_structured_outputs(body.structured_outputs),
    }
    found = [Constraint(param, structured) for param, structured in given.items() if structured is not None]
    if len(found) == 2:
        message = "response_format and structured_outputs both ask for a form; give one of them"
        raise invalid(message, "structured_outputs")
    return found[0] if found else None


def _with_tools(use: ToolUse, requested: Constraint | None, special: Mapping[str, int]) -> Constraint:
    """Tools, in addition to the constraint on text without calls."""
    schema = None
    if requested is not None and not use.must_call:
        if requested.param != "response_format":
            message = (
                "structured_outputs and tools exclude each other; set tool_choice to 'none' or 'required'"
            )
            raise invalid(message, "structured_outputs")
        if use.format.mark.startswith("{"):
            message = (
                "response_format and tools exclude each other with this model, whose calls are JSON too; "
                "set tool_choice to 'none' or 'required'"
            )
            raise invalid(message, "response_format")
        decoded = json.loads(str(requested.structured.json_schema or '{"type": "object"}'))
        guidance = {"whitespace_pattern": WHITESPACE}
        schema = json.dumps({"x-guidance": guidance} | decoded if isinstance(decoded, dict) else decoded)
    form = use.format
    fixed = form.written([("", "")] * 2)
    return Constraint(
        "tools",
        use.grammar(special, schema),
        use,
        shows_special=any(token in fixed for token in special),
    )


def _of_response_format(form: ResponseFormat | None) -> StructuredOutput | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutput(json_object=True)
    if form.json_schema is None:
        message = "response_format.json_schema is missing: type json_schema needs it"
        raise ApiError(400, message, param="response_format.json_schema", code="missing_required_parameter")
    try:
        return StructuredOutput(json_schema=form.json_schema.schema_)
    except RequestError as error:
        param = "response_format.json_schema.schema"
        raise invalid(f"{param}: {error}", param) from None


def _of_structured_outputs(form: StructuredOutputs | None) -> StructuredOutput | None:
    """vLLM's names for the same."""
    if form is None:
        return None
    if sum(getattr(form, name) not in (None, False) for name in _KINDS) != 1:
        message = "structured_outputs needs exactly one of json, json_object, regex, grammar and choice"
        raise invalid(message, "structured_outputs")
    try:
        structured = StructuredOutput(
            json_schema=form.json_,
            json_object=bool(form.json_object),
            regex=form.regex,
            grammar=form.grammar,
            choice=form.choice,
            compact=bool(form.disable_any_whitespace),
        )
        check_size(structured, MAX_SOURCE_BYTES if structured.grammar is None else MAX_GRAMMAR_BYTES)
        return structured
    except RequestError as error:
        raise invalid(f"structured_outputs: {error}", "structured_outputs") from None
