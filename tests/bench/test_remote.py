"""A server from its client's side, against one that behaves as the test wants."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_cases import key_names
from fake_server import MODEL, PIECES, FakeServer, serve
from typer.testing import CliRunner

from slipstream.assets.workload.prompts import Prompt
from slipstream.assets.workload.reading import Question, Workload
from slipstream.cli.main import app
from slipstream.errors import RemoteError
from slipstream.rpc import client
from slipstream.rpc.client import ServerAddress, request_body
from slipstream.sampling.params import SamplingParams
from slipstream.tools.audit.records import AuditRequest
from slipstream.tools.audit.remote.side import ServerSide
from slipstream.tools.bench.report.server_report import render_server
from slipstream.tools.bench.report.server_tables import server_remarks
from slipstream.tools.bench.result import ServerFigures, ServerResult
from slipstream.tools.bench.server import remote
from slipstream.tools.bench.server.remote import RemotePlan
from slipstream.tools.bench.settings import BenchSettings

TOKENS = 8
"""Tokens of every answer of the fake server."""


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment would be asked for 127.0.0.1 too."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve() as server:
        yield server


def plan(
    server: FakeServer, concurrencies: tuple[int, ...] = (1,), repeats: int = 1, **asked: Any
) -> RemotePlan:
    questions = [
        Question("a", "line 1", text="one"),
        Question("b", "line 2", text="two"),
        Question("b", "line 3", text="3"),
    ]
    workload = asked.pop("workload", Workload("test.jsonl", questions))
    root = server.url.removesuffix("/v1")
    params = SamplingParams(temperature=0.5, seed=3)
    return RemotePlan(
        BenchSettings(
            workload,
            params,
            max_tokens=asked.pop("max_tokens", 16),
            concurrencies=concurrencies,
            repeats=repeats,
            **asked,
        ),
        ServerAddress(server.url, MODEL, f"{root}/metrics", api_key=server.key, timeout_s=120),
        {"top_p": 0.9},
    )


def whole(result: ServerResult) -> ServerFigures:
    """The figures over all tasks at the first concurrency."""
    return result.figures[0]


def test_counts_and_rates_of_an_honest_server(fake: FakeServer) -> None:
    result = remote.run(plan(fake, repeats=2))
    f = whole(result)
    assert result.complete
    assert (f.num_requests, f.num_failed, f.num_output_tokens, f.num_prompt_tokens) == (6, 0, 6 * TOKENS, 42)
    assert f.num_chunks == 6 * len(PIECES)
    assert f.latency_s is not None
    assert f.time_to_first_token_s is not None
    assert f.latency_s.num == f.time_to_first_token_s.num == 6
    assert f.time_to_first_token_s.p50 < f.latency_s.p50
    assert f.inter_token_latency_s is not None
    assert f.inter_token_latency_s.num == 6 * (len(PIECES) - 1)
    assert f.tokens_per_s is not None
    assert f.requests_per_s is not None
    assert f.tokens_per_s == pytest.approx(TOKENS * f.requests_per_s)
    assert f.disagreements == []  # so the warm-up request is in neither count
    assert f.server is not None
    assert (f.server.num_drafts, f.server.num_output_tokens, f.server.num_requests) == (18, 48, 6)
    a = f.server.acceptance
    assert a is not None
    assert a.rate == pytest.approx(5 / 9)
    assert a.length == pytest.approx(1 + 5 / 3)
    assert a.conditional == pytest.approx([2 / 3, 1, 1 / 2])
    assert (a.num_draft_tokens, a.num_wasted_tokens) == (54, 24)


def test_every_task_has_its_line(fake: FakeServer) -> None:
    result = remote.run(plan(fake))
    assert [(f.task, f.num_requests) for f in result.figures] == [(None, 3), ("a", 1), ("b", 2)]
    assert result.figures[1].tokens_per_s is None  # tasks share the clock
    assert result.workload.num_prompts == {"a": 1, "b": 2}


def test_what_is_sent(fake: FakeServer) -> None:
    remote.run(plan(fake))
    warm_up, first, second, third = fake.requests
    assert warm_up == first
    assert first["path"] == "/v1/chat/completions"
    assert first["messages"] == [{"role": "user", "content": "one"}]
    assert [request["messages"][0]["content"] for request in (second, third)] == ["two", "3"]
    for request in fake.requests:
        assert (request["model"], request["stream"], request["max_tokens"]) == (MODEL, True, 16)
        assert (request["temperature"], request["top_p"]) == (0.5, 0.9)
        assert "ignore_eos" not in request
    assert first["seed"] == 3
    assert len({request["seed"] for request in (first, second, third)}) == 3


def test_raw_prompts_are_completions(fake: FakeServer) -> None:
    result = remote.run(plan(fake, raw=True))
    assert {request["path"] for request in fake.requests} == {"/v1/completions"}
    assert fake.requests[0]["prompt"] == "one"
    assert whole(result).num_output_tokens == 3 * TOKENS


def test_raw_conversations_are_completions_of_their_lines() -> None:
    messages = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "two"})
    asked = Prompt("a", "line 1", max_tokens=5, messages=messages)
    assert request_body(MODEL, asked, True, {}, stream=False) == (
        "completions",
        {"model": MODEL, "max_tokens": 5, "prompt": "one\ntwo\n"},
    )
    side = ServerSide("audited", ServerAddress("http://127.0.0.1:9/v1", MODEL, "", timeout_s=1), raw=True)
    path, body = side.body(AuditRequest(0, 0, "a", {}, 5, seed=1, messages=messages), stream=False)
    assert (path, body["prompt"]) == ("completions", "one\ntwo\n")


def test_lengths_from_the_data_are_exact(fake: FakeServer) -> None:
    questions = [
        Question("a", "line 1", text="one", output_tokens=5),
        Question("a", "line 2", text="two", references=("r",)),
    ]
    with pytest.raises(
        Exception, match="line 2: counting the tokens of a reference answer needs --tokenizer"
    ):
        remote.run(plan(fake, workload=Workload("w", questions), max_tokens=None))
    remote.run(plan(fake, workload=Workload("w", questions[:1]), max_tokens=None))
    assert [(r["max_tokens"], r["ignore_eos"]) for r in fake.requests] == [(5, True)] * 2


def test_later_turns_follow_the_servers_own_answers(fake: FakeServer) -> None:
    question = Question("a", "line 1", messages=({"role": "user", "content": "one"},), later_turns=("two",))
    result = remote.run(plan(fake, workload=Workload("w", [question])))
    assert whole(result).num_requests == 2
    assert fake.requests[-1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "".join(PIECES)},
        {"role": "user", "content": "two"},
    ]


def test_requests_run_at_once(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = remote.measure_level

    def together(*args: Any) -> str:
        fake.barrier = threading.Barrier(3)  # three must be under way together, or none goes on
        return measured(*args)

    monkeypatch.setattr(remote, "measure_level", together)
    f = whole(remote.run(plan(fake, concurrencies=(3,))))
    assert (f.concurrency, f.num_requests, f.errors) == (3, 3, {})
    assert fake.most_at_once == 3


def test_one_at_a_time_is_one_at_a_time(fake: FakeServer) -> None:
    assert whole(remote.run(plan(fake))).num_requests == 3
    assert fake.most_at_once == 1


# --- servers that say little, or wrong ---------------------------------------------------------------------------


def test_without_metrics_the_figures_of_the_clients_stay() -> None:
    with serve(metrics=None) as fake:
        result = remote.run(plan(fake))
    assert whole(result).server is None
    assert whole(result).num_output_tokens == 3 * TOKENS
    assert any(line.endswith("/metrics has no metrics") for line in server_remarks(result))


def test_unknown_metrics_are_said_to_be_unknown() -> None:
    with serve(metrics="sglang:") as fake:
        result = remote.run(plan(fake))
    assert whole(result).server is None
    assert "no supported counters" in result.metrics


def test_slipstreams_own_prefix_is_known() -> None:
    with serve(metrics="slipstream_") as fake:
        assert whole(remote.run(plan(fake))).server is not None


def test_without_usage_there_are_no_tokens() -> None:
    with serve(usage=False) as fake:
        result = remote.run(plan(fake))
    f = whole(result)
    assert (f.num_requests, f.num_output_tokens, f.tokens_per_s, f.time_per_output_token_s) == (
        3,
        None,
        None,
        None,
    )
    assert any("lack usage" in line for line in server_remarks(result))
    assert "–" in render_server(result)


def test_a_server_that_counts_more_than_it_sends() -> None:
    with serve(count_factor=1.25) as fake:
        [found] = whole(remote.run(plan(fake))).disagreements
    assert "the clients counted 24 output tokens, the server 30 (+25.0%)" in found
    assert "other traffic" in found


def test_a_server_that_counts_less_than_it_sends() -> None:
    with serve(count_factor=0.5) as fake:
        found = whole(remote.run(plan(fake))).disagreements
    assert "the server 12 (-50.0%)" in found[0]
    assert "miss" in found[0]
    assert "past the end of answers" in found[1]  # 9 drafts and 15 accepted cannot be 12 tokens


def test_accepted_tokens_past_the_end_are_found() -> None:
    with serve(overclaim=2) as fake:
        [found] = whole(remote.run(plan(fake))).disagreements
    assert "21 accepted tokens in 9 drafts, which makes 30 tokens, but only 24" in found


def test_other_traffic_is_noticed(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = client.send_request

    async def with_others(*args: Any) -> Any:
        fake.count()
        return await asked(*args)

    monkeypatch.setattr(remote, "send_request", with_others)
    found = whole(remote.run(plan(fake))).disagreements
    assert any("3 finished requests, the server 6 (+100.0%)" in line for line in found)


def test_a_restarted_server_has_no_deltas(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = client.send_request

    async def restarting(*args: Any) -> Any:
        exchange = await asked(*args)
        if args[2] == 2:  # the last prompt
            fake.counters = dict.fromkeys(fake.counters, 0)
        return exchange

    monkeypatch.setattr(remote, "send_request", restarting)
    result = remote.run(plan(fake))
    assert whole(result).server is None
    assert "decreased" in result.metrics


# --- servers that fail -----------------------------------------------------------------------------------------


def test_a_server_that_answers_nothing_is_an_error() -> None:
    with serve(status=503) as fake, pytest.raises(RemoteError, match="HTTP 503: the model is not loaded"):
        remote.run(plan(fake))


def test_a_wrong_key_is_an_error() -> None:
    with serve() as fake:
        made = plan(fake)
        fake.key = "secret"
        with pytest.raises(RemoteError, match="HTTP 401: no such key"):
            remote.run(made)
        assert whole(remote.run(plan(fake))).num_requests == 3


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(RemoteError, match=r"cannot reach http://127\.0\.0\.1:9/v1"):
        client.find_model("http://127.0.0.1:9/v1", None, 5)


def test_an_answer_that_is_no_stream_is_an_error() -> None:
    with serve(html=True) as fake, pytest.raises(RemoteError, match="text/event-stream"):
        remote.run(plan(fake))


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ({"fail_in_stream": True}, "in the stream: the engine stopped"),
        ({"disconnect": True}, "the connection failed"),
    ],
)
def test_failures_midway_are_counted_and_left_out(behaviour: dict[str, Any], error: str) -> None:
    with serve() as fake:
        asked = client.send_request

        async def failing_second(*args: Any) -> Any:
            for name, value in behaviour.items():
                setattr(fake, name, value if args[2] == 1 else False)
            return await asked(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote, "send_request", failing_second)
            result = remote.run(plan(fake, repeats=2))
    f = whole(result)
    assert (f.num_requests, f.num_failed, f.num_output_tokens) == (4, 2, 4 * TOKENS)
    assert f.latency_s is not None
    assert f.latency_s.num == 4
    [(message, times)] = f.errors.items()
    assert message.startswith(error)
    assert times == 2
    assert any("2 failed" in line for line in server_remarks(result))


def test_refused_requests_do_not_end_the_run(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = client.send_request

    async def refuse_last(*args: Any) -> Any:
        fake.refuse = int(args[2] == 2)
        return await asked(*args)

    monkeypatch.setattr(remote, "send_request", refuse_last)
    f = whole(remote.run(plan(fake, repeats=2)))
    assert f.errors == {"HTTP 429: too many requests": 2}
    assert f.num_requests == 4


def test_ctrl_c_keeps_what_was_answered(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = client.send_request

    async def interrupted(*args: Any) -> Any:
        if len(fake.requests) == 3:  # the warm-up and two
            raise KeyboardInterrupt
        return await asked(*args)

    monkeypatch.setattr(remote, "send_request", interrupted)
    result = remote.run(plan(fake, repeats=5))
    assert not result.complete
    assert whole(result).num_requests == 2
    assert whole(result).tokens_per_s is not None
    assert server_remarks(result)[0].startswith("interrupted")
    assert "interrupted" in render_server(result)


# --- the command line ------------------------------------------------------------------------------------------


def test_the_verb(fake: FakeServer, tmp_path: Any) -> None:
    args = [
        "bench",
        "--url",
        f"{fake.url}/",
        "--prompts-per-task",
        "1",
        "--max-tokens",
        "8",
        "--repeats",
        "1",
    ]
    done = CliRunner().invoke(app, [*args, "--concurrency", "1,2", "--output", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert "Seen by the clients" in done.stdout
    assert "2 at once" in done.stdout
    saved = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert (saved["kind"], saved["model"], saved["complete"]) == ("server", MODEL, True)
    guide = (Path(__file__).parents[2] / "docs/guides/bench.md").read_text()
    assert [name for name in key_names(saved) if f"`{name}`" not in guide] == []
    page = (tmp_path / "new" / "bench.html").read_text()
    assert f"{MODEL}, measured by its clients" in page
    assert len(re.findall("<svg", page)) == 4  # throughput, two latencies, acceptance


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--spec", "ngram"], "--spec is for engines in this process"),
        (["some/model"], "MODEL is for engines in this process"),
        (["--num-speculative-tokens", "2"], "--num-speculative-tokens is for engines in this process"),
        (["--dtype", "float32"], "--dtype cannot be used with --url"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE of --api-key-env is not set"),
    ],
)
def test_refusals(args: list[str], error: str, fake: FakeServer) -> None:
    done = CliRunner().invoke(app, ["bench", "--url", fake.url, *args])
    assert done.exit_code == 2
    assert error in done.stderr
    assert fake.requests == []
