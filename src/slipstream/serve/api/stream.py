"""The response to a generation request: a whole answer, or server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from slipstream.serve.api.answer import ApiAnswer
from slipstream.serve.api.errors import LOG_FIELDS, ApiError, as_api_error
from slipstream.serve.auth import account_of
from slipstream.serve.service import Service

SEED_HEADER = "X-Slipstream-Seed"
LOSSY_HEADER = "X-Slipstream-Lossy"
"""Header of a response whose request chose what may change its text; it says by which means."""
IGNORED_HEADER = "X-Slipstream-Ignored"
"""Names in the body that had no effect, with commas between them."""
IGNORED_FIELD = "ignored_parameters"
"""The same for the log."""
LAST_WRITES_S = 5.0
"""Time for the error that says that the deadline has passed to reach the client."""
DONE = b"data: [DONE]\n\n"
ANSWER = "slipstream.answer"
"""Key in an ASGI scope under which a reply leaves its answer for the tracing middleware."""
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def event(payload: Any, name: str | None = None) -> bytes:
    """One server-sent event, without characters that clients may take for the end of a line.

    JSON escapes the control characters up to U+001F, but not U+0085, U+2028 and U+2029, at which `str.splitlines`
    splits, as httpx and others use it.
    """
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    text = _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    named = "" if name is None else f"event: {name}\n"
    return f"{named}data: {text}\n\n".encode()


class Reply(Response):
    """Runs its request when it is sent; a client that disconnects aborts it.

    No status is sent before the engine has made the first tokens, so that an error until then has its own status. A
    later failure of a stream is an event with the error, without `[DONE]`.
    """

    def __init__(
        self, service: Service, num_answers: int, prepare: Callable[[], Awaitable[ApiAnswer]]
    ) -> None:
        """`prepare` tokenises the request, once `num_answers` answers are admitted."""
        super().__init__(media_type="text/event-stream")
        self._service = service
        self._num_answers = num_answers
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        leaving = asyncio.create_task(_client_leaves(receive))
        try:
            # A client that does not read stays admitted no longer than the request's deadline.
            limit_s = self._service.config.request_timeout_s + LAST_WRITES_S
            await asyncio.wait({work, leaving}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                scope[LOG_FIELDS]["client_left" if leaving.done() else "client_does_not_read"] = True
        finally:
            for task in (work, leaving):
                task.cancel()
            await asyncio.gather(work, leaving, return_exceptions=True)
            if ANSWER in scope:
                _note(scope[ANSWER])
        if not work.cancelled():
            work.result()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._service.config.request_timeout_s
        with self._service.admission.admit(self._num_answers, account_of(scope)):
            async with self._service.until(deadline_s):
                answer = scope[ANSWER] = await self._prepare()
            job = answer.job
            extra: dict[str, str] = {}
            if self._service.reproduces(job.params, job.options):
                extra[SEED_HEADER] = ", ".join(map(str, dict.fromkeys(job.seeds)))
            if answer.is_lossy:
                extra[LOSSY_HEADER] = "step-reasoning"
            if ignored := scope[LOG_FIELDS].get(IGNORED_FIELD):
                extra[IGNORED_HEADER] = ", ".join(ignored)
            if answer.job.stream:
                await self._send_events(answer, deadline_s, extra, send)
                return
            async with self._service.answering(answer.job, deadline_s) as updates:
                async for prompt, update in updates:
                    answer.add(prompt, update)
        await JSONResponse(answer.whole(), headers=extra)(scope, receive, send)

    async def _send_events(
        self, answer: ApiAnswer, deadline_s: float, extra: Mapping[str, str], send: Send
    ) -> None:
        begun = False

        def framed(chunk: dict[str, Any]) -> bytes:
            return event(chunk, chunk["type"] if answer.names_events else None)

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                begun = True
                headers = {**extra, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                self.init_headers(headers)
                del self.headers["content-length"]
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with self._service.answering(answer.job, deadline_s) as updates:
                async for prompt, update in updates:
                    answer.add(prompt, update)
                    data = b"".join(framed(chunk) for chunk in answer.chunks(prompt, update))
                    if data:
                        await write(data)
            closing = answer.closing_chunk()
            end = b"" if answer.names_events else DONE
            await write((b"" if closing is None else framed(closing)) + end, more=False)
        except Exception as error:
            if not begun:
                raise
            failure: ApiError = as_api_error(error)
            answer.job.log_fields["error"] = failure.message
            await write(framed(answer.failure(failure)), more=False)


def _note(answer: ApiAnswer) -> None:
    """Add the outcome to the request's log line."""
    job = answer.job
    job.log_fields.update(
        prompt_tokens=sum(map(len, job.prompts)),
        output_tokens=answer.num_output_tokens,
        finish_reasons=[
            str(completion.finish_reason) for output in answer.outputs for completion in output.outputs
        ],
        task=job.options.task,
    )
    if answer.is_lossy:
        job.log_fields["lossy"] = True


async def _client_leaves(receive: Receive) -> None:
    """Returns when the client has disconnected; the body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
