"""A small soak: a server process, many clients, every answer compared. And the comparison itself can see."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.soak.cases import Answered, Case, Rules, lone_engine, make_cases
from benchmarks.soak.client import Choice, Received, shape_fault
from benchmarks.soak.comparison import difference, prefix_fault
from benchmarks.soak.ledger import memory, samples
from benchmarks.soak.run import Plan, soak
from slipstream.serve.config import ServeConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a module of the checkout, run in a process of its own."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


@pytest.mark.long
@pytest.mark.usefixtures("from_the_root")
def test_a_small_soak() -> None:
    result = soak(Plan(num_requests=150, num_clients=16, num_cases=40, max_tokens=12))
    unmet = {name: demand for name, demand in result["checks"].items() if not demand["met"]}
    assert unmet == {}, (result["lost"], result["wrong"], result["misshapen"])
    assert result["passed"]
    assert sum(result["delivered"].values()) == 150
    assert set(result["delivered"]) == {
        "streamed",
        "whole",
        "leave a stream",
        "leave while waiting",
        "refused",
    }
    assert result["checks"]["tokens as counted"]["server"] > 500


def test_clients_close_idle_connections_first() -> None:
    """A request that is sent while the server closes is lost; proxies keep connections for 60 seconds."""
    assert ServeConfig().idle_timeout_s > 60


@pytest.fixture(scope="module")
def expected() -> Answered:
    return make_cases(1, 4, lone_engine(), Rules(max_tokens=12, max_model_len=400, with_schemas=False))[0]


def answer_of(expected: Answered) -> Received:
    choices = defaultdict(Choice)
    for index, answer in enumerate(expected.answers):
        logprobs = [entry.logprob for entry in answer.token_logprobs or []]
        choices[index] = Choice(answer.text, list(answer.token_ids), logprobs, str(answer.finish_reason))
    prompt, output = expected.case.num_prompt_tokens, expected.num_output_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return Received(status=200, choices=choices, usage=usage, complete=True)


def test_the_right_answer_is_right(expected: Answered) -> None:
    assert difference(expected, answer_of(expected), with_token_ids=True) is None


@pytest.mark.parametrize("what", ["text", "tokens", "end", "usage", "choices", "logprobs"])
def test_what_is_wrong_is_seen(expected: Answered, what: str) -> None:
    received = answer_of(expected)
    choice = received.choices[0]
    assert received.usage is not None
    if what == "text":
        choice.text += "x"
    elif what == "tokens":
        choice.token_ids[0] += 1
    elif what == "end":
        choice.finish_reason = "abort"
    elif what == "usage":
        received.usage["completion_tokens"] += 1
    elif what == "choices":
        received.choices[len(expected.answers)] = Choice()
    else:
        choice.logprobs.append(-1.0)
    assert difference(expected, received, with_token_ids=True) is not None


def test_a_broken_stream_must_be_a_beginning(expected: Answered) -> None:
    received = answer_of(expected)
    choice = received.choices[0]
    choice.token_ids, choice.text = choice.token_ids[:1], choice.text[:1]
    assert prefix_fault(expected, received) is None
    choice.token_ids = [choice.token_ids[0] + 1]
    assert prefix_fault(expected, received) is not None


def test_the_shape_of_errors_is_read() -> None:
    good = b'{"error": {"message": "m", "type": "t", "param": null, "code": "c"}}'
    assert shape_fault(good) is None
    for bad in (b"{}", b"no", good.replace(b'"param": null, ', b""), good.replace(b'"m"', b'""')):
        assert shape_fault(bad) is not None


def test_memory_that_grows_is_seen() -> None:
    idle = {"num_objects": 10**6, "num_blocks": 10**6, "malloc_bytes": 10**8, "rss_bytes": 5 * 10**8}
    assert memory(idle, idle, 100)["met"]
    for name in idle:
        assert not memory(idle, idle | {name: 2 * idle[name]}, 100)["met"], name


def test_samples_are_named_by_their_labels() -> None:
    text = '# TYPE slipstream_a counter\nslipstream_a_total{model_name="m",task="x",method="y"} 3\n'
    assert samples(text) == {"a_total,method=y,task=x": 3}


def test_cases_are_the_seeds() -> None:
    llm = lone_engine()
    rules = Rules(max_tokens=4, max_model_len=400, with_schemas=True)
    first, second = (make_cases(25, 11, llm, rules) for _ in range(2))
    assert [answered.case for answered in first] == [answered.case for answered in second]
    bodies: list[Case] = [answered.case for answered in first]
    assert any("response_format" in case.body for case in bodies)
    assert {case.path for case in bodies} == {"chat/completions", "completions"}
