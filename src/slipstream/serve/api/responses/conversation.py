"""From a request for a response to a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slipstream.serve.api.errors import ApiError, invalid
from slipstream.serve.api.responses.body import CallItem, CallOutputItem, MessageItem, ResponseBody
from slipstream.serve.api.schema import ChatBody

_SAME_NAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "stream", "user", "task", "speculation", "learn"),
    *("structured_outputs", "chat_template_kwargs", "parallel_tool_calls"),
)
"""Parameters that mean the same in a chat."""

_OWN_WORDS = (
    (r"\bmax_completion_tokens\b", "max_output_tokens"),
    (r"\blogprobs\b", "top_logprobs"),
    (r"\bresponse_format(\.json_schema)?\b", "text.format"),
    (r"\btools\.(\d+)\.function\b", r"tools.\1"),
    (r"\bmessages\b(?!\.\d)", "input"),
)
"""Parameters of a chat, and their names in a response."""


def messages_of(body: ResponseBody) -> tuple[list[dict[str, Any]], list[int]]:
    """The input as messages of a chat, and the number of the item that each message begins with.

    Consecutive calls and the assistant's message before them are one message. Raises `ApiError` 400 for
    content other than text.
    """
    messages: list[dict[str, Any]] = []
    origins: list[int] = []
    for number, item in enumerate(body.input):
        if isinstance(item, CallItem):
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
                origins.append(number)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
            continue
        origins.append(number)
        messages.append(_message(f"input.{number}", item))
    return messages, origins


def _message(param: str, item: MessageItem | CallOutputItem) -> dict[str, Any]:
    if isinstance(item, CallOutputItem):
        text = _text(f"{param}.output", item.output)
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    return {"role": item.role, "content": _text(f"{param}.content", item.content)}


def _text(param: str, content: str | list[dict[str, Any]]) -> str:
    """The joined text of parts; raises `ApiError` 400 for parts of other types."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        name = "refusal" if part.get("type") == "refusal" else "text"
        if part.get("type") not in ("input_text", "output_text", "text", "refusal") or not isinstance(
            part.get(name), str
        ):
            message = f"{param} has a part of type {part.get('type')!r}; this model reads text only"
            raise invalid(message, param)
        texts.append(part[name])
    return "".join(texts)


def check_calls(messages: list[dict[str, Any]]) -> None:
    """Raise `ApiError` 400 for the output of an unknown call."""
    made: set[str] = set()
    for message in messages:
        made |= {call["id"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and message["tool_call_id"] not in made:
            call = message["tool_call_id"]
            problem = f"input has an output of the call {call!r}, but no function_call with that call_id"
            raise invalid(problem, "input")


def chat_of(body: ResponseBody, messages: list[dict[str, Any]]) -> ChatBody:
    """The chat that answers `messages`, the whole conversation, under the body's parameters.

    Raises `ApiError` 400 for parameters that contradict each other.
    """
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    given = {name: getattr(body, name) for name in _SAME_NAME}
    tools = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in body.tools or ()
    ]
    choice: Any = body.tool_choice
    if choice is not None and not isinstance(choice, str):
        choice = {"type": "function", "function": {"name": choice.name}}
    shows_logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())
    if shows_logprobs and tools and choice != "none":
        problem = "log-probabilities and tools exclude each other; set tool_choice to 'none' or leave top_logprobs out"
        raise ApiError(400, problem, param="top_logprobs", code="unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is for streams; set stream to true or leave it out", "stream_options")
    text = body.text.format if body.text is not None else None
    return ChatBody.model_validate(
        {
            **given,
            "messages": messages,
            "tools": tools or None,
            "tool_choice": choice,
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": shows_logprobs,
            "top_logprobs": body.top_logprobs if shows_logprobs else None,
            "response_format": None if text is None else text.response_format(),
        }
    )


@contextmanager
def in_own_words(first: int, origins: list[int]) -> Iterator[None]:
    """Rename the parameters in errors about the chat to those of the response.

    `first` is the place of the input's first message among the chat's; `origins` is from `messages_of`.
    """

    def item(found: re.Match[str]) -> str:
        number = int(found[1]) - first
        return f"input.{origins[number]}" if 0 <= number < len(origins) else "previous_response_id"

    def own(text: str) -> str:
        for pattern, word in _OWN_WORDS:
            text = re.sub(pattern, word, text)
        return re.sub(r"\bmessages\.(\d+)", item, text)

    try:
        yield
    except ApiError as error:
        error.message = own(error.message)
        error.param = None if error.param is None else own(error.param)
        raise


def as_lines(messages: list[dict[str, Any]]) -> bytes:
    """Messages as lines of JSON."""
    return b"\n".join(json.dumps(message, ensure_ascii=False).encode() for message in messages)


def from_lines(lines: bytes) -> list[dict[str, Any]]:
    """The messages that `as_lines` wrote."""
    return [json.loads(line) for line in lines.split(b"\n") if line]
