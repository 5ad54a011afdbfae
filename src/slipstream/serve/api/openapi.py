"""`/openapi.json`: requests and responses of the routes, with errors and keys."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from slipstream.sampling.params import MAX_SEED
from slipstream.serve.api.responses.body import ResponseBody
from slipstream.serve.api.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from slipstream.serve.config import ServeConfig
from slipstream.serve.routes import RouteTable

Schema = dict[str, Any]

_ERRORS = {
    400: "The body is not valid, or a parameter is not supported.",
    401: "No API key, or an unknown one.",
    403: "Web pages of this origin may not send forms.",
    404: "The model is not served here, or the response is unknown.",
    408: "The body was not complete in time.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json.",
    429: "Too many answers are waiting.",
    500: "The server failed.",
    503: "The server is shutting down, or its engine has stopped.",
    504: "The answer was not complete in time.",
}
_HEADERS = {401: ("WWW-Authenticate",), 429: ("Retry-After",), 503: ("Retry-After",)}
_GENERATION = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_TOKENS = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_ENDPOINT = (400, 408, 413, 415, 429, 500, 503)
"""Statuses of a route that another package adds."""

_BOUNDS: dict[str, dict[str, Any]] = {
    "n": {"minimum": 1},
    "temperature": {"minimum": 0},
    "top_k": {"minimum": -1},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -MAX_SEED - 1, "maximum": MAX_SEED},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "logprobs": {"minimum": 0},
    "top_logprobs": {"minimum": 0},
    "prompt_logprobs": {"minimum": 0},
    "allowed_token_ids": {"minItems": 1},
    "messages": {"minItems": 1},
    "best_of": {"minimum": 1},
    "suffix": {"enum": ["", None]},
}
"""Bounds of `SamplingParams` that a schema can express. It cannot express how parameters depend on each other: some
requests that it allows are refused with 400."""

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
ANYTHING: Schema = {}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _object(optional: Seq[str] = (), **properties: Schema) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


_ERROR = _object(error=_object(message=STRING, type=STRING, param=_nullable(STRING), code=_nullable(STRING)))
_TOOL_CALL = _object(id=STRING, type={"const": "function"}, function=_object(name=STRING, arguments=STRING))
_MESSAGE = _object(
    optional=("tool_calls",),
    role={"const": "assistant"},
    content=_nullable(STRING),
    refusal=_nullable(STRING),
    tool_calls=_list(_TOOL_CALL),
)
_EVENT = _object(data={"type": "string", "description": "A chunk as JSON, an error, or at last [DONE]."})
_USAGE = _object(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)


def _answer(kind: str, *reasons: str, **choice: Schema) -> Schema:
    """A whole response of generation."""
    common = {
        "index": INTEGER,
        "logprobs": _nullable({"type": "object"}),
        "finish_reason": {"enum": ["stop", "length", "error", *reasons]},
        "stop_reason": ANYTHING,
    }
    choices = _list(_object((), **choice, **common))
    return _object(
        id=STRING,
        object={"const": kind},
        created=INTEGER,
        model=STRING,
        system_fingerprint=STRING,
        choices=choices,
        usage=_USAGE,
    )


@dataclass(frozen=True, slots=True)
class _Operation:
    """The documentation of one route."""

    summary: str
    answer: Schema
    """JSON, unless there is a `media_type`."""
    body: type[Body] | None = None
    errors: tuple[int, ...] = ()
    streams: bool = False
    media_type: str = "application/json"
    form: Schema | None = None
    """In place of a body: the parts of a form."""


_TEXT_PART = _object(
    type={"const": "output_text"}, text=STRING, annotations=_list(ANYTHING), logprobs=_list(ANYTHING)
)
_ITEM_STATUS: Schema = {"enum": ["completed", "incomplete"]}
_ITEM: Schema = {
    "anyOf": [
        _object(
            id=STRING,
            type={"const": "message"},
            role={"const": "assistant"},
            status=_ITEM_STATUS,
            content=_list(_TEXT_PART),
        ),
        _object(
            id=STRING,
            type={"const": "function_call"},
            call_id=STRING,
            name=STRING,
            arguments=STRING,
            status=_ITEM_STATUS,
        ),
    ]
}
_RESPONSE = _object(
    id=STRING,
    object={"const": "response"},
    created_at=INTEGER,
    status={"enum": ["completed", "incomplete", "failed"]},
    model=STRING,
    output=_list(_ITEM),
    error=_nullable(_object(code=STRING, message=STRING)),
    incomplete_details=_nullable(_object(reason=STRING)),
    usage=_object(input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER),
)
_STATUS = _object(status=STRING)
_MODEL = _object(
    id=STRING,
    object={"const": "model"},
    created=INTEGER,
    owned_by=STRING,
    speculation=_object(method=STRING, verifier=STRING, lossy={"type": "boolean"}),
)

_SOUND = _object(
    ("model", "language", "prompt", "response_format", "temperature", "seed"),
    file={"type": "string", "format": "binary"},
    model=STRING,
    language=STRING,
    prompt=STRING,
    response_format={"enum": ["json", "text", "verbose_json"]},
    temperature={"type": "number", "minimum": 0, "maximum": 1},
    seed=INTEGER,
)
_HEARD = (400, 403, 404, 408, 413, 415, 429, 500, 503, 504)

OPERATIONS: dict[str, _Operation] = {
    "POST /v1/completions": _Operation(
        "Continue prompts.",
        _answer("text_completion", text=STRING),
        CompletionBody,
        _GENERATION,
        streams=True,
    ),
    "POST /v1/chat/completions": _Operation(
        "Answer a conversation.",
        _answer("chat.completion", "tool_calls", message=_MESSAGE),
        ChatBody,
        _GENERATION,
        streams=True,
    ),
    "POST /v1/responses": _Operation(
        "Answer a conversation, as OpenAI's Responses API does.",
        _RESPONSE,
        ResponseBody,
        _GENERATION,
        streams=True,
    ),
    "POST /v1/audio/transcriptions": _Operation(
        "What is said in a sound.", _object(text=STRING), form=_SOUND, errors=_HEARD
    ),
    "POST /v1/audio/translations": _Operation(
        "What is said in a sound, in English.", _object(text=STRING), form=_SOUND, errors=_HEARD
    ),
    "GET /v1/responses/{response_id}": _Operation("A stored response.", _RESPONSE, errors=(400, 404, 500)),
    "DELETE /v1/responses/{response_id}": _Operation(
        "Forget a stored response.",
        _object(id=STRING, object={"const": "response"}, deleted={"const": True}),
        errors=(404, 500),
    ),
    "POST /tokenize": _Operation(
        "A text or a conversation as token ids.",
        _object(tokens=_list(INTEGER), count=INTEGER, max_model_len=INTEGER),
        TokenizeBody,
        _TOKENS,
    ),
    "POST /detokenize": _Operation("Token ids as text.", _object(prompt=STRING), DetokenizeBody, _TOKENS),
    "GET /v1/models": _Operation(
        "What is served.", _object(object={"const": "list"}, data=_list(_MODEL)), errors=(500,)
    ),
    "GET /v1/models/{model}": _Operation("One model.", _MODEL, errors=(404, 500)),
    "GET /health": _Operation("200 while the engine runs.", _STATUS, errors=(503,)),
    "GET /ready": _Operation("200 while new requests are accepted.", _STATUS, errors=(503,)),
    "GET /version": _Operation("The server's version.", _object(version=STRING)),
    "GET /metrics": _Operation("Prometheus metrics.", STRING, media_type="text/plain"),
}
"""By method and path. Routes of other packages are not here; they are shown as FastAPI finds them."""


def install(app: FastAPI, config: ServeConfig, model_name: str, routes: RouteTable) -> None:
    """Have the application publish this document."""

    def document() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, config, model_name, routes)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, config: ServeConfig, model_name: str, routes: RouteTable) -> Schema:
    with_keys = bool(config.api_key)
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    found_schemas = document.get("components", {}).get("schemas", {})
    schemas: dict[str, Schema] = {**found_schemas, "Error": _ERROR}
    needs_key = {f"{route.method} {_bare(route.path)}": with_keys and route.needs_key for route in routes}
    for path, method, found in [(p, m, f) for p, ms in document["paths"].items() for m, f in ms.items()]:
        name = f"{method.upper()} {path}"
        operation, guarded = OPERATIONS.get(name), needs_key[name]
        if guarded:
            found["security"] = [{"key": []}]
        if operation is None:  # of another package: as FastAPI finds it
            found["responses"].pop("422", None)
            errors = (*_ENDPOINT, 401) if guarded else _ENDPOINT
            found["responses"] |= _errors(errors)
            continue
        found["summary"] = operation.summary
        found["responses"] = _responses(operation, guarded)
        if operation.form is not None:
            content = {"multipart/form-data": {"schema": operation.form}}
            found["requestBody"] = {"required": True, "content": content}
        if operation.body is not None:
            schema = _body_schema(operation.body, model_name, config.strict_parameters, schemas)
            found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    document["components"] = {"schemas": schemas}
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _bare(path: str) -> str:
    """A path as OpenAPI spells it: without the converters of its parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _body_schema(cls: type[Body], model_name: str, strict: bool, schemas: dict[str, Schema]) -> Schema:
    """A reference to the body's schema, which is put into `schemas` with all that it refers to."""
    schema = cls.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    schema["properties"]["model"] = {"enum": [model_name, None]}
    if cls.ignores_unknown and not strict:  # unknown names are ignored
        del schema["additionalProperties"]
    for name, bounds in _BOUNDS.items():
        if name in schema["properties"]:
            schema["properties"][name] |= bounds
    if cls is CompletionBody:  # 0 with echo: the prompt alone
        for name in ("max_tokens", "max_completion_tokens"):
            schema["properties"][name]["minimum"] = 0
    for name in sorted(cls.ignored):
        values: Schema = {"enum": [*cls.harmless[name], None]} if name in cls.harmless else {}
        schema["properties"][name] = {"description": "Without effect."} | values
    schemas[cls.__name__] = schema
    return {"$ref": f"#/components/schemas/{cls.__name__}"}


def _responses(operation: _Operation, guarded: bool) -> Schema:
    content: Schema = {operation.media_type: {"schema": operation.answer}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    responses: Schema = {"200": {"description": operation.summary, "content": content}}
    return responses | _errors((*operation.errors, *((401,) if guarded else ())))


def _errors(statuses: Seq[int]) -> Schema:
    responses: Schema = {}
    for status in sorted(statuses):
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        responses[str(status)] = {"description": _ERRORS[status], "content": error}
        if status in _HEADERS:
            headers = {name: {"required": True, "schema": STRING} for name in _HEADERS[status]}
            responses[str(status)]["headers"] = headers
    return responses
