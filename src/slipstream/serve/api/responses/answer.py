"""A response in progress: its items, and the events of its stream."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

from slipstream.core.request import FinishReason
from slipstream.engine.outputs import Update
from slipstream.serve.api.answer import ApiAnswer
from slipstream.serve.api.chat import chat_logprobs
from slipstream.serve.api.errors import ApiError
from slipstream.serve.api.responses.body import ResponseBody
from slipstream.serve.api.responses.conversation import as_lines
from slipstream.serve.api.responses.store import ResponseStore, StoredResponse
from slipstream.serve.job import Job
from slipstream.serve.service import Service
from slipstream.serve.tools.calls import CallReader


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """The request of a response, and where the response is stored."""

    body: ResponseBody
    messages: bytes
    """The conversation up to the answer, in lines of JSON, without the instructions."""
    account: str
    store: ResponseStore | None
    """None where the response is not stored."""


class ResponseAnswer(ApiAnswer):
    """One answer as items: a message, then the calls of functions. The events of the stream are made while it
    grows."""

    names_events = True

    def __init__(self, job: Job, service: Service, request: ResponseRequest) -> None:
        super().__init__(job, service)
        self._request = request
        constraint = job.constraint
        tools = None if constraint is None else constraint.tools
        self._reader = None if tools is None else CallReader(tools.format)
        self._items: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the last item's text or arguments
        self._events: list[dict[str, Any]] = []
        self._num_events = 0
        self._last: dict[str, Any] = {}
        self._tell("response.created", response=self._response("in_progress"))
        self._tell("response.in_progress", response=self._response("in_progress"))

    def add(self, prompt: int, update: Update) -> None:
        super().add(prompt, update)
        text = update.text
        calls: list[dict[str, Any]] = []
        if self._reader is not None:
            text, calls = self._reader.feed(update.text, last=update.finish_reason is not None)
        logprobs = (chat_logprobs(self.tokens, update.logprobs) or {"content": []})["content"]
        if text or logprobs:
            self._add_text(text, logprobs)
        for part in calls:
            self._add_call(part)
        if update.finish_reason is not None:
            self._end(update.finish_reason)

    def chunks(self, prompt: int, update: Update) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def failure(self, error: ApiError) -> dict[str, Any]:
        number = self._num_events
        if self._pieces:
            self._finish("incomplete")
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return {"type": "response.failed", "sequence_number": number, "response": response}

    def whole(self) -> dict[str, Any]:
        return self._last

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        """Text of the message, which begins with it."""
        if not self._items:
            message = {"id": _id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
            self._begin(message | {"content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._tell_of_item("response.content_part.added", content_index=0, part=part)
            self._items[-1]["content"] = [part | {"logprobs": []}]  # the events keep their own
        self._items[-1]["content"][0]["logprobs"] += logprobs
        self._pieces.append(text)
        if text or logprobs:
            self._tell_of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _add_call(self, part: dict[str, Any]) -> None:
        """A part of a call, in the shape of a chat's delta; the first has its name."""
        function = part["function"]
        if "id" in part:
            self._finish("completed")
            call = {"id": _id("fc"), "type": "function_call", "status": "in_progress", "arguments": ""}
            self._begin(call | {"call_id": part["id"], "name": function["name"]})
        if function["arguments"]:
            self._pieces.append(function["arguments"])
            self._tell_of_item("response.function_call_arguments.delta", delta=function["arguments"])

    def _begin(self, item: dict[str, Any]) -> None:
        self._items.append(item)
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=item.copy())

    def _finish(self, status: str) -> None:
        """The end of the last item, if there is one."""
        if not self._items:
            return
        item, text = self._items[-1], "".join(self._pieces)
        self._pieces.clear()
        item["status"] = status
        if item["type"] == "message":
            [part] = item["content"]
            part["text"] = text
            fields = {"content_index": 0, "text": text, "logprobs": part["logprobs"]}
            self._tell_of_item("response.output_text.done", **fields)
            self._tell_of_item("response.content_part.done", content_index=0, part=part)
        else:
            item["arguments"] = text
            fields = {"name": item["name"], "arguments": text}
            self._tell_of_item("response.function_call_arguments.done", **fields)
        self._tell("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _end(self, reason: FinishReason) -> None:
        """The response is complete."""
        if not self._items:
            self._add_text("", [])
        is_cut = reason != FinishReason.STOP
        ends_whole = self._reader is not None and self._reader.calls and not self._reader.is_within_call
        self._finish("incomplete" if is_cut and not ends_whole else "completed")
        status = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete"}.get(reason, "failed")
        self._last = self._response(status) | {"usage": self._usage()} | self._metrics() | self._lossy()
        if status == "incomplete":
            self._last["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "failed":
            message = "the answer ended before it had the form that was requested"
            self._last["error"] = {"code": "server_error", "message": message}
        else:
            self._last["completed_at"] = int(time.time())
        self._keep()
        self._tell(f"response.{status}", response=self._last)

    def _keep(self) -> None:
        """Store the response, so that it can be continued; one that is too large is marked as not stored."""
        request = self._request
        if request.store is None or self._last["status"] == "failed":
            self._last["store"] = False
            return
        kept = StoredResponse(
            id=self.job.id,
            account=request.account,
            tenant=self.job.options.tenant,
            response=json.dumps(self._last, ensure_ascii=False).encode(),
            messages=request.messages + b"\n" + as_lines([self._as_message()]),
        )
        self._last["store"] = request.store.put(kept)

    def _as_message(self) -> dict[str, Any]:
        """The answer as a chat's message."""
        texts = [item["content"][0]["text"] for item in self._items if item["type"] == "message"]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if self._reader is not None and self._reader.calls:
            message["tool_calls"] = [call.message() for call in self._reader.calls]
        return message

    def _usage(self) -> dict[str, Any]:
        """`usage` in the names of the Responses API."""
        counted = self.usage()
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0} | counted.get("completion_tokens_details", {}),
            "total_tokens": counted["total_tokens"],
            **({"lossy": True} if self.is_lossy else {}),
        }

    def _response(self, status: str) -> dict[str, Any]:
        """The response object so far."""
        body, params = self._request.body, self.job.params
        text = body.text.format if body.text is not None else None
        form = {"type": "text"} if text is None else text.model_dump(by_alias=True, exclude_none=True)
        choice = body.tool_choice or "auto"
        return {
            "id": self.job.id,
            "object": "response",
            "created_at": self.job.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": self._request.store is not None,
            "temperature": params.temperature,
            "text": {"format": form, "verbosity": "medium"},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [
                {"strict": None, "parameters": None, **tool.model_dump(exclude_none=True)}
                for tool in body.tools or ()
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _tell_of_item(self, kind: str, **values: Any) -> None:
        """An event about the last item."""
        index = len(self._items) - 1
        self._tell(kind, item_id=self._items[index]["id"], output_index=index, **values)

    def _tell(self, kind: str, **values: Any) -> None:
        """Add an event to the stream, where the response is streamed."""
        if self.job.stream:
            self._events.append({"type": kind, "sequence_number": self._num_events, **values})
            self._num_events += 1


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
