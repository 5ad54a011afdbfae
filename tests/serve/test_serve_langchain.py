"""LangChain's `ChatOpenAI` against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr
from serve_cases import DRAFT, MODEL, QUESTION, running

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig

KEY = "test-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = LLM(speculative_config=DRAFT, kv_cache_bytes=40 * 2**20)
    config = ServeConfig(api_key=[KEY])
    with running(create_app(AsyncEngine(engine=llm.engine), config, MODEL)) as (address, _):
        yield f"{address}/v1"
    assert llm.engine.integrity() == []


@pytest.fixture
def chat(url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=url, api_key=SecretStr(KEY), temperature=0, max_retries=0, seed=1
    ).bind(max_tokens=60)  # type: ignore[return-value]


class Booking(BaseModel):
    """A table."""

    place: Literal["garden", "hall"]
    guests: int = Field(description="How many come.")


@tool
def get_weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
    """The weather in a city."""
    return f"sunny in {city} for {days}"


def test_invoke(chat: Any, plain: LLM, chat_prompt: list[int]) -> None:
    [own] = plain.generate(chat_prompt, SamplingParams(temperature=0, max_tokens=60))[0].outputs
    answer = chat.invoke(QUESTION)
    assert answer.content == own.text
    assert answer.response_metadata["finish_reason"] == own.finish_reason
    assert answer.usage_metadata["input_tokens"] == len(chat_prompt)
    assert answer.usage_metadata["output_tokens"] == len(own.token_ids)


def test_stream(chat: Any, plain: LLM, chat_prompt: list[int]) -> None:
    [own] = plain.generate(chat_prompt, SamplingParams(temperature=0, max_tokens=60))[0].outputs
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == own.text
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata["output_tokens"] == len(own.token_ids)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(url: str, method: Any) -> None:
    chat = ChatOpenAI(model=MODEL, base_url=url, api_key=SecretStr(KEY), max_retries=0, seed=1)
    bound = chat.with_structured_output(Booking, method=method, include_raw=True)
    found: Any = bound.invoke(QUESTION)
    assert found["parsing_error"] is None
    assert isinstance(found["parsed"], Booking)
    assert found["raw"].usage_metadata["output_tokens"] > 0


def test_tools(url: str) -> None:
    chat = ChatOpenAI(model=MODEL, base_url=url, api_key=SecretStr(KEY), max_retries=0, seed=1)
    bound = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke([HumanMessage(QUESTION)])
    assert isinstance(answer, AIMessage)
    [call] = answer.tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert str(result.content).startswith("sunny in ")
    last = chat.bind_tools([get_weather]).bind(max_tokens=5).invoke([HumanMessage(QUESTION), answer, result])
    assert last.usage_metadata is not None
    assert last.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]  # type: ignore[index]


def test_streamed_tools(url: str) -> None:
    chat = ChatOpenAI(model=MODEL, base_url=url, api_key=SecretStr(KEY), max_retries=0, seed=1)
    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    whole: Any = None
    for chunk in bound.stream(QUESTION):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    [call] = whole.tool_calls
    assert call["name"] == "get_weather"
    assert {"city", "days"} <= set(call["args"])
    assert call["id"]
