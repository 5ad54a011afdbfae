"""`echo`: the prompt before the answer, with the log-probabilities that evaluation harnesses add up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from serve_cases import MakeApp, counters, events
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from slipstream import LLM
from slipstream.assets import EMBEDDED_TARGET

PATH = "/v1/completions"
PROMPT = "SELECT name FROM users WHERE age > 30 and a tool: "
LONG = [300 + 7 * number % 3500 for number in range(700)]
"""More rows than a step computes of a prompt whose log-probabilities are wanted."""


ROUNDING = 2e-2
"""In nats: keys and values are rounded to float16, as the checkpoint is stored; the reference is float32."""


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)


def transformers_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[tokens - 1, vocab]: row i is about token i + 1."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"echo": True, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["text", "long"])
def test_log_probabilities_are_those_of_transformers(
    shared: TestClient, plain: LLM, reference: Any, prompt: str | list[int]
) -> None:
    ids = plain.engine.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
    [choice] = ask(shared, prompt=prompt, logprobs=2, max_tokens=0)["choices"]
    expected = transformers_logprobs(reference, ids)
    shown = choice["logprobs"]
    assert {len(values) for values in shown.values()} == {len(ids)}
    assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
    own = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(shown["token_logprobs"][1:]), own, atol=ROUNDING, rtol=0)
    best = expected.topk(2, dim=-1).values
    for row, top in zip(best, shown["top_logprobs"][1:], strict=True):
        assert 1 <= len(top) <= 2  # two tokens may have one text
        assert max(top.values()) == pytest.approx(row[0].item(), abs=ROUNDING)


def test_shape(shared: TestClient, plain: LLM) -> None:
    ids = plain.engine.tokenizer(PROMPT).input_ids
    answer = ask(shared, prompt=PROMPT, logprobs=1, max_tokens=5, ignore_eos=True, return_token_ids=True)
    [choice] = answer["choices"]
    alone = ask(shared, prompt=PROMPT, logprobs=1, max_tokens=5, ignore_eos=True, echo=False)["choices"][0]
    assert choice["text"] == PROMPT + alone["text"]
    shown = choice["logprobs"]
    assert len(shown["tokens"]) == len(ids) + 5
    assert "".join(shown["tokens"][: len(ids)]) == PROMPT
    assert shown["text_offset"] == [len("".join(shown["tokens"][:i])) for i in range(len(ids) + 5)]
    assert shown["token_logprobs"][len(ids) :] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-5)
    assert choice["prompt_token_ids"] == ids
    assert answer["usage"]["completion_tokens"] == 5

    without = ask(shared, prompt=PROMPT, max_tokens=1)["choices"][0]
    assert without["text"].startswith(PROMPT)
    assert without["logprobs"] is None


def test_no_tokens_are_answered(shared: TestClient, plain: LLM) -> None:
    for body in (
        {"max_tokens": 0},
        {"max_completion_tokens": 0},
        {"max_tokens": 0, "n": 2, "temperature": 1},
    ):
        answer = ask(shared, prompt=PROMPT, return_token_ids=True, **body)
        for choice in answer["choices"]:
            assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT, "length", [])
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["prompt_tokens"] == len(plain.engine.tokenizer(PROMPT).input_ids)
    for bad in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}):
        refused = shared.post(PATH, json={"prompt": PROMPT, **bad})
        assert "only with echo" in refused.json()["error"]["message"]


def test_batches_and_token_ids(shared: TestClient, plain: LLM) -> None:
    """As lm-evaluation-harness asks: lists of token ids, one token, one alternative."""
    tokenizer = plain.engine.tokenizer
    texts = [PROMPT, "Once upon a time", "def add(a, b):"]
    ids = [tokenizer(text).input_ids for text in texts]
    of_texts = ask(shared, prompt=texts, logprobs=1, max_tokens=1)["choices"]
    of_ids = ask(shared, prompt=ids, logprobs=1, max_tokens=1, seed=1234)["choices"]
    assert [choice["index"] for choice in of_ids] == [0, 1, 2]
    for one, other, text, tokens in zip(of_texts, of_ids, texts, ids, strict=True):
        assert one["text"] == other["text"]
        assert one["text"].startswith(text)
        assert len(one["logprobs"]["tokens"]) == len(tokens) + 1
        assert one["logprobs"]["token_logprobs"][1:] == pytest.approx(
            other["logprobs"]["token_logprobs"][1:], abs=1e-5
        )
    [single] = ask(shared, prompt=[ids[1][0]], logprobs=1, max_tokens=0)["choices"]
    assert single["logprobs"]["token_logprobs"] == [None]
    [flat] = ask(shared, prompt=ids[0], logprobs=0, max_tokens=0)["choices"]
    assert flat["text"] == PROMPT
    assert flat["logprobs"]["top_logprobs"] == [None] + [{}] * (len(ids[0]) - 1)


def test_neither_reuse_nor_speculation_changes_them(make_app: MakeApp) -> None:
    with TestClient(make_app()) as client:

        def scores(**extra: Any) -> list[float]:
            [choice] = ask(client, prompt=LONG, logprobs=1, max_tokens=4, ignore_eos=True, **extra)["choices"]
            values: list[float] = choice["logprobs"]["token_logprobs"][1:]
            return values

        first = scores()
        client.post(
            PATH, json={"prompt": LONG, "max_tokens": 1}
        )  # its keys and values are there to be reused
        assert scores() == first
        assert scores(speculation={"enabled": False}) == pytest.approx(first, abs=1e-4)
        assert counters(client)["slipstream_spec_decode_num_drafts_total"] > 0
    assert all(math.isfinite(value) and value <= 0 for value in first)


def test_its_own_alternatives_and_those_of_prompt_logprobs(shared: TestClient) -> None:
    for logprobs, own in ((1, 3), (3, 1), (0, 0)):
        body = {"prompt": PROMPT, "logprobs": logprobs, "prompt_logprobs": own, "max_tokens": 0}
        [choice] = ask(shared, **body)["choices"]
        assert max(len(top) for top in choice["logprobs"]["top_logprobs"][1:]) == logprobs
        assert max(len(shown) for shown in choice["prompt_logprobs"][1:]) == own + 1
    [choice] = ask(shared, prompt=PROMPT, logprobs=1, max_tokens=0)["choices"]
    assert "prompt_logprobs" not in choice


def test_streams(shared: TestClient) -> None:
    for max_tokens in (0, 6):
        whole = ask(shared, prompt=PROMPT, max_tokens=max_tokens, n=2, ignore_eos=True)["choices"]
        response = shared.post(
            PATH,
            json={
                "prompt": PROMPT,
                "echo": True,
                "n": 2,
                "temperature": 0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
            },
        )
        texts = {0: "", 1: ""}
        for event in events(response.text):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {choice["index"]: choice["text"] for choice in whole}
    refused = shared.post(PATH, json={"prompt": PROMPT, "echo": True, "logprobs": 1, "stream": True})
    assert refused.status_code == 400
    assert "cannot be streamed" in refused.json()["error"]["message"]
