"""vLLM's names for the constraint on an answer."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.errors import RequestError
from slipstream.sampling.keywords import strict_keywords
from slipstream.sampling.structured import StructuredOutput
from slipstream.vllm_names import Unsupported

_UNSUPPORTED = {
    "disable_additional_properties": Unsupported(
        (False,), 'write "additionalProperties": false into the schema'
    ),
    "structural_tag": Unsupported((), "use grammar"),
    "whitespace_pattern": Unsupported((), "use disable_any_whitespace"),
}


@strict_keywords("structured output key", _UNSUPPORTED)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The constraint on an answer in vLLM's form; `StructuredOutput` is Slipstream's own.

    Exactly one of the first five fields is set. `grammar` may also be in GBNF (`root ::= ...`). Raises `RequestError`.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Seq[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        forms = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in forms if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise RequestError(f"structured_outputs needs exactly one of {', '.join(forms)}, got {found}")
        self.as_structured()

    @classmethod
    def from_any(cls, value: Any) -> StructuredOutputsParams:
        """Make it from an instance, or a mapping with its fields; raises `RequestError`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f"structured_outputs must be a StructuredOutputsParams, got {value!r}")
        return cls(**value)

    def as_structured(self) -> StructuredOutput:
        """The same constraint as a `StructuredOutput`; raises `RequestError`."""
        return StructuredOutput(
            json_schema=self.json,
            json_object=bool(self.json_object),
            regex=self.regex,
            grammar=_lark(self.grammar) if isinstance(self.grammar, str) else self.grammar,
            choice=self.choice,
            compact=self.disable_any_whitespace,
        )


def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark  # imported here to keep `slipstream --help` quick

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter may raise anything for an invalid text
        raise RequestError(f"grammar is neither Lark nor GBNF: {' '.join(str(error).split())}") from None
