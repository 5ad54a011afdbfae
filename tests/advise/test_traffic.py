"""Traffic as users have it, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import RequestError
from slipstream.tools.advise.job import make_jobs
from slipstream.tools.advise.traffic import read_traffic
from tests.kit.tape import Tape

ANSWERED = {
    "time": "2026-11-23T10:00:02.000Z",
    "level": "info",
    "logger": "slipstream.serve.access",
    "message": "request",
    "path": "/v1/chat/completions",
    "status": 200,
    "duration_ms": 1500.0,
    "prompt_tokens": 12,
    "output_tokens": 30,
    "task": "sql",
}
OTHER = {**ANSWERED, "task": "a task without prompts"}


def lines(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return file


def test_the_sample_by_default() -> None:
    found = read_traffic(None, None, None)
    assert {question.task for question in found.workload.questions} >= {"sql", "chat"}
    assert found.shares == {}
    assert found.trace == ()


def test_a_trace_in_the_order_of_arrival(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 12.5, "prompt": "second", "task": "b", "output_tokens": 9},
        {"arrival_s": 10, "prompt": "first", "task": "a"},
    ]
    found = read_traffic(None, lines(tmp_path / "trace.jsonl", rows), None)
    assert [(one.arrival_s, one.task) for one in found.trace] == [(0.0, "a"), (2.5, "b")]
    assert [question.text for question in found.workload.questions] == ["first", "second"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"arrival_s": 1, "prompt": "alone"}], "has 1 request; a trace needs at least 2"),
        ([{"prompt": "a"}, {"prompt": "b"}], "line 1 needs arrival_s"),
        ([{"arrival_s": "soon", "prompt": "a"}], "got 'soon'"),
        ([{"timestamp": 1000, "prompt": "a"}], "needs arrival_s, the seconds"),
        ([], "has no prompts"),
        (["not JSON\n"], "not valid JSON"),
        ([{"arrival_s": 1, "prompt": " "}], "not empty"),
    ],
)
def test_traces_that_are_none(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_traffic(None, lines(tmp_path / "trace.jsonl", rows), None)


def test_a_log_without_texts_needs_prompts(tmp_path: Path) -> None:
    log = lines(tmp_path / "server.log", ["a line of another program\n", ANSWERED, ANSWERED])
    with pytest.raises(RequestError, match=r"without --log-prompts.*--workload"):
        read_traffic(None, None, log)
    found = read_traffic("sample", None, log)
    assert [one.task for one in found.trace] == ["sql", "sql"]
    assert found.shares == {"sql": 1.0}
    assert "texts and lengths are those of sample" in found.notes[0]


def test_a_log_says_when_requests_came(tmp_path: Path) -> None:
    later = {**ANSWERED, "time": "2026-11-23T10:00:04.000Z", "duration_ms": 500.0, "asked": "How many?"}
    chat = {**ANSWERED, "asked": [{"role": "user", "content": "Which?"}]}
    found = read_traffic(None, None, lines(tmp_path / "server.log", [later, chat]))
    assert [one.arrival_s for one in found.trace] == [0.0, 3.0]
    assert {question.text for question in found.workload.questions} == {"How many?", None}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no answered requests"),
        ([{"message": "started"}], "no answered requests"),
        ([ANSWERED], "at least 2"),
        ([{**ANSWERED, "time": "yesterday"}, ANSWERED], "without time"),
        ([{**ANSWERED, "duration_ms": float("nan")}, ANSWERED], "of use"),
        ([{**ANSWERED, "output_tokens": "many"}, ANSWERED], "of use"),
    ],
)
def test_logs_that_are_none(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_traffic("sample", None, lines(tmp_path / "server.log", rows))


def test_one_source_of_arrivals(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="give one of them"):
        read_traffic(None, tmp_path / "a.jsonl", tmp_path / "b.log")
    with pytest.raises(RequestError, match="omit --workload"):
        read_traffic("sample", tmp_path / "a.jsonl", None)
    with pytest.raises(RequestError, match="there is no file"):
        read_traffic(None, tmp_path / "a.jsonl", None)
    with pytest.raises(RequestError, match=r"must be a \.jsonl file"):
        read_traffic(None, tmp_path / "a.csv", None)


def test_tasks_of_a_trace_keep_their_shares(tape: Tape, tmp_path: Path) -> None:
    """What is best for all tasks together is decided by the traffic's own mixture."""
    log = lines(tmp_path / "server.log", [ANSWERED] * 7 + [{**ANSWERED, "task": "chat"}] * 2 + [OTHER])
    prompts = [{"prompt": f"Say {n}.", "task": task} for task in ("chat", "sql", "none") for n in range(9)]
    found = read_traffic(str(lines(tmp_path / "prompts.jsonl", prompts)), None, log)
    jobs = make_jobs(replace(tape.job, requests=found, prompts_per_task=4), tape.engine)
    assert Counter(job.task for job in jobs) == {"sql": 6, "chat": 2}
    every = make_jobs(replace(tape.job, requests=found, prompts_per_task=None), tape.engine)
    assert len(every) == 27
