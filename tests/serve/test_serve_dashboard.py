"""The dashboard's page and data, and the metrics and alarms beside them."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import threading
import time
from dataclasses import replace
from importlib import resources
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import pytest
from serve_cases import DRAFT, MESSAGES, QUESTION, MakeApp, counters
from starlette.testclient import TestClient

from slipstream import LLM, SamplingParams
from slipstream.assets import sample_prompts
from slipstream.control.monitor.alarms import AlarmKind
from slipstream.control.types import ControlReport, MethodReport, Speedup, TaskReport
from slipstream.core.metrics.decoded import DecodedRow
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.passes import PassCounts
from slipstream.core.metrics.request import RequestMetrics
from slipstream.serve.dashboard.history import BUCKET_S, NUM_BUCKETS, History
from slipstream.serve.engine_info import decoded_rows
from slipstream.serve.logs import JsonFormatter
from slipstream.serve.service import Service
from slipstream.stats.shift import Value

GREEDY = {"prompt": QUESTION, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
DASHBOARD = "slipstream.serve.alarms"


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def data(client: TestClient) -> dict[str, Any]:
    told: dict[str, Any] = client.get("/dashboard/data").json()
    return told


def test_the_page_is_whole_and_locked_down(client: TestClient) -> None:
    page = client.get("/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)
    for tag, source in (("script", "script-src"), ("style", "style-src")):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[source] == f"'sha256-{digest}'"
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page.text)
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in page.text
    assert page.text == resources.files("slipstream.serve.dashboard").joinpath("dashboard.html").read_text(
        "utf-8"
    )


def test_an_unused_server_says_so(client: TestClient) -> None:
    told = data(client)
    assert told["num_steps"] == 0
    assert told["recent"] == told["alarms"] == []
    assert [(method["name"], method["num_steps"]) for method in told["methods"]] == [("draft_model", 0)]
    assert not told["speculation"]["adaptive"]
    assert told["speculation"]["realised"] is None
    assert told["is_ready"]
    assert not told["has_stopped"]


def test_the_data_is_the_requests_own(make_app: MakeApp) -> None:
    with TestClient(make_app(per_request_metrics=True)) as client:
        figures = [ask(client, task=task)["metrics"]["speculative_decoding"] for task in ("sql", "", "sql")]
        told = data(client)
    tasks = {task["task"]: task for task in told["tasks"]}
    assert set(tasks) == {"sql", "none"}
    assert tasks["sql"]["num_tokens"] == 80
    assert tasks["sql"]["num_drafted"] == figures[0]["num_draft_tokens"] + figures[2]["num_draft_tokens"]
    assert tasks["none"]["num_accepted"] == figures[1]["num_accepted_draft_tokens"]
    assert tasks["none"]["drift"] == {"state": "learning", "num_learned": 1, "num_needed": 100}
    conditional = [a / b for a, b in zip_longest(told["accepted"], told["reached"], fillvalue=0)]
    assert conditional == pytest.approx(figures[1]["conditional_acceptance"])  # three times the same answer
    assert told["draft_s"] > 0
    assert told["verify_s"] > 0
    assert sum(batch[0] for batch in told["batches"].values()) <= told["num_steps"]
    assert len(told["recent"]) == 3
    assert told["recent"][0]["num_output_tokens"] == 40 == len(told["recent"][0]["from_draft"])
    assert told["recent"][0]["from_draft"].count("1") == figures[2]["num_accepted_draft_tokens"]


@pytest.mark.parametrize("texts", [False, True])
def test_texts_are_shown_only_where_configured(make_app: MakeApp, texts: bool) -> None:
    with TestClient(make_app(dashboard_texts=texts)) as client:
        text = ask(client, task="sql")["choices"][0]["text"]
        stream = {"messages": MESSAGES, "max_tokens": 20, "stream": True, "n": 2}
        client.post("/v1/chat/completions", json=stream)
        told = data(client)
    assert told["with_texts"] == texts
    answer = told["recent"][2]
    if texts:
        assert "".join(piece for piece, _ in answer["pieces"]) == text
        assert any(drafted for _, drafted in answer["pieces"])
        assert [bool(one["pieces"]) for one in told["recent"]] == [True] * 3
    else:
        assert all(one["pieces"] is None for one in told["recent"])
        assert text.split()[0] not in json.dumps(told)


def test_keys_guard_the_data_but_not_the_page(make_app: MakeApp) -> None:
    with TestClient(make_app(api_key=("secret",))) as client:
        assert client.get("/dashboard").status_code == 200
        assert client.get("/dashboard/data").status_code == 401
        assert client.post("/dashboard/acknowledge", json={"kind": "truncation"}).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert client.get("/dashboard/data", headers=key).status_code == 200


def test_the_page_does_not_drown_the_log(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with TestClient(make_app()) as client:
        data(client)
        after = counters(client)
    assert not [record for record in caplog.records if record.name == "slipstream.serve.access"]
    assert not any(after[name] for name in after if name.startswith("slipstream_http_responses_total"))


def test_every_way_to_end_adds_up(make_app: MakeApp) -> None:
    """No alarm for tokens that do not add up, whatever cut the answer."""
    app = make_app()
    with TestClient(app) as client:
        word = ask(client, max_tokens=12)["choices"][0]["text"].split()[-1]
        for body in (
            {"stop": word},
            {"n": 2, "temperature": 1.0},
            {"ignore_eos": False, "max_tokens": 200},
            {"max_tokens": 1},
            {"prompt": [QUESTION, "a"], "stream": True},
            {"speculation": {"enabled": False}},
            {"prompt": "a " * 300, "max_tokens": 200},
        ):
            client.post("/v1/completions", json={**GREEDY, **body})
        assert data(client)["alarms"] == []


def test_alarms_are_metrics_log_lines_and_data(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    service: Service = app.state.service
    labels = json.dumps({"kind": "token_mismatch", "method": "", "task": ""}, sort_keys=True)
    with TestClient(app) as client:
        info = service.observer._info
        monkeypatch.setattr(service.observer, "_info", lambda job, output, num: info(job, output, num + 1))
        assert counters(client)["slipstream_alarm_raises_total" + labels] == 0
        for _ in range(2):
            ask(client)
        assert counters(client)["slipstream_alarm" + labels] == 1
        assert counters(client)["slipstream_alarm_raises_total" + labels] == 1
        [alarm] = data(client)["alarms"]
        assert alarm["kind"] == "token_mismatch"
        assert "41 tokens, but the engine counted 40" in alarm["message"]
        drift = json.dumps({"kind": "acceptance_drift", "method": "", "task": "none"}, sort_keys=True)
        assert counters(client)["slipstream_alarm_raises_total" + drift] == 0
        failure = {"kind": "drafter_failed", "method": "draft_model", "task": ""}
        assert counters(client)["slipstream_alarm_raises_total" + json.dumps(failure, sort_keys=True)] == 0

        which = {"kind": alarm["kind"], "task": None, "drafter": None}
        form = client.post(
            "/dashboard/acknowledge", content=json.dumps(which), headers={"Content-Type": "text/plain"}
        )
        assert form.status_code == 415  # what another site's page could send
        for wrong in ({**which, "kind": "none"}, {**which, "task": "sql"}):
            assert client.post("/dashboard/acknowledge", json=wrong).status_code == 404
        assert client.post("/dashboard/acknowledge", json=which).status_code == 200
        assert counters(client)["slipstream_alarm" + labels] == 0
        told = data(client)
        assert told["alarms"] == []
        assert told["cleared"][0]["why"] == "acknowledged"
    lines = [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == DASHBOARD]
    assert [line["message"].partition(":")[0] for line in lines] == ["alarm raised", "alarm cleared"]
    assert lines[0]["kind"] == "token_mismatch"


def test_passes_outside_a_graph_are_counters_and_an_alarm(
    make_app: MakeApp, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, engine = make_app(), drafting.engine
    service: Service = app.state.service
    stats, counts = engine.stats, {"target": PassCounts(7, {}), "draft": PassCounts(0, {"a tree": 1})}

    def series(name: str, **labels: str) -> float | None:
        return counters(client).get(f"slipstream_{name}" + json.dumps(labels, sort_keys=True))

    with TestClient(app) as client:
        assert not [name for name in counters(client) if "_passes" in name], "none are recorded"
        monkeypatch.setattr(engine, "stats", lambda: replace(stats(), passes=counts))
        client.portal.call(service.observer.read)  # type: ignore[union-attr]
        assert series("replayed_passes_total", model="target") == 7
        assert series("eager_passes_total", model="draft", reason="a tree") == 1
        raises = {"kind": "eager_passes", "method": "", "task": ""}
        assert series("alarm_raises_total", **raises) == 0
        counts["target"] = PassCounts(900, {"too many rows": 200})
        client.portal.call(service.observer.read)  # type: ignore[union-attr]
        assert series("replayed_passes_total", model="target") == 900
        assert series("eager_passes_total", model="target", reason="too many rows") == 200
        assert series("alarm_raises_total", **raises) == series("alarm", **raises) == 1
        [alarm] = data(client)["alarms"]
        assert "too many rows" in alarm["message"]


REPORT = ControlReport(
    adaptive=True,
    speculating=True,
    stands_back=True,
    estimated_speedup=1.4,
    realised=Speedup(1.3, 1.1, 1.5, 12),
    probe_share=0.02,
    methods=(
        MethodReport("eagle3", 0.5, (0.8, 0.5), 40, 3, False),
        MethodReport("suffix", None, (), 0, 0, True),
    ),
    tasks=(
        TaskReport("sql", "eagle3", 3.5, 0.5, 2.4, 0.3, 1.4, Speedup(1.2, 0.9, 1.6, 4)),
        TaskReport("", None, 0.0, None, None, None, None, None),
        TaskReport("late", "eagle3", 1.0, 0.1, 1.1, 0.3, 1.0, None),
    ),
    depth_by_batch=((1, 4.0),),
)


def test_the_controls_report_is_shown(
    make_app: MakeApp, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(max_task_labels=1)
    engine = drafting.engine
    monkeypatch.setattr(engine, "control_report", lambda: REPORT)
    with TestClient(app) as client:
        ask(client, task="sql")
        after = counters(client)
        told = data(client)
        monkeypatch.setattr(engine, "control_report", lambda: replace(REPORT, realised=None, tasks=()))
        gone = counters(client)

    def metric(name: str, **labels: str) -> float | None:
        return after.get(f"slipstream_{name}" + (json.dumps(labels, sort_keys=True) if labels else ""))

    assert metric("speculation_adaptive") == metric("speculation_active") == 1
    assert metric("speculation_stands_back") == 1
    assert told["speculation"]["stands_back"] is True
    assert metric("estimated_speedup") == 1.4
    assert [metric("realised_speedup" + end) for end in ("", "_low", "_high", "_pairs")] == [
        1.3,
        1.1,
        1.5,
        12,
    ]
    assert metric("probe_share") == 0.02
    assert metric("drafter_acceptance_rate", method="eagle3") == 0.5
    assert metric("drafter_acceptance_rate", method="suffix") is None
    assert metric("drafter_survival", method="eagle3", position="1") == 0.5
    assert metric("drafter_steps_total", method="eagle3") == 40
    assert metric("drafter_failures_total", method="eagle3") == 3
    assert metric("drafter_retired", method="suffix") == 1
    assert metric("task_draft_depth", task="sql") == 3.5
    assert metric("task_break_even", task="sql") == 0.3
    assert metric("task_realised_speedup_low", task="sql") == 0.9
    assert metric("task_method", task="none", method="off") == 1
    assert not any(
        "late" in name or '"task": "other"' in name for name in after if "task_draft_depth" in name
    )
    labels = json.dumps({"kind": "drafter_failed", "method": "suffix", "task": ""}, sort_keys=True)
    assert after["slipstream_alarm" + labels] == 1
    assert told["speculation"]["realised"] == {"ratio": 1.3, "low": 1.1, "high": 1.5, "num_pairs": 12}
    assert told["tasks"][0]["realised"]["num_pairs"] == 4
    assert told["tasks"][0]["method"] == "eagle3"
    assert [method["name"] for method in told["methods"]] == ["eagle3", "suffix"]
    assert {alarm["kind"] for alarm in told["alarms"]} == {AlarmKind.DRAFTER_FAILED}
    assert not [
        name for name in gone if name.startswith(("slipstream_realised", "slipstream_task_break_even"))
    ]


def test_a_drift_shows_at_its_task(make_app: MakeApp) -> None:
    app = make_app(max_task_labels=1)
    service: Service = app.state.service
    with TestClient(app) as client:
        ask(client, task="sql")
        ask(client, task="chat")
        watch = service.observer.alarms.acceptance("sql")
        assert watch is not None
        for number in range(300):
            watch.add(Value((number % 3) / 10 + (0.2 if number < 150 else 0.6)))
        told = {task["task"]: task["drift"] for task in data(client)["tasks"]}
    assert told["sql"]["state"] == "drifting"
    assert told["sql"]["usual"] == pytest.approx(0.3, abs=0.05)
    assert told["sql"]["level"] == pytest.approx(0.7, abs=0.05)
    assert told["other"] == {"state": "unwatched"}


def test_a_step_that_takes_long_does_not_stop_the_page(
    make_app: MakeApp, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.serve.dashboard.dashboard.READ_TIMEOUT_S", 0.05)
    with TestClient(make_app()) as client:
        ask(client)
        before = data(client)
        begun, done = threading.Event(), threading.Event()
        monkeypatch.setattr(
            drafting.engine, "control_report", lambda: (begun.set(), done.wait(120), REPORT)[-1]
        )
        data(client)  # asks the engine, which takes long to answer
        assert begun.wait(120)
        time.sleep(0.1)
        told = data(client)
        done.set()
    assert told["num_steps"] == before["num_steps"]
    assert told["age_s"] >= 0.1


def test_a_stopped_engine_still_shows_what_was(make_app: MakeApp) -> None:
    app = make_app()
    with TestClient(app) as client:
        ask(client)
        before = data(client)
        app.state.service.engine.close()
        told = data(client)
    assert told["has_stopped"]
    assert not told["is_ready"]
    assert told["num_steps"] == before["num_steps"] > 0


@pytest.mark.parametrize("tree", [{}, {"tree_top_k": 3}], ids=["chain", "tree"])
def test_history_counts_positions_as_requests_do(tree: dict[str, int]) -> None:
    llm = LLM(speculative_config={**DRAFT, **tree}, kv_cache_bytes=40 * 2**20, max_num_seqs=4)
    history = History(lambda name: name or "none")
    llm.engine.on_step = history.on_step
    llm.engine.on_observe = lambda items: history.on_rows(decoded_rows(items, attrgetter("task")))
    prompts = [prompt["messages"][:1] for prompt in sample_prompts()[:14]]
    outputs = llm.chat(prompts, SamplingParams(temperature=0.8, max_tokens=40, seed=3))
    assert any(output.outputs[0].from_draft[-1] for output in outputs), "a stop among accepted tokens"
    metrics = RequestMetrics.merged([output.metrics for output in outputs])
    told = history.snapshot().as_json()
    assert told["reached"] == metrics.reached_per_position
    assert told["accepted"] == metrics.accepted_per_position
    [(method, (reached, _))] = history.positions.items()
    assert (method, reached[: len(told["reached"])]) == ("draft_model", told["reached"])
    [counted] = told["tasks"].values()
    assert counted == [
        metrics.num_steps,
        metrics.num_output_tokens,
        metrics.num_draft_tokens,
        metrics.num_accepted_tokens,
        sum(metrics.reached_per_position),
    ]
    assert max(told["batches"]) == 4


HALF_FULL = EngineStats(
    num_running=2,
    num_waiting=1,
    num_slots=8,
    num_held_slots=4,
    num_retained_slots=1,
    cache_bytes=64,
    num_preemptions=0,
    num_drafted_sequences=2,
    num_draft_failures=0,
    retired_drafters=(),
)


def test_a_snapshot_stays_as_it_was() -> None:
    """It is read in another thread than the one that goes on counting."""
    history = History(str, lambda: 1000.0)
    seen = [DecodedRow("", "", "draft_model", 3, 3, 3, 2, 3)]
    history.on_rows(seen)
    snapshot = history.snapshot()
    before = snapshot.as_json()
    assert before["reached"] == [1, 1, 1]
    assert before["accepted"] == [1, 1]
    history.on_rows(seen)
    history.sample(HALF_FULL)
    assert snapshot.as_json() == before
    assert history.snapshot().as_json() != before


def test_history_is_bounded_and_has_gaps() -> None:
    now = 1000.0
    history = History(str, lambda: now)
    for _ in range(3 * NUM_BUCKETS):
        history.sample(HALF_FULL)
        now += BUCKET_S
    assert len(history.snapshot().buckets) == NUM_BUCKETS
    now += 10 * BUCKET_S
    told = history.snapshot().as_json()
    assert told["num_running"] == [2] * (NUM_BUCKETS - 10) + [0] * 10
    assert told["num_waiting"] == [1] * (NUM_BUCKETS - 10) + [0] * 10
    assert told["kv_usage"] == [0.5] * (NUM_BUCKETS - 10) + [0.0] * 10
    now += NUM_BUCKETS * BUCKET_S
    assert history.snapshot().as_json()["num_running"] == []
