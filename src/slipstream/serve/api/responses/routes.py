"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from slipstream.serve.api.constraints import Constraint, constraint_of
from slipstream.serve.api.errors import ApiError
from slipstream.serve.api.responses.answer import ResponseAnswer, ResponseRequest
from slipstream.serve.api.responses.body import ResponseBody
from slipstream.serve.api.responses.conversation import (
    as_lines,
    chat_of,
    check_calls,
    from_lines,
    in_own_words,
    messages_of,
)
from slipstream.serve.api.responses.store import ResponseStore, StoredResponse
from slipstream.serve.api.schema import ChatBody, GenerationBody
from slipstream.serve.api.stream import Reply
from slipstream.serve.auth import account_of, tenant_of
from slipstream.serve.job import Job
from slipstream.serve.service import Service

MakeJob = Callable[
    [Service, Request, GenerationBody, list[list[int]], str, Constraint | None],
    Job,
]
"""Called with service, request, chat, prompts, the prefix of the id, and the constraint on the answer."""


def add_routes(
    app: FastAPI,
    service: Service,
    read: Callable[[Request], Awaitable[ResponseBody]],
    make_job: MakeJob,
) -> None:
    """Add the routes of `/v1/responses` to `app`; `read` reads and checks a body."""
    config = service.config
    store = ResponseStore(config.max_stored_responses, config.stored_responses_bytes)
    app.state.responses = store

    @app.post("/v1/responses")
    async def create(request: Request) -> Response:
        body = await read(request)
        account = account_of(request.scope)
        if body.store and not store.keeps:
            message = "this server keeps no responses (max_stored_responses is 0); set store to false or leave it out"
            raise ApiError(400, message, param="store", code="unsupported_parameter")
        previous = None
        if body.previous_response_id is not None:
            previous = store.previous(body.previous_response_id, tenant_of(request.scope, body.user))

        async def prepare() -> ResponseAnswer:
            job, messages = await _job(service, request, body, previous, make_job)
            keeps = store.keeps and body.store is not False
            made_for = ResponseRequest(body, messages, account, store if keeps else None)
            return ResponseAnswer(job, service, made_for)

        return Reply(service, 1, prepare)

    @app.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            message = "a stored response cannot be streamed again; leave stream out"
            raise ApiError(400, message, param="stream", code="unsupported_parameter")
        return Response(
            store.get(response_id, account_of(request.scope)).response, media_type="application/json"
        )

    @app.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        store.delete(response_id, account_of(request.scope))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _job(
    service: Service,
    request: Request,
    body: ResponseBody,
    previous: StoredResponse | None,
    make_job: MakeJob,
) -> tuple[Job, bytes]:
    """The request as a job of the engine, and its conversation as lines to be stored."""
    # Large values are parsed and written in another thread.
    chat, messages, first, origins = await asyncio.to_thread(_conversation, body, previous)
    with in_own_words(first, origins):
        tenant = tenant_of(request.scope, body.user)
        constraint = await constraint_of(chat, service.tokens, service.engine.check_grammar, tenant)
        if constraint is not None and constraint.param == "response_format":
            constraint = replace(constraint, param="text.format")  # the engine's compiler may still refuse it
        tools = constraint.tools.tools if constraint and constraint.tools else None
        prompt = await service.tokens.chat(chat.messages, chat.chat_template_kwargs, tools)
        return make_job(service, request, chat, [prompt], "resp_", constraint), messages


def _conversation(
    body: ResponseBody, previous: StoredResponse | None
) -> tuple[ChatBody, bytes, int, list[int]]:
    """The chat, its messages as lines to be stored, the index of the input's first message, and the items of its
    messages."""
    history = from_lines(previous.messages) if previous is not None else []
    messages, origins = messages_of(body)
    check_calls([*history, *messages])
    first = len(history) + (body.instructions is not None)
    with in_own_words(first, origins):
        chat = chat_of(body, [*history, *messages])
    lines = as_lines(messages)
    return chat, lines if previous is None else previous.messages + b"\n" + lines, first, origins
