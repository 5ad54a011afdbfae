"""Streams: framed as OpenAI's, equal to the engine's own text, and counted exactly."""

from __future__ import annotations

from typing import Any

import pytest
from serve_cases import MESSAGES, MODEL, QUESTION, MakeApp, counters, events
from starlette.testclient import TestClient

from slipstream import LLM, SamplingParams

CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "stream": True}


def own_text(plain: LLM, prompt: list[int], **params: Any) -> Any:
    """What the engine without speculation says."""
    return plain.generate(prompt, SamplingParams(**params))[0]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 11, "n": 2}], ids=str)
def test_a_chat_streams_the_engines_own_text(
    client: TestClient, plain: LLM, chat_prompt: list[int], sampling: dict[str, Any]
) -> None:
    body = {**CHAT, **sampling, "stream_options": {"include_usage": True}, "return_token_ids": True}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    expected = own_text(plain, chat_prompt, max_tokens=40, **sampling)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    for answer in expected.outputs:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == answer.index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(choice["delta"].get("content", "") for choice in mine) == answer.text
        assert [token for choice in mine for token in choice["token_ids"]] == answer.token_ids
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [answer.finish_reason]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == sum(len(answer.token_ids) for answer in expected.outputs)
    assert usage["prompt_tokens"] == len(chat_prompt)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 11, "n": 2}], ids=str)
def test_a_whole_answer_is_the_streamed_one(
    client: TestClient, plain: LLM, chat_prompt: list[int], sampling: dict[str, Any]
) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, **sampling, "stream": False}).json()
    expected = own_text(plain, chat_prompt, max_tokens=40, **sampling)
    assert answer["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in answer["choices"]] == [
        one.text for one in expected.outputs
    ]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected.outputs)))
    assert answer["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in expected.outputs)


def test_the_seed_that_was_drawn_gives_the_answer_again(client: TestClient) -> None:
    body = {"model": MODEL, "prompt": QUESTION, "max_tokens": 20, "temperature": 1.2, "n": 2}
    first = client.post("/v1/completions", json=body)
    seed = int(first.headers["x-slipstream-seed"])
    again = client.post("/v1/completions", json={**body, "seed": seed}).json()
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in first.json()["choices"]]
    assert client.post("/v1/completions", json=body).headers["x-slipstream-seed"] != str(seed)


def test_no_seed_is_named_where_none_gives_the_answer_again(
    make_app: MakeApp, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled, and drafted for under a verifier that is not reproducible."""
    monkeypatch.setattr(type(drafting.engine.verifier), "reproducible", False)
    body = {"prompt": "SELECT name FROM", "max_tokens": 4, "temperature": 1}
    with TestClient(make_app(per_request_metrics=True)) as client:
        cases = {
            "sampled": body,
            "greedy": {**body, "temperature": 0},
            "not drafted for": {**body, "speculation": {"enabled": False}},
        }
        for name, case in cases.items():
            answer = client.post("/v1/completions", json=case)
            assert answer.json()["metrics"]["reproducible"] is (name != "sampled")
            assert ("x-slipstream-seed" in answer.headers) is (name != "sampled")


def test_prompts_draw_seeds_of_their_own(make_app: MakeApp) -> None:
    body = {"prompt": [QUESTION] * 3, "max_tokens": 20, "temperature": 1.5, "ignore_eos": True}
    with TestClient(make_app(per_request_metrics=True)) as client:
        first = client.post("/v1/completions", json=body)
        texts = [choice["text"] for choice in first.json()["choices"]]
        assert len(set(texts)) == 3
        seeds = [int(seed) for seed in first.headers["x-slipstream-seed"].split(", ")]
        assert seeds == first.json()["metrics"]["seeds"]
        for seed, text in zip(seeds, texts, strict=True):
            alone = {**body, "prompt": QUESTION, "seed": seed}
            assert client.post("/v1/completions", json=alone).json()["choices"][0]["text"] == text
        given = client.post("/v1/completions", json={**body, "seed": 5})
        assert given.headers["x-slipstream-seed"] == "5"
        assert len({choice["text"] for choice in given.json()["choices"]}) == 1


def test_several_prompts_are_numbered_through(client: TestClient, plain: LLM) -> None:
    prompts = ["SELECT name FROM", "def reverse(", "Once"]
    body = {
        "prompt": prompts,
        "max_tokens": 12,
        "temperature": 0,
        "n": 2,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    chunks = events(client.post("/v1/completions", json={**body, "stream": True}).text)
    whole = client.post("/v1/completions", json={**body, "stream_options": None}).json()
    params = SamplingParams(max_tokens=12, temperature=0, n=2, ignore_eos=True)
    expected = [one.text for output in plain.generate(prompts, params) for one in output.outputs]
    assert len(expected) == 6
    assert [choice["text"] for choice in whole["choices"]] == expected
    for index, text in enumerate(expected):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
    prompt_tokens = sum(len(plain.engine.tokenizer(prompt).input_ids) for prompt in prompts)
    for usage in (whole["usage"], chunks[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 72)


def test_a_chunk_has_a_logprob_entry_for_each_of_its_tokens(
    client: TestClient, plain: LLM, chat_prompt: list[int]
) -> None:
    body = {**CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    chunks = events(client.post("/v1/chat/completions", json=body).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert max(len(choice["token_ids"]) for choice in choices) > 1, "no chunk held an accepted block"
    for choice in choices:
        entries = (choice["logprobs"] or {"content": []})["content"]
        assert len(entries) == len(choice["token_ids"])
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    [answer] = own_text(plain, chat_prompt, max_tokens=40, temperature=0, logprobs=2).outputs
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [entry["logprob"] for entry in entries] == pytest.approx(
        [entry.logprob for entry in answer.token_logprobs], abs=1e-4
    )
    ended = answer.finish_reason == "stop"  # the end token is counted and has an entry, but no text
    said = b"".join(bytes(entry["bytes"]) for entry in (entries[:-1] if ended else entries))
    assert said.decode() == answer.text


def test_completion_logprobs_are_parallel_lists(client: TestClient, plain: LLM) -> None:
    body = {"prompt": QUESTION, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 3}
    [whole] = client.post("/v1/completions", json=body).json()["choices"]
    lists = whole["logprobs"]
    assert {len(lists[name]) for name in lists} == {20}
    assert all(len(top) == 3 for top in lists["top_logprobs"])
    chunks = events(client.post("/v1/completions", json={**body, "stream": True}).text)
    for name, values in lists.items():
        streamed = [value for chunk in chunks for value in chunk["choices"][0]["logprobs"][name]]
        if name in ("tokens", "text_offset"):
            assert streamed == values
        elif name == "token_logprobs":
            assert streamed == pytest.approx(values, abs=1e-4)
        else:
            assert [list(top) for top in streamed] == [list(top) for top in values]
    assert lists["text_offset"][:2] == [0, len(lists["tokens"][0])]


def test_stop_strings_never_show_even_in_part(client: TestClient, plain: LLM, chat_prompt: list[int]) -> None:
    [answer] = own_text(plain, chat_prompt, max_tokens=40, temperature=0).outputs
    stop = answer.text[9:14]
    assert len(stop) == 5
    before = answer.text[: answer.text.index(stop)]
    body = {**CHAT, "temperature": 0, "stop": [stop], "stream_options": {"include_usage": True}}
    chunks = events(client.post("/v1/chat/completions", json=body).text)
    text = ""
    for chunk in chunks[:-1]:
        text += chunk["choices"][0]["delta"].get("content", "")
        assert before.startswith(text)
    assert text == before
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    [own] = own_text(plain, chat_prompt, max_tokens=40, temperature=0, stop=[stop]).outputs
    assert chunks[-1]["usage"]["completion_tokens"] == len(own.token_ids)


def test_characters_come_whole(client: TestClient, plain: LLM) -> None:
    """Tokens are forced that hold one byte of a character each."""
    tokens = plain.engine.tokenizer("日本語", add_special_tokens=False).input_ids
    assert len(tokens) > 3
    body = {
        **{"prompt": "x", "max_tokens": 30, "temperature": 2.0, "seed": 5, "ignore_eos": True},
        **{"allowed_token_ids": tokens, "stream": True, "return_token_ids": True},
    }
    chunks = events(client.post("/v1/completions", json=body).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    params = SamplingParams(max_tokens=30, temperature=2.0, seed=5, ignore_eos=True, allowed_token_ids=tokens)
    [answer] = plain.generate("x", params)[0].outputs
    assert "".join(choice["text"] for choice in choices) == answer.text
    assert [token for choice in choices for token in choice["token_ids"]] == answer.token_ids


def test_usage_is_running_where_that_is_asked(client: TestClient) -> None:
    body = {
        **CHAT,
        "temperature": 0,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    chunks = events(client.post("/v1/chat/completions", json=body).text)
    total = 0
    for chunk in chunks[:-1]:
        total += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["completion_tokens"] == total
    assert chunks[-1]["usage"]["completion_tokens"] == total


def test_server_counters_are_what_was_streamed(client: TestClient, chat_prompt: list[int]) -> None:
    """Answers that end at a stop string, at their length and at the model's own end, all inside accepted blocks."""
    before = counters(client)
    bodies = [
        {"max_tokens": 7},
        {"max_tokens": 60},
        {"max_tokens": 60, "stop": ["t"]},
        {"max_tokens": 30, "n": 3, "temperature": 1.0, "seed": 2},
    ]
    tokens = 0
    for extra in bodies:
        body = {"temperature": 0, **CHAT, "return_token_ids": True, **extra}
        chunks = events(client.post("/v1/chat/completions", json=body).text)
        tokens += sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks)
    after = counters(client)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown["slipstream_generation_tokens_total"] == tokens
    assert grown["slipstream_prompt_tokens_total"] == len(bodies) * len(chat_prompt)
    ends = [value for name, value in grown.items() if name.startswith("slipstream_request_success_total")]
    assert sum(ends) == 6
    drafts, accepted = (
        grown[f"slipstream_spec_decode_{name}_total"] for name in ("num_drafts", "num_accepted_tokens")
    )
    assert drafts > 0
    assert drafts + accepted <= tokens + 6  # a block that a stop cuts has no token of the target's own


def test_logprobs_of_parts_of_characters(client: TestClient, plain: LLM) -> None:
    """Their text is a replacement character, their bytes are their own."""
    tokens = plain.engine.tokenizer("日本語", add_special_tokens=False).input_ids
    body = {
        **{"messages": MESSAGES, "max_tokens": 12, "temperature": 2.0, "seed": 5, "ignore_eos": True},
        **{"allowed_token_ids": tokens, "logprobs": True, "return_token_ids": True},
    }
    [choice] = client.post("/v1/chat/completions", json=body).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"]) == 12
    assert "\ufffd" in "".join(entry["token"] for entry in entries)
    said = plain.engine.tokenizer.decode(choice["token_ids"])
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == said


LINE_ENDS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj"
"""Everything that `str.splitlines` takes for the end of a line."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_client_takes_the_text_for_the_end_of_a_line(shared: TestClient, path: str) -> None:
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {**asked, "structured_outputs": {"choice": [LINE_ENDS]}, "max_tokens": 99, "stream": True}
    response = shared.post(path, json=body)
    assert all(line.startswith("data: ") for line in response.text.splitlines() if line)
    choices = [chunk["choices"][0] for chunk in events(response.text)]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    assert "".join(texts) == LINE_ENDS
