"""LangChain's `ChatOpenAI`, over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr
from wire import Job, Report, expect, run

QUESTION = "Write a SQL query. How many losses does the team from Hawthorn have?"
TEXT = "SELECT"


class Booking(BaseModel):
    """A table."""

    place: Literal["garden", "hall"]
    guests: Literal[1, 2, 3]


@tool
def get_weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
    """The weather in a city."""
    return f"sunny in {city} for {days}"


def drive(job: Job, report: Report) -> None:
    key, url = SecretStr(job.api_key), f"{job.base_url}/v1"
    texts, both = [], []
    for by_responses in (False, True):
        path = "responses" if by_responses else "chats"
        chat = ChatOpenAI(
            model=job.model,
            base_url=url,
            api_key=key,
            temperature=0,
            max_retries=0,
            max_tokens=200,  # type: ignore[call-arg]
            use_responses_api=by_responses,
        )
        both.append(chat)
        with report.check(f"{path}: invoke, stream, batch"):
            whole = chat.invoke(QUESTION)
            texts.append(text_of(whole))
            expect(texts[-1] != "", "no text")
            expect(joined(list(chat.stream(QUESTION))) == texts[-1], "the stream differs")
            expect(
                [text_of(one) for one in chat.batch([QUESTION] * 3)] == texts[-1:] * 3, "the batch differs"
            )
            expect((whole.usage_metadata or {}).get("output_tokens", 0) > 0, "no usage")
        with report.check(f"{path}: with_structured_output"):
            for method in ("json_schema", "function_calling"):
                found: Any = chat.with_structured_output(Booking, method=method, strict=True).invoke(QUESTION)  # type: ignore[arg-type]
                expect(isinstance(found, Booking), f"{method} gave {found!r}")
        with report.check(f"{path}: bind_tools, and a call that goes on"):
            bound = chat.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
            answer = bound.invoke([HumanMessage(QUESTION)])
            [call] = answer.tool_calls
            result = get_weather.invoke(call)
            pieces: Any = None
            for chunk in bound.stream(QUESTION):
                pieces = chunk if pieces is None else pieces + chunk
            expect(pieces.tool_calls[0]["args"] == call["args"], "the streamed arguments differ")
            last = chat.bind_tools([get_weather], tool_choice="none").invoke(
                [HumanMessage(QUESTION), answer, result]
            )
            expect(isinstance(last, AIMessage), "no answer")
    with report.check("chats and responses give one text"):
        expect(len(texts) == 2 and texts[0] == texts[1], f"{texts}")
    with report.check("asynchronous: chats and responses, invoked and streamed"):
        expect(set(asyncio.run(asynchronous(both))) == {texts[0]}, "the texts differ")
    with report.check("responses: the answer before, by its id"):
        kept = ChatOpenAI(
            model=job.model,
            base_url=url,
            api_key=key,
            temperature=0,
            max_retries=0,
            use_responses_api=True,
            use_previous_response_id=True,
        ).bind(max_tokens=30)
        first = kept.invoke([HumanMessage(QUESTION)])
        expect(first.response_metadata["id"].startswith("resp_"), "no id")
        second = kept.invoke([HumanMessage(QUESTION), first, HumanMessage("And in Rome?")])
        before = (first.usage_metadata or {}).get("input_tokens", 0)
        expect((second.usage_metadata or {}).get("input_tokens", 0) > before, "it was not continued")
    with report.check("completions: invoke and stream"):
        plain = OpenAI(
            model=job.model, base_url=url, api_key=key, temperature=0, max_retries=0, max_tokens=20
        )
        expect("".join(plain.stream(TEXT)) == plain.invoke(TEXT) != "", "the stream differs")


def text_of(message: Any) -> str:
    """The text, of one content or of several blocks."""
    content = message.content
    if isinstance(content, str):
        return content
    return "".join(block.get("text", "") for block in content if isinstance(block, dict))


def joined(chunks: list[Any]) -> str:
    return "".join(map(text_of, chunks))


async def asynchronous(chats: list[ChatOpenAI]) -> list[str]:
    """In one event loop: LangChain shares connections among its chats."""
    texts = [text_of(await chat.ainvoke(QUESTION)) for chat in chats]
    return texts + [joined([chunk async for chunk in chat.astream(QUESTION)]) for chat in chats]


if __name__ == "__main__":
    run(("langchain-openai", "langchain-core", "openai"), drive)
