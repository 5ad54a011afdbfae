"""Every sampling parameter reaches the engine under speculation, and the text is the plain engine's."""

from __future__ import annotations

from typing import Any

import pytest
from serve_cases import MESSAGES, MODEL, QUESTION, MakeApp
from starlette.testclient import TestClient

from slipstream import LLM, SamplingParams
from slipstream.cli.flags.options import PYTHON_ONLY
from slipstream.sampling.params import SamplingParams as Params
from slipstream.serve.api.schema import CompletionBody

BASE: dict[str, Any] = {"max_tokens": 24, "temperature": 1.3, "seed": 3}

CASES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 2.0},
    {"top_p": 0.5},
    {"top_k": 3},
    {"top_k": -1},
    {"min_p": 0.2},
    {"seed": 99},
    {"stop": " ="},
    {"stop": ["(", "t"], "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(300, 900))},
    {"max_tokens": 1},
    {"min_tokens": 20},
    {"ignore_eos": True},
    {"presence_penalty": -2},
    {"frequency_penalty": -2},
    {"repetition_penalty": 1.8},
    {"logit_bias": {"300": 20, "301": 20.5}},
    {"allowed_token_ids": [300, 301, 302, 303]},
    {"bad_words": ["SELECT"]},
    {"skip_special_tokens": False, "ignore_eos": True},
    {"n": 3},
    {"structured": {"choice": ["SELECT 1", "SELECT 2"]}},
]
OTHER_NAMES = {"structured": "structured_outputs"}
"""Parameters that clients know by another name."""


def test_the_cases_cover_every_parameter() -> None:
    """A parameter that the engine gains must be served and tested."""
    tested = {name for case in CASES for name in case} | {"logprobs", "prompt_logprobs"}
    names = set(Params.__dataclass_fields__) - PYTHON_ONLY
    assert tested == names
    served = {OTHER_NAMES.get(name, name) for name in names}
    assert served <= set(CompletionBody.model_fields)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
def test_parameter(shared: TestClient, plain: LLM, chat_prompt: list[int], case: dict[str, Any]) -> None:
    values = BASE | case
    asked = {OTHER_NAMES.get(name, name): value for name, value in values.items()}
    answer = shared.post("/v1/completions", json={"prompt": chat_prompt, "return_token_ids": True, **asked})
    assert answer.status_code == 200, answer.text
    expected = plain.generate(chat_prompt, SamplingParams.from_mapping(values))[0].outputs
    for choice, own in zip(answer.json()["choices"], expected, strict=True):
        assert choice["token_ids"] == own.token_ids
        assert choice["text"] == own.text
        assert choice["finish_reason"] == own.finish_reason
        assert choice["stop_reason"] == own.stop_reason
    if case not in ({"top_k": -1}, {"ignore_eos": True}):
        default = plain.generate(chat_prompt, SamplingParams(**BASE))[0].outputs
        assert len(default) != len(expected) or default[0].token_ids != expected[0].token_ids, (
            "it does nothing"
        )


def test_prompt_logprobs(shared: TestClient, plain: LLM) -> None:
    body = {"prompt": QUESTION, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 2}
    [choice] = shared.post("/v1/completions", json=body).json()["choices"]
    [output] = plain.generate(QUESTION, SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2))
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(output.prompt_token_ids)
    for shown, own in zip(choice["prompt_logprobs"][1:], output.prompt_token_logprobs[1:], strict=True):
        assert shown[str(own.token_id)]["logprob"] == pytest.approx(own.logprob, abs=1e-4)
        assert shown[str(own.token_id)]["rank"] == own.rank
        assert len(shown) in (2, 3)
    chat = {"messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 0, "return_token_ids": True}
    answer = shared.post("/v1/chat/completions", json=chat).json()
    assert (
        len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    )


def test_lengths_that_were_not_asked_for(shared: TestClient) -> None:
    text = shared.post("/v1/completions", json={"prompt": QUESTION, "ignore_eos": True}).json()
    assert text["usage"]["completion_tokens"] == 16
    limit = shared.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": [300] * (limit - 8), "ignore_eos": True, "temperature": 0}
    full = shared.post("/v1/completions", json=body).json()
    assert full["usage"]["completion_tokens"] == 8
    assert full["choices"][0]["finish_reason"] == "length"
    for name in ("max_tokens", "max_completion_tokens"):
        chat = shared.post(
            "/v1/chat/completions", json={"messages": MESSAGES, "ignore_eos": True, name: 5}
        ).json()
        assert chat["usage"]["completion_tokens"] == 5


def test_a_chat_may_fill_the_context(shared: TestClient) -> None:
    limit = shared.get("/v1/models").json()["data"][0]["max_model_len"]
    words = 400 * "word "
    count = shared.post("/tokenize", json={"prompt": words}).json()["count"]
    messages = [{"role": "user", "content": words * ((limit - 60) // count) + "word " * 20}]
    answer = shared.post("/v1/chat/completions", json={"messages": messages, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] > 16
    assert answer["usage"]["total_tokens"] == limit


@pytest.mark.parametrize(
    ("speculation", "drafts"),
    [
        (None, (3, 4)),
        ({"enabled": True}, (3, 4)),
        ({"enabled": False}, (0, 0)),
        ({"max_tokens": 0}, (0, 0)),
        ({"max_tokens": 1}, (0.5, 1)),
        ({"max_tokens": 2, "method": "draft_model"}, (1.5, 2)),
        ({"method": "off", "enabled": True}, (0, 0)),
        ({"enabled": False, "max_tokens": 3}, (0, 0)),
    ],
    ids=str,
)
def test_speculation_by_request(
    make_app: MakeApp, plain: LLM, speculation: dict[str, Any] | None, drafts: tuple[float, float]
) -> None:
    with TestClient(make_app(per_request_metrics=True)) as client:
        body = {"prompt": QUESTION, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        answer = client.post("/v1/completions", json={**body, "speculation": speculation}).json()
    [own] = plain.generate(QUESTION, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].outputs
    assert answer["choices"][0]["text"] == own.text
    figures = answer["metrics"]["speculative_decoding"]
    if drafts == (0, 0):
        assert figures is None
        assert answer["metrics"]["num_target_passes"] == 40
    else:
        assert drafts[0] <= figures["num_draft_tokens"] / figures["num_spec_steps"] <= drafts[1]


def test_messages_reach_the_template_whole(shared: TestClient, chat_prompt: list[int]) -> None:
    parts = [
        {"type": "text", "text": MESSAGES[0]["content"][:10]},
        {"type": "text", "text": MESSAGES[0]["content"][10:]},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "return_token_ids": True}
    answer = shared.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_token_ids"] == chat_prompt
    tokens = shared.post("/tokenize", json={"model": MODEL, "messages": MESSAGES}).json()
    assert tokens["tokens"] == chat_prompt


def test_users_share_nothing(shared: TestClient) -> None:
    prompt = list(range(300, 400))
    body = {"prompt": prompt, "max_tokens": 1}

    def cached(user: str | None) -> int:
        answer = shared.post("/v1/completions", json={**body, "user": user}).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("red") == 0
    assert cached("red") > 0
    assert cached("blue") == 0
    assert cached(None) == 0
