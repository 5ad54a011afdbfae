"""The real `openai` client against a real server on a free port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from serve_cases import DRAFT, MESSAGES, MODEL, QUESTION, running

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig

KEY = "test-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = LLM(speculative_config=DRAFT, kv_cache_bytes=40 * 2**20)
    config = ServeConfig(api_key=[KEY], per_request_metrics=True)
    with running(create_app(AsyncEngine(engine=llm.engine), config, MODEL)) as (address, _):
        yield f"{address}/v1"
    assert llm.engine.integrity() == []


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_models(api: openai.OpenAI) -> None:
    [model] = api.models.list().data
    assert model.id == MODEL
    assert model.model_extra is not None
    assert model.model_extra["root"].endswith("target")


def test_a_streamed_chat(api: openai.OpenAI, plain: LLM, chat_prompt: list[int]) -> None:
    chunks = list(
        api.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,  # type: ignore[arg-type]
            temperature=0,
            max_completion_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    [answer] = plain.generate(chat_prompt, SamplingParams(temperature=0, max_tokens=40))[0].outputs
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == answer.text
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == answer.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(answer.token_ids)


def test_whole_answers(api: openai.OpenAI, plain: LLM, chat_prompt: list[int]) -> None:
    params: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 20}
    own = plain.generate(chat_prompt, SamplingParams(n=2, logprobs=2, **params))[0].outputs
    chat = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, **params
    )
    assert [choice.message.content for choice in chat.choices] == [one.text for one in own]
    for choice, one in zip(chat.choices, own, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * len(one.token_ids)
    [plain_own] = plain.generate(QUESTION, SamplingParams(**params))[0].outputs
    text = api.completions.create(model=MODEL, prompt=QUESTION, **params)
    assert text.choices[0].text == plain_own.text
    assert text.usage is not None
    assert text.usage.completion_tokens == len(plain_own.token_ids)


def test_what_openai_has_not_goes_into_the_extra_body(
    api: openai.OpenAI, plain: LLM, chat_prompt: list[int]
) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "speculation": {"max_tokens": 2},
        "task": "sql",
    }
    chat = api.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        seed=8,
        max_tokens=20,
        user="red",
        extra_body=extra,
    )
    params = SamplingParams(seed=8, max_tokens=20, top_k=5, min_p=0.05, repetition_penalty=1.3)
    assert chat.choices[0].message.content == plain.generate(chat_prompt, params)[0].outputs[0].text
    assert chat.model_extra is not None
    figures = chat.model_extra["metrics"]["speculative_decoding"]
    assert figures["num_draft_tokens"] <= 2 * figures["num_spec_steps"]


def test_errors_are_the_clients_own(api: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1, stream=True)  # type: ignore[call-overload]
    assert bad.value.param == "temperature"
    assert bad.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError) as unknown:
        api.completions.create(model="gpt-4", prompt="hi")
    assert unknown.value.code == "model_not_found"
    other = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_a_stream_that_is_closed_early(api: openai.OpenAI) -> None:
    stream = api.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert api.completions.create(model=MODEL, prompt="Once", max_tokens=2).choices[0].finish_reason


class Booking(pydantic.BaseModel):
    """What is parsed."""

    place: Literal["garden", "hall"]
    guests: list[Literal["Ann", "Bob", "Cy"]] = pydantic.Field(max_length=3)


class get_weather(pydantic.BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


TOOL = openai.pydantic_function_tool(get_weather)


def test_parsed_answers(api: openai.OpenAI) -> None:
    for seed in range(3):
        answer = api.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Booking, seed=seed, max_tokens=200
        )
        booking = answer.choices[0].message.parsed
        assert isinstance(booking, Booking)
        assert json.loads(answer.choices[0].message.content or "") == booking.model_dump()


def test_parsed_tool_calls(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        seed=2,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, get_weather)
    assert answer.choices[0].finish_reason == "tool_calls"
    again = api.chat.completions.create(
        model=MODEL,
        messages=[  # type: ignore[list-item]
            *MESSAGES,
            answer.choices[0].message.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ],
        tools=[TOOL],
        max_tokens=5,
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens > (answer.usage and answer.usage.prompt_tokens)


def test_streamed_tool_calls(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(
        model=MODEL,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        seed=2,
        max_tokens=400,
        stream_options={"include_usage": True},
    ) as stream:
        seen = list(stream)
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert calls
    for number, call in enumerate(calls):
        assert isinstance(call.function.parsed_arguments, get_weather)
        deltas = [
            event.arguments_delta
            for event in seen
            if event.type == "tool_calls.function.arguments.delta" and event.index == number
        ]
        assert "".join(deltas) == call.function.arguments
    assert len([event for event in seen if event.type == "tool_calls.function.arguments.done"]) == len(calls)
    assert final.choices[0].message.content is None
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None


def test_a_streamed_form(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Booking, seed=1, max_tokens=200
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Booking)


def test_tools_that_cannot_be_called_are_the_clients_own_errors(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[TOOL, TOOL], tool_choice="required", stream=True
        )  # type: ignore[call-overload]
    assert bad.value.param == "tools"
