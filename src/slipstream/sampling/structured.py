"""The constraint on an answer: a JSON schema, a regular expression, a grammar or a choice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.errors import RequestError
from slipstream.sampling.keywords import strict_keywords
from slipstream.text.inputs import check_characters

CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "choice")
"""The fields of `StructuredOutput` of which exactly one is set."""


@strict_keywords("structured output key")
@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The constraint on an answer; exactly one of the first five fields is set.

    Frozen and validated: a bad value raises a one-line `RequestError`. Whether a schema, expression or grammar is
    supported is checked when it is compiled for a model's tokenizer, before the request starts. JSON is stored as text
    and lists as tuples, so that the object is hashable and equal constraints are equal.
    """

    json_schema: Mapping[str, Any] | bool | str | None = None
    """A JSON schema, decoded or as text. An answer's properties come in the schema's order."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression in the syntax of Rust's `regex` crate; it matches the whole answer."""
    grammar: str | None = None
    """A context-free grammar in llguidance's variant of Lark's syntax; its rule `start` is the answer."""
    choice: Seq[str] | None = None
    """One of these texts."""
    compact: bool = False
    """With `json_schema` or `json_object`: no whitespace between JSON's tokens. Without it, one space, or a new line
    with its indentation, is allowed."""

    def __post_init__(self) -> None:
        for name in ("json_object", "compact"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}")
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if self.json_schema is False:
            raise RequestError("json_schema false allows nothing; give a schema that some value satisfies")
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise RequestError(
                f"structured output needs exactly one of {', '.join(CONSTRAINTS)}, got {found}"
            )
        if self.compact and not given[0].startswith("json"):
            raise RequestError(f"compact is for json_schema and json_object, not for {given[0]}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(f"{name} must be a string that is not empty, got {value!r}")
            check_characters(name, value)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts(self.choice))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> StructuredOutput:
        """Make it from decoded JSON; raises `RequestError`."""
        if not isinstance(mapping, Mapping):
            raise RequestError(
                f'structured must be a StructuredOutput or an object such as {{"json_object": true}}, '
                f"got {mapping!r}"
            )
        return cls(**mapping)


def _schema_text(schema: Mapping[str, Any] | bool | str) -> str:
    """The schema as JSON text, in its own order; raises `RequestError`."""
    try:
        decoded = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(decoded)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is not valid JSON: {error}") from None
    check_characters("json_schema", decoded)
    if not isinstance(decoded, (Mapping, bool)):
        raise RequestError(f"json_schema must be an object or true, got {decoded!r}")
    return text


def _texts(choice: Seq[str]) -> tuple[str, ...]:
    if isinstance(choice, (str, bytes)) or not isinstance(choice, Iterable):
        raise RequestError(f"choice must be a list of strings, got {choice!r}")
    texts = tuple(choice)
    if not texts or any(not isinstance(text, str) or not text for text in texts):
        raise RequestError(f"choice must hold strings that are not empty, got {list(texts)!r}")
    check_characters("choice", texts)
    return texts
