"""What a server says of itself: models, tokens, health, metrics, logs."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_cases import MESSAGES, MODEL, QUESTION, MakeApp, counters, events
from starlette.testclient import TestClient

import slipstream
from slipstream import LLM
from slipstream.core.model_path import model_id
from slipstream.serve.config import ServeConfig
from slipstream.serve.lifecycle import address
from slipstream.serve.logs import JsonFormatter, TextFormatter, configure
from slipstream.tools.bench.server.counters import parse_counters

GREEDY = {"prompt": QUESTION, "temperature": 0, "max_tokens": 60, "ignore_eos": True}


def test_models(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == (MODEL, "model", "slipstream")
    assert model["root"].endswith("target")
    assert model["speculation"] == {"method": "draft_model", "verifier": "coupled", "lossy": False}
    assert client.get(f"/v1/models/{MODEL}").json() == model
    for other in ("gpt-4", "some/model", f"{MODEL}/x"):
        answer = client.get(f"/v1/models/{other}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_name_of_its_own(make_app: MakeApp) -> None:
    with TestClient(make_app(served_model_name="my-model")) as client:
        answer = client.post("/v1/completions", json={"model": "my-model", "prompt": "a", "max_tokens": 1})
        assert answer.json()["model"] == "my-model"
        assert client.post("/v1/completions", json={"model": MODEL, "prompt": "a"}).status_code == 404


def test_the_models_id_is_a_name_and_its_path_is_known(make_app: MakeApp) -> None:
    path = "/a/b/SmolLM2-135M-Instruct.Q4_1.gguf"
    with TestClient(make_app(path)) as client:
        [model] = client.get("/v1/models").json()["data"]
        assert model["id"] == "SmolLM2-135M-Instruct.Q4_1"
        for name in (path, model["id"]):
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            assert client.post("/v1/completions", json=body).json()["model"] == model["id"]
        body = {"model": "/a/b", "prompt": "a"}
        assert client.post("/v1/completions", json=body).status_code == 404


def test_a_models_id_by_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--my--model/snapshots/0a1b"
    for folder in (snapshot, tmp_path / "Qwen3-0.6B"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "Qwen3-0.6B")
    for given, name in {
        "/a/b/SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct.Q4_1",
        "org/repo-GGUF:model-Q4_K_M.gguf": "model-Q4_K_M",
        "big-00001-of-00003.gguf": "big",
        ".": "Qwen3-0.6B",
        f"{tmp_path}/Qwen3-0.6B/": "Qwen3-0.6B",
        str(snapshot): "org/my/model",
        "HuggingFaceTB/SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M",
        "embedded-pair": "embedded-pair",
        "/": "/",
    }.items():
        assert model_id(given) == name, given


@pytest.mark.parametrize(
    ("log_format", "terminal", "chosen"),
    [
        ("auto", True, TextFormatter),
        ("auto", False, JsonFormatter),
        ("json", True, JsonFormatter),
        ("text", False, TextFormatter),
    ],
)
def test_logs_are_text_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, log_format: str, terminal: bool, chosen: type[logging.Formatter]
) -> None:
    handlers: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **given: handlers.extend(given["handlers"]))
    monkeypatch.setattr(logging, "captureWarnings", lambda _: None)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    configure(ServeConfig(log_format=log_format))
    [handler] = handlers
    assert type(handler.formatter) is chosen


def test_the_address_to_open() -> None:
    assert address("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert address("0.0.0.0", 80) == address("::", 80) == "http://localhost:80"
    assert address("::1", 80) == "http://[::1]:80"


def test_states(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/version").json() == {"version": slipstream.__version__}
    assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]


def test_tokens_there_and_back(client: TestClient, plain: LLM) -> None:
    text = "Grüße, 日本語 and <|end|>"
    answer = client.post(
        "/tokenize", json={"model": MODEL, "prompt": text, "add_special_tokens": False}
    ).json()
    assert answer["tokens"] == plain.engine.tokenizer(text, add_special_tokens=False).input_ids
    assert answer["count"] == len(answer["tokens"])
    with_special = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert with_special == plain.engine.tokenizer(text).input_ids
    assert client.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]}).json() == {
        "prompt": text
    }


def test_metrics_are_the_engines_own(make_app: MakeApp, plain: LLM) -> None:
    """Against the requests' own figures, which the engine counts apart."""
    with TestClient(make_app(per_request_metrics=True)) as client:
        figures = [
            client.post("/v1/completions", json={**GREEDY, "task": task}).json()["metrics"]
            for task in ("sql", "", "sql")
        ]
        after = counters(client)
    own = [one["speculative_decoding"] for one in figures]
    spec = "slipstream_spec_decode_"
    drafted = sum(one["num_draft_tokens"] for one in own)
    accepted = sum(one["num_accepted_draft_tokens"] for one in own)
    num_drafts = sum(one["num_spec_steps"] for one in own)
    assert after[spec + "num_drafts_total"] == num_drafts
    assert after[spec + "num_draft_tokens_total"] == drafted
    assert after[spec + "num_accepted_tokens_total"] == accepted > 0
    assert after[spec + "num_wasted_tokens_total"] == drafted - accepted
    at = [
        after[spec + "num_accepted_tokens_per_pos_total" + json.dumps({"position": str(i)})] for i in range(4)
    ]
    assert sum(at) == accepted
    assert at == sorted(at, reverse=True)
    assert after[spec + "num_draft_tokens_per_pos_total" + json.dumps({"position": "0"})] == num_drafts
    assert after[spec + "accepted_length_count"] == num_drafts
    assert after[spec + "accepted_length_sum"] == accepted
    by_task = json.dumps({"method": "draft_model", "task": "sql"}, sort_keys=True)
    assert after["slipstream_task_generation_tokens_total" + by_task] == 120
    assert after["slipstream_task_draft_tokens_total" + by_task] == sum(
        own[i]["num_draft_tokens"] for i in (0, 2)
    )
    assert after["slipstream_generation_tokens_total"] == 180
    assert after['slipstream_request_success_total{"finished_reason": "length"}'] == 3
    assert after["slipstream_num_requests_running"] == after["slipstream_num_requests_waiting"] == 0
    assert after["slipstream_kv_cache_usage_perc"] == 0
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert after[f"slipstream_{name}_seconds_count"] == 3
    assert (
        after["slipstream_inter_chunk_latency_seconds_count"]
        == sum(one["num_target_passes"] for one in figures) - 3
    )
    for name in ("draft", "verify"):
        assert after[f"slipstream_{name}_seconds_total"] == pytest.approx(
            sum(one[f"{name}_s"] for one in figures)
        )
    assert after["slipstream_other_seconds_total"] > 0
    assert after["slipstream_prefix_cache_hits_total"] > 0
    assert after["slipstream_engine_steps_total"] == sum(one["num_target_passes"] for one in figures)


def test_figures_of_a_request(make_app: MakeApp) -> None:
    with TestClient(make_app(per_request_metrics=True)) as client:
        whole = client.post("/v1/completions", json={**GREEDY, "seed": 6}).json()["metrics"]
        ends = []
        for usage in (True, False):
            body = {**GREEDY, "stream": True, "stream_options": {"include_usage": usage}}
            chunks = events(client.post("/v1/completions", json=body).text)
            assert all("metrics" not in chunk for chunk in chunks[:-1])
            ends.append(chunks[-1]["metrics"])
    spec = whole["speculative_decoding"]
    assert whole["seeds"] == [6]
    assert spec["num_spec_tokens"] == 4
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    assert sum(i * n for i, n in enumerate(spec["acceptance_histogram"])) == spec["num_accepted_draft_tokens"]
    assert spec["draft_acceptance_rate"] == spec["num_accepted_draft_tokens"] / spec["num_draft_tokens"]
    assert spec["mean_acceptance_length"] == 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
    parts = [whole[name] for name in ("queue_s", "draft_s", "verify_s", "other_s")]
    assert sum(parts) == pytest.approx(whole["total_s"])
    for end in ends:
        assert end["speculative_decoding"] == spec


def test_metrics_under_vllms_names(make_app: MakeApp) -> None:
    with TestClient(make_app(metrics_alias="vllm")) as client:
        client.post("/v1/completions", json=GREEDY)
        text = client.get("/metrics").text
    names = {family.name for family in text_string_to_metric_families(text)}
    for name in (
        "spec_decode_num_drafts",
        "generation_tokens",
        "num_requests_running",
        "kv_cache_usage_perc",
    ):
        assert {f"vllm:{name}", f"slipstream_{name}"} <= names
    assert "vllm:draft_seconds" not in names
    assert "vllm:spec_decode_num_accepted_tokens_per_pos_total{" in text
    ours, theirs = parse_counters(text, MODEL), parse_counters(text.replace("slipstream_", "x_"), MODEL)
    assert ours is not None
    assert ours == theirs
    assert ours.num_output_tokens == 60


def test_tasks_cannot_make_labels_without_end(make_app: MakeApp) -> None:
    with TestClient(make_app(max_task_labels=2)) as client:
        for task in ("a", "b", "c", "d", "a", ""):
            client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "task": task})
        text = client.get("/metrics").text
    tasks = set(re.findall('task="([^"]+)"', text))
    assert tasks == {"a", "b", "other", "none"}


@pytest.mark.parametrize(
    ("config", "shown", "on_dashboard"),
    [
        ({"api_key": ["k"]}, {"other", "none"}, {"acme-merger", "sql", "none"}),
        (
            {"api_key": ["k"], "task_labels": ["sql"]},
            {"sql", "other", "none"},
            {"acme-merger", "sql", "none"},
        ),
        ({"task_labels": ["sql"]}, {"sql", "other", "none"}, {"acme-merger", "sql", "none"}),
        ({"task_labels": ["sql"], "max_task_labels": 0}, {"sql", "other", "none"}, {"other", "sql", "none"}),
        ({}, {"acme-merger", "sql", "none"}, {"acme-merger", "sql", "none"}),
    ],
    ids=["key", "key-named", "named", "named-none-else", "open"],
)
def test_what_clients_call_their_tasks_is_for_holders_of_keys(
    make_app: MakeApp, config: dict[str, Any], shown: set[str], on_dashboard: set[str]
) -> None:
    with TestClient(make_app(**config)) as client:
        key = {"Authorization": "Bearer k"}
        for task in ("acme-merger", "sql", ""):
            asked = {"prompt": "x", "max_tokens": 1, "task": task}
            assert client.post("/v1/completions", json=asked, headers=key).status_code == 200
        text = client.get("/metrics").text
        data = client.get("/dashboard/data", headers=key).json()
    assert set(re.findall('task="([^"]+)"', text)) == shown
    assert ("acme-merger" in text) == ("acme-merger" in shown)
    assert {task["task"] for task in data["tasks"]} == on_dashboard


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [record for record in caplog.records if record.name == "slipstream.serve.access"]
    return [json.loads(JsonFormatter().format(record)) for record in records]


def test_the_log_says_why_a_request_was_refused(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with TestClient(make_app(api_key=["k"])) as client:
        key = {"Authorization": "Bearer k"}
        body = {"prompt": "SECRET", "top_p": 7}
        said = client.post("/v1/completions", json=body, headers=key).json()["error"]
        client.post("/v1/completions", json=body)
    bad, no_key = access_lines(caplog)
    assert bad["error_message"] == said["message"]
    assert (bad["error_code"], bad["error_param"]) == ("invalid_value", "top_p")
    assert no_key["error_code"] == "invalid_api_key"
    assert "SECRET" not in json.dumps([bad, no_key])


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_is_no_answer_that_was_broken_off(client: TestClient, stream: bool) -> None:
    for form in ({"regex": "("}, {"grammar": "start: gone"}, {"json": {"type": "strin"}}):
        body = {"prompt": ["a", "b"], "structured_outputs": form, "stream": stream}
        assert client.post("/v1/completions", json=body).status_code == 400
    assert counters(client)['slipstream_request_success_total{"finished_reason": "abort"}'] == 0


def test_a_chat_that_is_too_long_is_no_warning(
    client: TestClient, drafting: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(drafting.engine.tokenizer, "deprecation_warnings", {})
    long = [{"role": "user", "content": "word " * 3000}]
    assert client.post("/v1/chat/completions", json={"messages": long}).status_code == 400
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("asked", [False, True], ids=["silent", "with prompts"])
def test_logs_hold_prompts_only_where_asked(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    with TestClient(make_app(log_prompts=asked)) as client:
        for stream in (False, True):
            body = {"messages": MESSAGES, "max_tokens": 5, "stream": stream, "ignore_eos": True}
            answer = client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-7"})
            assert answer.headers["x-request-id"] == "mine-7"
        client.post("/v1/completions", json={"prompt": QUESTION, "temperature": "x"})
        assert client.get("/health", headers={"X-Request-Id": "bad id"}).headers["x-request-id"] != "bad id"
    lines = access_lines(caplog)
    assert [line["status"] for line in lines] == [200, 200, 400, 200]
    assert [line["request_id"] for line in lines[:2]] == ["mine-7"] * 2
    for line in lines[:2]:
        assert line["output_tokens"] == 5
        assert line["finish_reasons"] == ["length"]
        assert line["duration_ms"] > 0
        assert ("asked" in line) == asked
    written = "\n".join(JsonFormatter().format(r) + TextFormatter().format(r) for r in caplog.records)
    assert ("Hawthorn" in written) == asked


def test_exceptions_are_logged_in_one_line() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "it %s", ("failed",), (ValueError, error, None))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "it failed"
    assert "ValueError: no" in json.loads(line)["exception"]


FORGED = "x\n2026-01-01 00:00:00,000 INFO request status=200 \x1b[2J\r\x7f\x85\x9b\u2028\u2029\u202e\u2066 é"


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()], ids=["json", "text"])
def test_what_clients_send_forges_no_line_of_the_log(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture, formatter: logging.Formatter
) -> None:
    caplog.set_level(logging.DEBUG)
    with TestClient(make_app(log_prompts=True)) as client:
        client.get("/v1/" + quote(FORGED, safe=""))
        client.get("/v1/models/" + quote(FORGED, safe=""))
        for extra in ({"model": FORGED}, {"task": FORGED, "user": FORGED}, {FORGED: 1}, {"prompt": FORGED}):
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **extra})
        for tool in ({"role": FORGED}, {"role": "user", "content": [{"type": FORGED}]}):
            client.post("/v1/chat/completions", json={"messages": [tool]})
        headers = {"X-Request-Id": "a\x1b[0m", "Content-Type": "text/\x1b[1m"}
        client.post("/v1/completions", content=b"{}", headers=headers)
    mine = [record for record in caplog.records if record.name.startswith("slipstream")]
    assert sum(record.name == "slipstream.serve.access" for record in mine) == 9
    for line in map(formatter.format, mine):
        assert line.replace("é", "e").isprintable(), line
        assert len(re.findall(r"(?:^| )status=\d", re.sub(r'"(?:[^"\\]|\\.)*"', "", line))) <= 1, line


def test_an_exception_in_the_text_log_is_indented_and_escaped() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "it failed", (), (ValueError, error, None))
    record.exc_text = FORGED  # what another handler has made of it
    first, *rest = TextFormatter().format(record).split("\n")
    assert first.endswith("ERROR it failed")
    assert rest
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_answers_with_nothing_left_are_counted_as_they_were_given_out(client: TestClient) -> None:
    """The first token may not come, or not a second time. The step in which that shows gives no token of its own."""
    tokens = client.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()["tokens"]
    before = counters(client)
    num_tokens = 0
    for bad_words in (["a"], ["aa", "a a"]):
        body = {"prompt": QUESTION, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        asked = client.post(
            "/v1/completions", json={**body, "allowed_token_ids": tokens, "bad_words": bad_words}
        )
        assert asked.status_code == 200
        assert asked.json()["choices"][0]["finish_reason"] == "error"
        num_tokens += asked.json()["usage"]["completion_tokens"]
    assert num_tokens > 0
    after = counters(client)
    changed = {name: value - before.get(name, 0) for name, value in after.items()}
    assert changed["slipstream_generation_tokens_total"] == num_tokens
    mismatches = [value for name, value in changed.items() if "alarm_raises" in name and "mismatch" in name]
    assert not any(mismatches)
    assert client.post("/v1/completions", json={**GREEDY, "max_tokens": 3}).status_code == 200
