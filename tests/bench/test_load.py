"""A load on a server that behaves as the test wants: arrivals, bounds, failures, interruption."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import MODEL, FakeServer, serve
from typer.testing import CliRunner

from slipstream.assets.workload.prompts import Prompt
from slipstream.assets.workload.reading import Question, Workload
from slipstream.cli.main import app
from slipstream.errors import RemoteError, RequestError
from slipstream.rpc.client import Exchange, ServerAddress
from slipstream.tools.bench.result import Arrivals, LoadResult
from slipstream.tools.bench.server import load
from slipstream.tools.bench.server.load import LoadPlan, first_turns

TOKENS = 8
"""Tokens of every answer of the fake server."""
PROMPTS = [Prompt("a", "1", 5, text="one"), Prompt("b", "2", 5, text="two"), Prompt("a", "3", 5, text="3")]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve() as server:
        yield server


def plan(url: str, concurrency: int | None = 2, rate: float | None = None, **options: Any) -> LoadPlan:
    server = ServerAddress(url, MODEL, f"{url.removesuffix('/v1')}/metrics", timeout_s=120)
    arrivals = Arrivals(None if rate else concurrency, rate, seed=3)
    if "duration_s" not in options:
        options.setdefault("num_requests", 7)
    return LoadPlan(server=server, workload="test", prompts=PROMPTS, arrivals=arrivals, **options)


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["load", *args])


def test_a_closed_loop_asks_so_many_at_a_time(fake: FakeServer) -> None:
    load.run(plan(fake.url, num_requests=1))  # makes the counters
    fake.requests.clear()
    fake.barrier = threading.Barrier(2)
    result = load.run(plan(fake.url, num_requests=8, warm_up=False))
    assert fake.most_at_once == result.most_at_once == 2
    assert len(fake.requests) == len(result.requests) == 8
    overall, *by_task = result.figures
    assert overall.num_requests == 8
    assert overall.num_output_tokens == 8 * TOKENS
    assert overall.tokens_per_s == pytest.approx(8 * TOKENS / result.wall_s)
    assert overall.requests_per_s == pytest.approx(8 / result.wall_s)
    assert [(f.task, f.num_requests) for f in by_task] == [("a", 5), ("b", 3)]
    for figures in result.figures:
        for found in (figures.time_to_first_token_s, figures.time_per_output_token_s, figures.latency_s):
            assert found is not None
            assert found.num == figures.num_requests
        assert figures.inter_token_latency_s is not None
        assert figures.inter_token_latency_s.num == 3 * figures.num_requests, "four pieces, three gaps"
    assert overall.server is not None
    assert overall.server.num_output_tokens == 8 * TOKENS
    assert overall.server.acceptance is not None
    assert overall.server.acceptance.rate == pytest.approx(5 / 9)
    assert overall.disagreements == []
    assert result.statuses == {"200": 8}
    assert result.lateness_s is None
    assert result.complete


def test_prompts_come_in_turn_each_time_with_another_seed(fake: FakeServer) -> None:
    load.run(
        plan(fake.url, concurrency=1, warm_up=False, sampling={"temperature": 0.5, "seed": 1, "top_p": 0.9})
    )
    asked = [request["messages"][0]["content"] for request in fake.requests]
    assert asked == ["one", "two", "3", "one", "two", "3", "one"]
    assert len({request["seed"] for request in fake.requests}) == 7
    assert {(request["temperature"], request["top_p"]) for request in fake.requests} == {(0.5, 0.9)}
    assert "task" not in fake.requests[0]
    load.run(plan(fake.url, concurrency=1, num_requests=2, send_task=True))
    assert [request["task"] for request in fake.requests[-2:]] == ["a", "b"]


def test_an_open_loop_does_not_wait_for_answers(fake: FakeServer) -> None:
    fake.barrier = threading.Barrier(6)  # nobody is answered before all six have come
    result = load.run(plan(fake.url, rate=200.0, num_requests=6, warm_up=False))
    assert result.most_at_once == 6
    assert result.figures[0].num_requests == 6
    assert result.lateness_s is not None
    assert result.lateness_s.num == 6


def test_arrivals_are_poisson_and_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps of an exponential: mean and standard deviation 1/rate. Time is not waited for."""
    sent: list[list[float]] = []

    async def at_once(*_: Any) -> Exchange:
        return Exchange(0, status=200)

    now_s = [0.0]

    ours, real_sleep, real_clock = threading.get_ident(), asyncio.sleep, time.perf_counter

    async def sleep(seconds: float) -> None:
        if threading.get_ident() != ours:  # a server of another test, whose thread has not ended yet
            await real_sleep(seconds)
        else:
            now_s[0] += seconds

    monkeypatch.setattr(load, "send_request", at_once)
    monkeypatch.setattr(load.asyncio, "sleep", sleep)
    monkeypatch.setattr(
        load.time, "perf_counter", lambda: now_s[0] if threading.get_ident() == ours else real_clock()
    )
    for seed in (3, 3, 4):
        url = "http://127.0.0.1:9/v1"
        arrivals = Arrivals(rate_per_s=50.0, seed=seed)
        one = load.LoadRun(
            LoadPlan(ServerAddress(url, MODEL, url), "test", PROMPTS, arrivals, num_requests=4000)
        )
        times: list[float] = []
        monkeypatch.setattr(one, "_next", lambda times=times, one=one: times.append(now_s[0]) or _count(one))
        monkeypatch.setattr(one, "_watch", lambda: asyncio.Event().wait())
        begun_s = now_s[0]
        asyncio.run(one.run())
        sent.append([at_s - begun_s for at_s in times])
    assert sent[0] == pytest.approx(sent[1])
    assert sent[0] != pytest.approx(sent[2])
    gaps = [b - a for a, b in zip([0.0, *sent[0]], sent[0], strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.06)
    assert deviation == pytest.approx(1 / 50, rel=0.08)


def _count(one: load.LoadRun) -> int:
    one._num_sent += 1
    return one._num_sent - 1


@pytest.mark.parametrize("arrivals", [{"concurrency": 2}, {"rate": 100.0}], ids=["closed", "open"])
def test_time_is_a_bound(fake: FakeServer, monkeypatch: pytest.MonkeyPatch, arrivals: dict[str, Any]) -> None:
    asked: list[tuple[float, bool]] = []
    may_send = load.LoadRun._may_send

    def noted(self: load.LoadRun, at_s: float) -> bool:
        asked.append((at_s, may_send(self, at_s)))
        return asked[-1][1]

    monkeypatch.setattr(load.LoadRun, "_may_send", noted)
    result = load.run(plan(fake.url, duration_s=0.3, **arrivals))
    assert result.complete
    assert [allowed for at_s, allowed in asked] == [at_s < 0.3 for at_s, _ in asked]
    assert not asked[-1][1], "it ended by its time"
    assert len(result.requests) == sum(allowed for _, allowed in asked) > 0
    assert result.num_requests_asked is None
    few = load.run(plan(fake.url, duration_s=30, num_requests=3, **arrivals))
    assert len(few.requests) == 3, "whichever bound comes first"


def test_answers_in_one_piece(fake: FakeServer) -> None:
    result = load.run(plan(fake.url, stream=False, num_requests=2))
    assert "stream" not in fake.requests[0]
    assert result.figures[0].time_to_first_token_s is None
    assert result.figures[0].num_output_tokens == 2 * TOKENS
    assert result.acceptance["all"].rate == pytest.approx(5 / 9)
    assert not result.stream
    with serve(html=True) as page, pytest.raises(RemoteError, match="the response is no answer: <p>hello"):
        load.run(plan(page.url, stream=False))


def test_errors_are_counted_by_status_and_message() -> None:
    with serve(refuse=3) as fake:
        result = load.run(plan(fake.url, concurrency=1, warm_up=False))
    assert result.statuses == {"429": 3, "200": 4}
    assert result.figures[0].num_failed == 3
    [(message, times)] = result.figures[0].errors.items()
    assert message.startswith("HTTP 429")
    assert times == 3
    assert [request.status for request in result.requests[:4]] == [429, 429, 429, 200]


def test_the_figures_that_responses_carry_of_themselves() -> None:
    exchanges = [
        Exchange(0, speculation={"num_spec_steps": 3, "num_draft_tokens": 9, "num_accepted_draft_tokens": 6}),
        Exchange(0, speculation={"num_spec_steps": 1, "num_draft_tokens": 3, "num_accepted_draft_tokens": 0}),
        Exchange(0),
    ]
    found = load.pooled_acceptance(exchanges)
    assert found is not None
    assert found.rate == pytest.approx(6 / 12)
    assert found.length == pytest.approx(1 + 6 / 4)
    assert found.num_wasted_tokens == 6
    assert load.pooled_acceptance(exchanges[2:]) is None


def test_interrupted_it_reports_what_had_ended(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = load.send_request
    seen: list[int] = []

    async def ask(*args: Any) -> Exchange:
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return await answered(*args)

    monkeypatch.setattr(load, "send_request", ask)
    result = load.run(plan(fake.url, concurrency=1, warm_up=False))
    assert not result.complete
    assert len(result.requests) == 3
    assert result.num_unfinished == 1
    assert result.figures[0].disagreements == []


def test_nobody_there_is_one_error() -> None:
    with pytest.raises(RemoteError, match="does not answer: the connection failed"):
        load.run(plan("http://127.0.0.1:9/v1", num_requests=2, warm_up=False))
    with serve(status=400) as fake, pytest.raises(RemoteError, match="does not answer: HTTP 400"):
        load.run(plan(fake.url))
    assert len(fake.requests) <= 1, "the warm-up says it, once"


def test_a_load_needs_an_end_and_one_kind_of_arrivals() -> None:
    server = ServerAddress("u", MODEL, "m")
    with pytest.raises(RequestError, match="does not end"):
        LoadPlan(server, "test", PROMPTS, Arrivals(concurrency=1))
    with pytest.raises(RequestError, match="either a concurrency or a rate"):
        LoadPlan(server, "test", PROMPTS, Arrivals(concurrency=1, rate_per_s=1.0), num_requests=1)


def test_tasks_are_mixed_in_turn() -> None:
    questions = [Question(task, str(i), text=f"{task}{i}") for i, task in enumerate("aaabbc")]
    workload = Workload("w", questions)
    assert [prompt.task for prompt in first_turns(workload, [], 4)] == list("abcaba")
    assert [prompt.task for prompt in first_turns(workload, ["c", "a"], 4)] == list("caaa")
    with pytest.raises(RequestError, match="no task 'd'; it has a, b, c"):
        first_turns(workload, ["d"], 4)


# --- the verb ----------------------------------------------------------------------------------------------------


def test_the_verb_writes_json_a_picture_and_tables(fake: FakeServer, tmp_path: Path) -> None:
    picture, file = tmp_path / "load.svg", tmp_path / "load.json"
    args = ["--num-requests", "5", "--concurrency", "2", "--plot", str(picture), "--output", str(file)]
    done = invoke(fake.url.removesuffix("/v1"), *args)  # without /v1, as people write it
    assert done.exit_code == 0, done.output
    for text in (
        "Seen by the clients",
        "The server's own counters",
        "by status: 200: 5",
        "closed loop, 2 at once",
    ):
        assert text in done.stdout
    assert picture.read_text().lstrip().startswith("<?xml")
    result = json.loads(file.read_text())
    assert result["kind"] == "load"
    assert result["url"] == fake.url
    assert set(result) == set(LoadResult.__dataclass_fields__)
    assert len(result["requests"]) == 5
    assert json.loads(invoke(fake.url, "--num-requests", "1", "--json").stdout)["complete"] is True
    assert "5 (few)" in done.stdout
    assert "p99 of fewer than 100 requests" in done.stdout
    sent = len(fake.requests)
    for flag, there in (("--output", file), ("--plot", picture)):
        again = invoke(fake.url, "--num-requests", "1", flag, str(there))
        assert again.exit_code == 2
        assert f"cannot write '{there}': it is there already" in again.stderr
    assert len(fake.requests) == sent
    assert invoke(fake.url, "--num-requests", "1", "--output", str(file), "--overwrite").exit_code == 0
    assert len(json.loads(file.read_text())["requests"]) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(fake: FakeServer) -> None:
    done = invoke(fake.url, "--num-requests", "1", "--output", "/dev/full")
    assert done.exit_code == 2
    assert done.stderr.endswith("error: cannot write '/dev/full': No space left on device\n")


REFUSALS = {
    "nobody there": (["http://127.0.0.1:9/v1"], "cannot reach http://127.0.0.1:9/v1"),
    "no url": (["localhost"], "cannot reach localhost"),
    "both loops": (["URL", "--rate", "1", "--concurrency", "1"], "give one of them"),
    "sampling": (["URL", "--top-p", "3"], "top_p must be"),
    "picture": (["URL", "--plot", "load.txt"], "--plot writes .pdf, .png, .svg"),
    "no folder": (["URL", "--output", "no/such/x.json"], "there is no folder 'no/such'"),
    "task": (["URL", "--task", "sqll"], "sample has no task 'sqll'"),
    "body": (["URL", "--extra-body", "5"], "--extra-body takes a JSON object"),
    "wrong path": (["URL/other"], "/other/models answers HTTP 404"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_one_line(case: str, fake: FakeServer) -> None:
    args, error = REFUSALS[case]
    done = invoke(*[arg.replace("URL", fake.url) for arg in args])
    assert done.exit_code == 2
    assert error in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert fake.requests == []


def test_a_missing_key_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(key="secret") as fake:
        done = invoke(fake.url, "--num-requests", "1")
        assert done.exit_code == 2
        assert "HTTP 401" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        monkeypatch.setenv("MY_KEY", "secret")
        assert invoke(fake.url, "--num-requests", "1", "--api-key-env", "MY_KEY").exit_code == 0
