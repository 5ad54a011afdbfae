"""Request bodies as Pydantic models. A misspelt name is refused, not ignored.

`null` means the same as leaving a field out. Values are checked where they are used: `serve.sampling`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from slipstream.serve.api.errors import ApiError
from slipstream.serve.api.unsupported import (
    HARMLESS,
    IGNORED,
    UNSUPPORTED,
    left_out,
    near,
    unknown,
    without_hints,
)
from slipstream.serve.network.json_body import decode

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""Names that OpenAI allows for functions and schemas."""


T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]
"""A list of which only the first wrong element is reported. Reports on millions of them would take gigabytes."""


def _first_wrong(value: Any) -> Any:
    """A mapping of names to numbers, of which only the first wrong entry is reported."""
    if isinstance(value, dict):
        for name, number in value.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                return {name: number}
    return value


class Body(BaseModel):
    """A request's body: types are exact, and unknown names are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ignored: ClassVar[frozenset[str]] = IGNORED
    harmless: ClassVar[dict[str, tuple[Any, ...]]] = HARMLESS
    unsupported: ClassVar[dict[str, str]] = {}
    """Names that are refused except at their `harmless` values, and what to use instead."""
    ignores_unknown: ClassVar[bool] = False
    """Unknown names are ignored where the server is not strict: front ends send some of their own."""
    _without_effect: tuple[str, ...] = PrivateAttr(())

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Names that were sent and are ignored; the response names them."""
        return self._without_effect

    @classmethod
    def refuse(cls, value: dict[str, Any]) -> None:
        """Raise `ApiError` 400 for parameters that are known and not supported, before types are checked."""

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, value: Any) -> Any:
        """Keeps only the first unknown name, for the same reason."""
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in value if name not in known]
        return {name: value[name] for name in value if name in known or name == unknown[0]}


class StreamOptions(Body):
    """What a stream has in addition to the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Running counts in every chunk, as in vLLM."""
    include_obfuscation: bool | None = None
    """Without effect: chunks are never padded."""


class Speculation(Body):
    """Speculation of this request; it does not change the text, except `reasoning`."""

    enabled: bool | None = None
    max_tokens: int | None = None
    """The most draft tokens a step."""
    method: str | None = None
    reasoning: dict[str, Any] | bool | None = None
    """Step-level speculation, which may change the text: an object of its settings, or true for the defaults. Only on a
    server that allows it (`--allow-lossy`)."""


class JsonSchemaFormat(Body):
    """A schema and its name."""

    name: Name
    schema_: dict[str, Any] | bool = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Without effect: schemas are always enforced."""


class ResponseFormat(Body):
    """OpenAI's parameter for JSON output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's parameter for structured output; exactly one of the first five fields is given."""

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
    """JSON schema of the arguments; without one the function has no arguments."""
    strict: bool | None = None
    """Arguments have no other names than those of the schema. Schemas are always enforced."""


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


class ExpectedPart(Body):
    """A part of what is expected."""

    type: Literal["text"]
    text: str


class ExpectedContent(Body):
    """OpenAI's `prediction`: the answer that is expected."""

    type: Literal["content"]
    content: str | List[ExpectedPart]


class GenerationBody(Body):
    """What `/v1/completions` and `/v1/chat/completions` have in common."""

    unsupported = UNSUPPORTED
    ignores_unknown = True

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
    max_completion_tokens: int | None = None
    """OpenAI's newer name for it."""
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
    """The tenant, within the request's API key where there are keys: nothing is shared between users."""
    task: Annotated[str, Field(max_length=128)] | None = None
    """A name for the kind of request; drafters and metrics go by it."""
    speculation: Speculation | None = None
    learn: bool | None = None
    """false: nothing of this request is kept for a drafter that learns from what is served."""
    prediction: ExpectedContent | None = None
    """The answer that is expected; it is drafted in addition to what the drafter proposes."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


_FOR_CHATS = "it is for /v1/chat/completions"
_FOR_TEXT = "it is for /v1/completions"


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    unsupported = UNSUPPORTED | {
        "messages": "it is for /v1/chat/completions; a completion has a prompt",
        "tools": _FOR_CHATS,
        "tool_choice": _FOR_CHATS,
        "parallel_tool_calls": _FOR_CHATS,
        "top_logprobs": f"{_FOR_CHATS}; a completion has logprobs",
        "chat_template_kwargs": _FOR_CHATS,
        "add_special_tokens": "a text gets those of the tokenizer; give token ids for others",
    }
    harmless = HARMLESS | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "top_logprobs": (0,),
        "chat_template_kwargs": ({},),
        "add_special_tokens": (True,),
    }

    prompt: str | List[str] | List[int] | List[List[int]]
    logprobs: int | None = None
    echo: bool | None = None
    """Return the prompt's text before the answer's, and with `logprobs` its tokens too. Then `max_tokens` may be 0."""
    suffix: str | None = None


class CalledFunction(BaseModel):
    """A function and its arguments."""

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
"""A part of a content. Text is read; other parts are recognised and refused."""


ROLES = Literal["system", "developer", "user", "assistant", "tool"]


class Message(BaseModel):
    """One message; other fields are passed on to the chat template."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        json_schema_extra={"anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}]},
    )
    role: ROLES
    content: str | List[Annotated[dict[str, Any], WithJsonSchema(_TEXT_PART)]] | None = None
    tool_calls: List[MessageCall] | None = None
    """The calls of an earlier answer."""
    tool_call_id: str | None = None
    """The call that a tool's message answers; such a message must have it."""


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    unsupported = UNSUPPORTED | {
        "prompt": "it is for /v1/completions; a chat has messages",
        "echo": _FOR_TEXT,
        "suffix": _FOR_TEXT,
        "add_special_tokens": "the chat template writes them",
    }
    harmless = HARMLESS | {"echo": (False,), "suffix": ("",), "add_special_tokens": (False,)}

    messages: List[Message]
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
    """For a text; true unless given."""
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: List[int]


B = TypeVar("B", bound=Body)

_SHAPES = {
    "prediction": 'prediction must be {"type": "content", "content": ...} with a string or a list of parts '
    '{"type": "text", "text": ...}',
    "prompt": "prompt must be a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "stop must be a string, or a list of at most 64 strings",
    "tool_choice": "tool_choice must be 'none', 'auto', 'required' or "
    '{"type": "function", "function": {"name": ...}}',
}
"""Messages for parameters of several types."""


def parse(cls: type[B], raw: bytes, strict: bool = False) -> B:
    """The body as `cls`; raises `ApiError` 400 that names the parameter.

    Where it is not `strict`, unknown names are left out and listed in the body's `without_effect`.
    """
    value = decode(raw)
    known = {field.alias or name for name, field in cls.model_fields.items()}
    ignores = cls.ignores_unknown and not strict
    out, reported = left_out(value, known, cls.ignored, cls.unsupported, cls.harmless, ignores)
    reported += without_hints(value) if ignores else ()
    cls.refuse(value)
    try:
        body = cls.model_validate({key: item for key, item in value.items() if key not in out})
    except ValidationError as error:
        raise _refusal(cls, error) from None
    body._without_effect = reported
    return body


def _refusal(cls: type[Body], error: ValidationError) -> ApiError:
    """The message for the first error."""
    first = error.errors(include_url=False)[0]
    *within, last = first["loc"]
    # A client's name of a parameter may look like a type.
    is_name = first["type"] in ("extra_forbidden", "missing")
    path = [part for part in within if not _names_a_type(part)]
    path += [last] if is_name or not _names_a_type(last) else []
    param = ".".join(map(str, path))
    if first["type"] == "extra_forbidden":
        return unknown(param, near(str(path[-1]), _known_names(cls, path[:-1])))
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
    """Whether a part of an error's path is the alternative of a union that Pydantic tried."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)


def _known_names(cls: type[BaseModel], path: list[int | str]) -> list[str]:
    """The field names of the object at `path`."""
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
