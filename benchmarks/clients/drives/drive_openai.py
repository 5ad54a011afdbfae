"""The `openai` package, synchronous and asynchronous, every answer checked against its own types."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pydantic
from wire import Job, Report, expect, run

QUESTION = "Write a SQL query. How many losses does the team from Hawthorn have?"
TEXT = "SELECT"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class Booking(pydantic.BaseModel):
    """A form, and a tool's arguments."""

    place: Literal["garden", "hall"]
    guests: Literal[1, 2, 3]


FUNCTION: dict[str, Any] = {
    "name": "book",
    "description": "Book a table.",
    "parameters": Booking.model_json_schema() | {"additionalProperties": False},
    "strict": True,
}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
RESPONSE_TOOL: Any = {"type": "function", **FUNCTION}


def drive(job: Job, report: Report) -> None:
    common: dict[str, Any] = {
        "base_url": f"{job.base_url}/v1",
        "api_key": job.api_key,
        "max_retries": 0,
        "_strict_response_validation": True,
    }
    with openai.OpenAI(**common) as client:
        models(job, report, client)
        chats(job, report, client)
        responses(job, report, client)
        refusals(job, report, client)
    asyncio.run(asynchronous(job, report, common))


def models(job: Job, report: Report, client: openai.OpenAI) -> None:
    with report.check("the models are listed"):
        expect([model.id for model in client.models.list()] == [job.model], "another list")
        expect(client.models.retrieve(job.model).id == job.model, "another model")


def chats(job: Job, report: Report, client: openai.OpenAI) -> None:
    values: dict[str, Any] = {"model": job.model, "temperature": 0, "max_tokens": 30}
    with report.check("a stream has the text of the whole answer, chats and completions"):
        chat = client.chat.completions.create(messages=MESSAGES, **values)
        stream = client.chat.completions.create(messages=MESSAGES, stream=True, **values)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        expect(text == chat.choices[0].message.content != "", "the chats differ")
        whole = client.completions.create(prompt=TEXT, **values).choices[0].text
        loose = client.copy(_extra_kwargs={"_strict_response_validation": False})
        pieces = loose.completions.create(prompt=TEXT, stream=True, **values)  # its type knows no chunks
        expect("".join(chunk.choices[0].text for chunk in pieces) == whole != "", "the completions differ")
    values["max_tokens"] = 200
    with report.check("chats: parse, and a call that goes on"):
        parsed = client.chat.completions.parse(messages=MESSAGES, response_format=Booking, **values)
        expect(isinstance(parsed.choices[0].message.parsed, Booking), "nothing was parsed")
        answer = client.chat.completions.create(
            messages=MESSAGES,
            tools=[CHAT_TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            **values,
        )
        [call] = answer.choices[0].message.tool_calls or []
        expect(call.type == "function", "no call of a function")
        Booking.model_validate_json(call.function.arguments)  # type: ignore[union-attr]
        history = [
            *MESSAGES,
            answer.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        values["max_tokens"] = 5
        last = client.chat.completions.create(messages=history, tools=[CHAT_TOOL], **values)
        expect(last.usage is not None and last.usage.prompt_tokens > 30, "the history is not in the prompt")


def responses(job: Job, report: Report, client: openai.OpenAI) -> None:
    values: dict[str, Any] = {"model": job.model, "temperature": 0, "max_output_tokens": 200}
    with report.check("responses: whole, streamed, kept, continued, deleted"):
        whole = client.responses.create(input=QUESTION, **values)
        expect(whole.output_text != "", "no text")
        with client.responses.stream(input=QUESTION, **values) as stream:
            events = list(stream)
            expect(stream.get_final_response().output_text == whole.output_text, "the texts differ")
        numbers = [event.sequence_number for event in events]
        expect(numbers == list(range(len(numbers))), f"sequence numbers {numbers}")
        expect(client.responses.retrieve(whole.id) == whole, "another response was kept")
        again = client.responses.create(input="And in Rome?", previous_response_id=whole.id, **values)
        history: Any = [{"role": "user", "content": QUESTION}, *whole.output]
        history.append({"role": "user", "content": "And in Rome?"})
        same = client.responses.create(input=history, **values)
        expect(again.output_text == same.output_text, "by its id the conversation is another one")
        client.responses.delete(whole.id)
        try:
            client.responses.retrieve(whole.id)
        except openai.NotFoundError:
            pass
        else:
            raise AssertionError("a deleted response is still there")
    with report.check("responses: parse, and a call that goes on"):
        parsed = client.responses.parse(input=QUESTION, text_format=Booking, **values)
        expect(isinstance(parsed.output_parsed, Booking), "nothing was parsed")
        with client.responses.stream(
            input=QUESTION, tools=[RESPONSE_TOOL], tool_choice="required", parallel_tool_calls=False, **values
        ) as stream:
            deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
            answer = stream.get_final_response()
        [call] = answer.output
        expect(call.type == "function_call" and "".join(deltas) == call.arguments, "the arguments differ")
        Booking.model_validate(json.loads(call.arguments))  # type: ignore[union-attr]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}  # type: ignore[union-attr]
        last = client.responses.create(input=[result], previous_response_id=answer.id, **values)
        expect(last.status in ("completed", "incomplete"), f"status {last.status}")


def refusals(job: Job, report: Report, client: openai.OpenAI) -> None:
    with report.check("refusals are the package's own errors"):
        for ask in (
            lambda: client.chat.completions.create(model=job.model, messages=MESSAGES, temperature=-1),
            lambda: client.responses.create(model=job.model, input=QUESTION, tools=[{"type": "web_search"}]),
            lambda: client.responses.create(model=job.model, input="a " * 9000),
        ):
            try:
                ask()
            except openai.BadRequestError as error:
                expect(bool(error.param), f"no parameter is named: {error}")
            else:
                raise AssertionError("it was answered")


async def asynchronous(job: Job, report: Report, common: dict[str, Any]) -> None:
    values: dict[str, Any] = {"model": job.model, "temperature": 0}
    with report.check("asynchronous: eight at once, chats and responses"):
        async with openai.AsyncOpenAI(**common) as client:

            async def chat(number: int) -> str:
                messages: Any = [{"role": "user", "content": f"{QUESTION} {number}"}]
                stream = await client.chat.completions.create(
                    messages=messages, max_tokens=30, stream=True, **values
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            async def respond(number: int) -> str:
                text = ""
                async with client.responses.stream(
                    input=f"{QUESTION} {number}", max_output_tokens=30, **values
                ) as stream:
                    async for event in stream:
                        text += event.delta if event.type == "response.output_text.delta" else ""
                return text

            texts = await asyncio.gather(*map(chat, range(4)), *map(respond, range(4)))
            expect(all(texts) and texts[:4] == texts[4:], f"the texts differ: {texts}")


if __name__ == "__main__":
    run(("openai", "pydantic"), drive)
