"""What clients may send, as Pydantic models. Strict: a misspelt name is refused, not ignored.

`null` means the same as leaving a field out. Values are checked where they are used: `serve.sampling`.
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from slipstream.serve.errors import ApiError
from slipstream.serve.json_body import decode

IGNORED = frozenset(
    {
        *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "modalities"),
    }
)
"""Parameters of OpenAI's that change nothing about the text."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}
"""Of those, the ones that ask for something with any other value, which the client must then not take for granted."""

_FORM = "give structured_outputs.{} instead"
FOREIGN = {
    "functions": "give tools to /v1/chat/completions instead",
    "function_call": "give tool_choice to /v1/chat/completions instead",
    "guided_json": _FORM.format("json"),
    "guided_regex": _FORM.format("regex"),
    "guided_choice": _FORM.format("choice"),
    "guided_grammar": _FORM.format("grammar"),
    "cache_salt": "give user instead, since nothing is shared between users",
    "priority": "requests have no priorities here; leave it out",
    "truncate_prompt_tokens": "prompts are never cut here; shorten them before they are sent",
    "continue_final_message": "have /v1/completions continue the text instead",
    "add_generation_prompt": "a chat always goes on with the assistant's answer; leave it out",
    "reasoning_effort": "give chat_template_kwargs what the model's own template knows instead",
    "verbosity": "say in the prompt how long an answer should be",
    "prediction": "speculation finds by itself what repeats the prompt; leave it out",
    "audio": "this server reads and writes text only",
    "web_search_options": "this server does not search",
    "use_beam_search": "there is no beam search here; ask for n answers",
}
"""Names of other servers' parameters, and what to do without them."""

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""What OpenAI calls functions and schemas."""


T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong element is told. Millions of them, told of one by one, would take gigabytes."""


def _first_wrong(value: Any) -> Any:
    """Of an object that should map names to numbers, the first entry that does not, alone; likewise."""
    if isinstance(value, dict):
        for name, number in value.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                return {name: number}
    return value


class Body(BaseModel):
    """Exact types, known names."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ignored: ClassVar[frozenset[str]] = IGNORED
    harmless: ClassVar[dict[str, tuple[Any, ...]]] = HARMLESS
    foreign: ClassVar[dict[str, str]] = {}
    """Names that are refused, and what to do without them."""

    @classmethod
    def refuse(cls, value: dict[str, Any]) -> None:
        """Raise `ApiError` 400 for what is known and cannot be had, before types are looked at."""

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, value: Any) -> Any:
        """Leaves one unknown name of however many, for the same reason."""
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in value if name not in known]
        return {name: value[name] for name in value if name in known or name == unknown[0]}


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Running counts in every chunk, as in vLLM."""
    include_obfuscation: bool | None = None
    """Known, and without effect: chunks are never padded."""


class Speculation(Body):
    """How this request speculates; the text is the same in any case."""

    enabled: bool | None = None
    max_tokens: int | None = None
    """The most draft tokens a step."""
    method: str | None = None


class JsonSchemaFormat(Body):
    """A schema and its name."""

    name: Name
    schema_: dict[str, Any] | bool = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Without effect: every schema is kept to."""


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's way to ask for a form; exactly one of the first five is given."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: List[str] | None = None
    disable_any_whitespace: bool | None = None


class ToolFunction(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; none are taken where it is missing."""
    strict: bool | None = None
    """Arguments have no other names than those of the schema. That every schema is kept to holds anyway."""


class Tool(Body):
    """OpenAI's envelope."""

    type: Literal["function"]
    function: ToolFunction


class ToolName(Body):
    """One of the functions."""

    name: str


class NamedTool(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: ToolName


class GenerationBody(Body):
    """What `/v1/completions` and `/v1/chat/completions` have in common."""

    foreign = FOREIGN

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[List[str], Field(max_length=64)] | None = None
    stop_token_ids: List[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_first_wrong)] | None = None
    allowed_token_ids: List[int] | None = None
    bad_words: Annotated[List[str], Field(max_length=256)] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    """The tenant: nothing is shared between users."""
    task: Annotated[str, Field(max_length=128)] | None = None
    """A name for the kind of request; drafters and metrics go by it."""
    speculation: Speculation | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | List[str] | List[int] | List[List[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class CalledFunction(BaseModel):
    """A function and what it was called with."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str
    arguments: str
    """A JSON object, as text."""


class MessageCall(BaseModel):
    """A call in an earlier answer."""

    model_config = ConfigDict(strict=True, extra="allow")
    function: CalledFunction


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
"""The only content that is read; others are known, and refused."""


ROLES = Literal["system", "developer", "user", "assistant", "tool"]


class Message(BaseModel):
    """One message; what else a chat template may read is passed on to it."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        json_schema_extra={"anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}]},
    )
    role: ROLES
    content: str | List[Annotated[dict[str, Any], WithJsonSchema(_TEXT_PART)]] | None = None
    tool_calls: List[MessageCall] | None = None
    """What an earlier answer called."""
    tool_call_id: str | None = None
    """Which of the calls a tool's message answers; such a message must have it."""


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: List[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[List[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: List[Message] | None = None
    add_special_tokens: bool | None = None
    """For a text; on unless false."""
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: List[int]


B = TypeVar("B", bound=Body)

_ELSEWHERE: dict[type[Body], dict[str, str]] = {
    ChatBody: {"prompt": "prompt is for /v1/completions; a chat has messages"},
    CompletionBody: {"messages": "messages is for /v1/chat/completions; a completion has a prompt"},
}
"""What clients send to the wrong one of the two."""

_SHAPES = {
    "prompt": "prompt must be a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "stop must be a string, or a list of at most 64 strings",
    "tool_choice": "tool_choice must be 'none', 'auto', 'required' or "
    '{"type": "function", "function": {"name": ...}}',
}
"""What is said of parameters that may have several types."""


def parse(cls: type[B], raw: bytes) -> B:
    """The body as `cls`; raises `ApiError` 400 that names the parameter."""
    value = decode(raw)
    _reject_foreign(cls, value)
    try:
        return cls.model_validate(
            {
                key: item
                for key, item in value.items()
                if key not in cls.ignored and (item is not None or key not in cls.foreign)
            }
        )
    except ValidationError as error:
        raise _refusal(cls, error) from None


def _reject_foreign(cls: type[Body], value: dict[str, Any]) -> None:
    """Names that other servers know, and values of `ignored` whose being ignored would mislead."""
    for name, item in value.items():
        if item is None:
            continue
        harmless = cls.harmless.get(name)
        if harmless is not None and not any(type(item) is type(one) and item == one for one in harmless):
            known = " or ".join(json.dumps(one) for one in harmless)
            raise ApiError(400, f"{name} must be {known} here", param=name, code="unsupported_parameter")
        if name in cls.foreign:
            message = f"{name} is not supported by this server: {cls.foreign[name]}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
        if name in _ELSEWHERE.get(cls, ()):
            raise ApiError(400, _ELSEWHERE[cls][name], param=name, code="unknown_parameter")
    cls.refuse(value)


def _refusal(cls: type[Body], error: ValidationError) -> ApiError:
    """The first thing that is wrong, in words."""
    first = error.errors(include_url=False)[0]
    *within, last = first["loc"]
    # What a client calls a parameter may look like a type.
    is_name = first["type"] in ("extra_forbidden", "missing")
    path = [part for part in within if not _names_a_type(part)]
    path += [last] if is_name or not _names_a_type(last) else []
    param = ".".join(map(str, path))
    if first["type"] == "extra_forbidden":
        names = _known_names(cls, path[:-1])
        near = difflib.get_close_matches(str(path[-1]), names, n=1, cutoff=0.8)
        hint = f"; did you mean {near[0]}?" if near else ""
        return ApiError(400, f"unknown parameter {param!r}{hint}", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    said = f"{param}: {first['msg']}"
    if first["type"] in ("model_type", "dict_type"):
        said = f"{param} must be an object"
    elif first["type"] == "literal_error":
        said = f"{param} must be {first['ctx']['expected']}"
    message = _SHAPES.get(param.split(".")[0], said)
    return ApiError(400, message, param=param, code="invalid_type")


def _names_a_type(part: int | str) -> bool:
    """Pydantic puts the alternative of a union that it tried into the path."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)


def _known_names(cls: type[BaseModel], path: list[int | str]) -> list[str]:
    """The names that the object at `path` knows."""
    for part in path:
        if isinstance(part, str):
            fields = {field.alias or name: field for name, field in cls.model_fields.items()}
            cls = _model_in(fields[part].annotation) or cls
    return [field.alias or name for name, field in cls.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model within `list[Model] | None` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
