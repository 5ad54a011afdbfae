"""LiteLLM's completions and responses, and what it makes of our refusals."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing outside this machine is asked

import litellm
from wire import Job, Report, expect, run

QUESTION = "Write a SQL query. How many losses does the team from Hawthorn have?"
MESSAGES = [{"role": "user", "content": QUESTION}]
LINES = ["one\u2028two", "one\u2029two", "one\u0085two"]
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["garden", "hall"]}, "guests": {"enum": [1, 2, 3]}},
    "required": ["place", "guests"],
    "additionalProperties": False,
}
FUNCTION = {"name": "book", "description": "Book a table.", "parameters": PARAMETERS}


def drive(job: Job, report: Report) -> None:
    litellm.telemetry = False
    for provider in ("openai", "hosted_vllm"):
        values: dict[str, Any] = {
            "model": f"{provider}/{job.model}",
            "api_base": f"{job.base_url}/v1",
            "api_key": job.api_key,
            "temperature": 0,
            "num_retries": 0,
        }
        completions(provider, report, values)
        refusals(provider, report, values)
        responses(provider, report, values)


def completions(provider: str, report: Report, values: dict[str, Any]) -> None:
    chat = {**values, "messages": MESSAGES, "max_tokens": 60}
    with report.check(f"{provider}: completion, whole and streamed, synchronous and asynchronous") as told:
        whole = litellm.completion(**chat).choices[0].message.content
        told["characters"] = len(whole)
        expect(whole != "", "the whole text is empty")
        pieces = [piece.choices[0].delta.content or "" for piece in litellm.completion(stream=True, **chat)]
        expect("".join(pieces) == whole, f"the stream gave {''.join(pieces)!r}")
        expect(asyncio.run(asynchronous(chat)) == (whole, whole), "the asynchronous texts differ")
    with report.check(f"{provider}: a stream with every character that some take for the end of a line"):
        for text in LINES:
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": text}}}
            streamed = litellm.completion(
                stream=True, extra_body={"response_format": form}, **{**chat, "max_tokens": 100}
            )
            said = "".join(piece.choices[0].delta.content or "" for piece in streamed)
            expect(json.loads(said) == text, f"{text!r} came as {said!r}")
    with report.check(f"{provider}: tools, whole and streamed, and a call that goes on"):
        tools = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
        chat = {**chat, "max_tokens": 200, "parallel_tool_calls": False}
        message = litellm.completion(**chat, **tools).choices[0].message
        [call] = message.tool_calls
        expect(json.loads(call.function.arguments).keys() == {"place", "guests"}, "other arguments")
        chunks = list(litellm.completion(stream=True, **chat, **tools))
        built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
        expect(built.function.arguments == call.function.arguments, "the streamed arguments differ")
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        history = [*MESSAGES, message.model_dump(exclude_none=True), result]
        last = litellm.completion(**{**chat, "messages": history, "max_tokens": 5})
        expect(last.usage.prompt_tokens > 30, "the history is not in the prompt")


async def asynchronous(chat: dict[str, Any]) -> tuple[str, str]:
    whole = await litellm.acompletion(**chat)
    stream = await litellm.acompletion(stream=True, **chat)
    pieces = [piece.choices[0].delta.content or "" async for piece in stream]
    return whole.choices[0].message.content, "".join(pieces)


def refusals(provider: str, report: Report, values: dict[str, Any]) -> None:
    long = [{"role": "user", "content": "word " * 9000}]
    cases: tuple[tuple[str, dict[str, Any], type[Exception]], ...] = (
        ("a prompt beyond the context", {"messages": long}, litellm.ContextWindowExceededError),
        (
            "a prompt and max_tokens beyond it",
            {"messages": MESSAGES, "max_tokens": 10**6},
            litellm.ContextWindowExceededError,
        ),
        ("a wrong value", {"messages": MESSAGES, "top_p": 7}, litellm.BadRequestError),
        ("another key", {"messages": MESSAGES, "api_key": "wrong"}, litellm.AuthenticationError),
        ("another model", {"messages": MESSAGES, "model": f"{provider}/none"}, litellm.NotFoundError),
    )
    for name, asked, kind in cases:
        for stream in (False, True):
            with report.check(f"{provider}: {name}{', streamed' if stream else ''}") as told:
                try:
                    answer = litellm.completion(**{**values, **asked}, stream=stream)
                    list(answer) if stream else None
                except Exception as error:
                    told["raised"] = type(error).__name__
                    expect(isinstance(error, kind), f"{type(error).__name__}: {error}")
                else:
                    raise AssertionError("it was answered")


def responses(provider: str, report: Report, values: dict[str, Any]) -> None:
    asked = {**values, "input": QUESTION, "max_output_tokens": 60}
    with report.check(f"{provider}: responses, whole, streamed, continued"):
        whole = litellm.responses(**asked)
        text = text_of(whole)
        expect(text != "", "no text")
        events = list(litellm.responses(stream=True, **asked))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        expect("".join(deltas) == text, f"the stream gave {''.join(deltas)!r}")
        if provider == "openai":  # for others LiteLLM may make responses of chats by itself, and keeps none
            again = litellm.responses(**{**asked, "input": "And in Rome?", "previous_response_id": whole.id})
            expect(again.usage.input_tokens > whole.usage.input_tokens, "it was not continued")
    with report.check(f"{provider}: responses with a tool"):
        tool = {"type": "function", **FUNCTION}
        answer = litellm.responses(
            **{**asked, "max_output_tokens": 200},
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        [call] = [item for item in answer.output if item.type == "function_call"]
        expect(json.loads(call.arguments).keys() == {"place", "guests"}, "other arguments")


def text_of(response: Any) -> str:
    messages = [item for item in response.output if item.type == "message"]
    return "".join(part.text for message in messages for part in message.content)


if __name__ == "__main__":
    run(("litellm", "openai"), drive)
