"""What `POST /v1/responses` takes, as Pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from slipstream.serve.api.errors import ApiError
from slipstream.serve.api.schema import (
    Body,
    JsonSchemaFormat,
    List,
    Name,
    Speculation,
    StructuredOutputs,
)
from slipstream.serve.api.unsupported import HARMLESS, UNSUPPORTED

HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search"),
    *("image_generation", "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell"),
    *("tool_search", "web_search", "web_search_preview"),
)
"""OpenAI's tools other than functions, and what they do. Other names are refused too."""

INCLUDABLE = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Values of `include`. Log-probabilities are included; the others are about items that answers here do not have."""

_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Parts = List[Annotated[dict[str, Any], WithJsonSchema(_PART)]]
"""Content in parts. Text is read; other parts are recognised and refused."""


class Item(BaseModel):
    """An item of an input. Items of earlier answers may have more fields, which are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class MessageItem(Item):
    """A message of either side."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class CallItem(Item):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Name
    arguments: str
    """A JSON object, as text."""


class CallOutputItem(Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | Parts


ITEMS = ("message", "function_call", "function_call_output")


def _kind(value: Any) -> str:
    """The tag of an item. Tags have brackets, as type names have, so that errors leave them out of their paths."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"[{kind or 'message'}]"


InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CallOutputItem, Tag("[function_call_output]")],
    Discriminator(_kind),
]


def _as_items(value: Any) -> Any:
    """Makes a text a user's message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _text_too(schema: dict[str, Any]) -> None:
    """The schema of an input that may be a text as well."""
    items = schema["properties"]["input"]
    schema["properties"]["input"] = {"anyOf": [{"type": "string"}, items]}


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The format of the text; the last four fields are for a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    def response_format(self) -> dict[str, Any]:
        """The same as `response_format` of a chat; raises `ApiError` 400 where the schema is missing."""
        if self.type != "json_schema":
            return {"type": self.type}
        given = self.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        for name in ("name", "schema"):
            if name not in given:
                param = f"text.format.{name}"
                message = f"{param} is missing: type json_schema needs it"
                raise ApiError(400, message, param=param, code="missing_required_parameter")
        return {"type": self.type, "json_schema": JsonSchemaFormat.model_validate(given)}


class TextOptions(Body):
    """Format and length of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """The only value that is supported; say in the prompt how long an answer should be."""


class Reasoning(Body):
    """Reasoning that a model writes is part of its text."""

    effort: Literal["none"] | None = None
    summary: str | None = None
    """Without effect."""


class ResponseStreamOptions(Body):
    """Without effect: events are never padded."""

    include_obfuscation: bool | None = None


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ResponseBody(Body):
    """`POST /v1/responses`: OpenAI's parameters, and those of ours that apply to one answer."""

    model_config = ConfigDict(json_schema_extra=_text_too)

    ignored = frozenset(
        {
            *("background", "max_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
            *("safety_identifier", "service_tier", "truncation"),
        }
    )
    ignores_unknown = True
    harmless = HARMLESS | {
        "background": (False,),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
    }
    unsupported = UNSUPPORTED | {
        "messages": "give input instead",
        "prompt": "stored prompts are not kept here; give instructions and input",
        "conversation": "give previous_response_id instead",
        "context_management": "nothing is compacted here; shorten the input",
        "moderation": "this server does not judge texts",
        "max_tokens": "give max_output_tokens instead",
        "max_completion_tokens": "give max_output_tokens instead",
        "response_format": "give text.format instead",
        "logprobs": "give top_logprobs instead",
        "n": "a response has one answer; ask several times",
        "prediction": "it is for /v1/chat/completions and /v1/completions",
        "functions": "give tools instead",
        "function_call": "give tool_choice instead",
    }

    input: Annotated[List[InputItem], Field(min_length=1), BeforeValidator(_as_items)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    include: List[INCLUDABLE] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    tools: Annotated[List[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    reasoning: Reasoning | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    task: Annotated[str, Field(max_length=128)] | None = None
    speculation: Speculation | None = None
    learn: bool | None = None
    """false: nothing of this request is kept for a drafter that learns from what is served."""
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def refuse(cls, value: dict[str, Any]) -> None:
        """Hosted tools, and items that only OpenAI's own tools and models make."""
        for param, kind in _kinds(value, "tools"):
            if kind != "function":
                known = (
                    "OpenAI runs it, this server cannot" if kind in HOSTED else "this server does not know it"
                )
                message = f"{param} is a tool of type {kind!r}: {known}; only functions can be called"
                raise ApiError(400, message, param=param, code="unsupported_parameter")
        choice = value.get("tool_choice")
        if isinstance(choice, dict) and isinstance(choice.get("type"), str) and choice["type"] != "function":
            message = (
                f"tool_choice of type {choice['type']!r} is not supported by this server; give 'none', 'auto', "
                '\'required\' or {"type": "function", "name": ...}'
            )
            raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
        for param, kind in _kinds(value, "input"):
            if kind not in ITEMS:
                known = ", ".join(ITEMS)
                message = (
                    f"{param} is an item of type {kind!r}, which this server cannot read; it reads {known}"
                )
                raise ApiError(400, message, param=param, code="unsupported_parameter")


def _kinds(value: dict[str, Any], name: str) -> list[tuple[str, str]]:
    """Path and type of the objects in a list that have a type."""
    given = value.get(name)
    return [
        (f"{name}.{number}", one["type"])
        for number, one in enumerate(given if isinstance(given, list) else [])
        if isinstance(one, dict) and isinstance(one.get("type"), str)
    ]
