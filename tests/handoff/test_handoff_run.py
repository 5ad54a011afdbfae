"""A hand-off to a fake vLLM from start to end: figures, alarms, off sides, death, keys, and the command line."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from handoff_cases import fake_command, free_port, is_alive, running, serve_command
from typer.testing import CliRunner

from slipstream.assets.workload.prompts import Prompt
from slipstream.cli.main import app
from slipstream.errors import RemoteError
from slipstream.serve.network.listening import bind
from slipstream.tools.handoff.pairs import ProbePrompts
from slipstream.tools.handoff.plan import HandoffPlan, OffSide
from slipstream.tools.handoff.reading import parse_reading
from slipstream.tools.handoff.run import Handoff
from tests.kit.fake_http import QuietHandler
from tests.kit.fake_http import served as other_server

RECORDED = Path(__file__).parent / "vllm_metrics.txt"
"""`/metrics` of vLLM 0.32 on a CPU after four answers of the embedded pair, without help and times of creation."""
PROMPTS = ProbePrompts([Prompt("task", f"prompt {number}", 24, f"text {number}", ()) for number in range(5)])


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fake_command(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(autouse=True)
def quick_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("watch", "history"):
        monkeypatch.setattr(f"slipstream.tools.handoff.{module}.READ_EVERY_S", 0.05)


@contextmanager
def served(plan: HandoffPlan) -> Iterator[tuple[str, Handoff, list[Exception]]]:
    """(the watch's address, the hand-off, what `serve` raised) while it runs; all is stopped afterwards."""
    handoff, bound, raised = Handoff(plan), bind("127.0.0.1", 0), list[Exception]()

    def serve() -> None:
        try:
            handoff.serve(bound)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    try:
        handoff.start()
        thread.start()
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        until(lambda: answers(f"{address}/metrics"))
        yield address, handoff, raised
    finally:
        handoff.end()
        if thread.ident is not None:
            thread.join(timeout=120)
        handoff.stop()
        bound.close()


def plan_of(vllm: str, port: int, *extra: str, **options: Any) -> HandoffPlan:
    return HandoffPlan(
        url=f"http://127.0.0.1:{port}",
        method="ngram",
        command=serve_command(vllm, port, *extra),
        **options,
    )


def ask(port: int, num: int, max_tokens: int = 24) -> None:
    for _ in range(num):
        answer = httpx2.post(
            f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a", "max_tokens": max_tokens}
        )
        answer.raise_for_status()


def until(look: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """What `look` returns once it is true."""
    end_s = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.05)
    return found


def answers(url: str) -> bool:
    """True where the server is up and well."""
    try:
        return httpx2.get(url).status_code == 200
    except httpx2.HTTPError:
        return False


def data(address: str) -> dict[str, Any]:
    told: dict[str, Any] = httpx2.get(f"{address}/dashboard/data").json()
    return told


def test_a_recorded_reading_of_the_real_one() -> None:
    reading = parse_reading(RECORDED.read_text())
    counts = reading.counts
    assert reading.model == "embedded-pair"
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (57, 228, 132)
    assert counts.accepted_at == (44, 33, 30, 25)
    assert counts.reached_at == (57, 44, 33, 30)
    assert (counts.num_output_tokens, counts.num_prompt_tokens, counts.num_steps) == (192, 43, 61)
    assert (counts.num_cut, counts.num_ended) == (4, 4)
    assert counts.acceptance_length == pytest.approx(1 + 132 / 57)
    assert {name: found.num for name, found in reading.latencies.items()} == {
        "first token": 4,
        "between tokens": 57,
        "answer": 4,
        "queue": 4,
    }


def test_figures_of_an_attached_server(vllm: str) -> None:
    port = free_port()
    with running(serve_command(vllm, port), port) as process:
        plan = HandoffPlan(url=f"http://127.0.0.1:{port}", method="vLLM's own")
        with served(plan) as (address, _, raised):
            until(lambda: data(address)["num_steps"] == 0)
            ask(port, 6)
            told = until(
                lambda: (now := data(address))["tasks"] and now["tasks"][0]["num_tokens"] == 144 and now
            )
            metrics = httpx2.get(f"{address}/metrics").text
            assert httpx2.get(f"{address}/health").status_code == 200
            assert "dashboard" in httpx2.get(f"{address}/dashboard").text
            acknowledge = {"kind": "truncation", "task": "all"}
            assert httpx2.post(f"{address}/dashboard/acknowledge", json=acknowledge).status_code == 404
        assert raised == []
        assert process.exit_code is None, "what was attached to is left alone"
    assert (told["model"], told["api_url"]) == ("some/model", f"http://127.0.0.1:{port}")
    [task] = told["tasks"]
    assert (told["state"], told["recent"], told["draft_s"], told["batches"]) == (None, None, None, None)
    counts = parse_reading(metrics.replace("slipstream_", "vllm:")).counts
    assert task["num_accepted"] == counts.num_accepted_tokens == sum(told["accepted"])
    assert task["num_reached"] == sum(told["reached"]) == counts.num_drafts + sum(told["accepted"][:-1])
    assert told["latency"]["answer"]["num"] == 6
    assert told["speculation"] is None
    assert "There is no off side" in told["notes"][-1]
    assert 'slipstream_server_reachable{model_name="some/model"} 1.0' in metrics
    [reached] = [
        line for line in metrics.splitlines() if "conditional_reached" in line and 'position="0"' in line
    ]
    assert float(reached.split()[-1]) == counts.num_drafts


def test_paired_probes_of_a_second_instance(vllm: str) -> None:
    port, other = free_port(), free_port()
    plan = plan_of(
        vllm,
        port,
        *("--step-s", "0.004", "--fake-acceptance", "1.0"),
        off_side=OffSide.INSTANCE,
        off_command=serve_command(vllm, other, "--step-s", "0.004", speculates=False),
        off_url=f"http://127.0.0.1:{other}",
        probes=PROMPTS,
        probe_every_s=0.05,
    )
    with served(plan) as (address, handoff, raised):
        assert len(handoff.pids) == 2
        pids = handoff.pids

        def realised() -> Any:
            speculation = data(address)["speculation"]
            return speculation["realised"] if speculation["realised"] else None

        found = until(realised)
        assert found["num_pairs"] >= 3
        assert found["ratio"] > 0, "how it follows from the pairs: test_handoff_pairs.py"
        assert "a second instance without speculation" in data(address)["notes"][-1]
        assert "slipstream_realised_speedup_pairs" in httpx2.get(f"{address}/metrics").text
    assert raised == []
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.long
def test_a_canary_restarts_the_one_server(vllm: str) -> None:
    port = free_port()
    plan = plan_of(
        vllm,
        port,
        *("--step-s", "0.002", "--fake-acceptance", "1.0"),
        off_side=OffSide.CANARY,
        off_command=serve_command(vllm, port, "--step-s", "0.002", speculates=False),
        probes=PROMPTS,
        canary_pairs=3,
        canary_every_s=0.5,
    )
    with served(plan) as (address, _, raised):

        def realised() -> Any:
            return data(address)["speculation"]["realised"]

        assert realised()["num_pairs"] >= 3, "before any traffic"
        assert realised()["ratio"] > 0
        until(lambda: httpx2.get(f"{address}/health").status_code == 503)
        until(lambda: realised()["num_pairs"] >= 6)
        assert data(address)["alarms"] == [], "a restart of ours is no fault"
    assert raised == []


def test_a_server_that_dies_ends_the_watch(vllm: str) -> None:
    port = free_port()
    with served(plan_of(vllm, port)) as (_, _, raised):
        with pytest.raises(httpx2.HTTPError):
            httpx2.post(f"http://127.0.0.1:{port}/fake", json={"die": True})
        [error] = until(lambda: raised)
        assert isinstance(error, RemoteError)
        assert "ended with exit code 3 while it served" in str(error)
        assert "RuntimeError: the fake was told to die" in str(error)


def test_a_fault_of_the_watch_is_shown_and_does_not_stop_the_server(
    vllm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(watch: Any, interval: Any) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr("slipstream.tools.handoff.watch.Watch.on_interval", fail)
    port = free_port()
    with served(plan_of(vllm, port)) as (address, _, raised):
        until(lambda: httpx2.get(f"{address}/health").status_code == 503)
        assert "a part of the watch has ended" in data(address)["state"]
        assert httpx2.get(f"{plan_url(port)}/health").status_code == 200
    assert raised == []


def test_a_key_guards_model_and_data(vllm: str) -> None:
    port = free_port()
    with served(plan_of(vllm, port, api_key="secret")) as (address, _, _):
        headers = {"Authorization": "Bearer secret"}
        for path, status in (("/dashboard", 200), ("/dashboard/data", 401), ("/metrics", 200)):
            assert httpx2.get(address + path).status_code == status
        assert httpx2.get(f"{address}/dashboard/data", headers=headers).status_code == 200
        body = {"prompt": "a", "max_tokens": 4}
        assert httpx2.post(f"{plan_url(port)}/v1/completions", json=body).status_code == 401
        assert httpx2.post(f"{plan_url(port)}/v1/completions", json=body, headers=headers).status_code == 200


def plan_url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


# --- the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def quiet_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own logging stays."""
    monkeypatch.setattr("slipstream.serve.logs.configure", lambda config: None)


def handoff(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["handoff", "vllm", *words])
    return done.exit_code, done.stderr


def test_the_command_runs_until_ctrl_c_and_leaves_nothing(vllm: str, quiet_logs: None) -> None:
    port, watch = free_port(), free_port()
    seen: dict[str, Any] = {}

    def interrupt() -> None:
        until(lambda: answers(f"http://127.0.0.1:{watch}/health"))
        seen.update(data(f"http://127.0.0.1:{watch}"))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    words = ["some/model", "--vllm", vllm, "--spec", "ngram", "--num-speculative-tokens", "3", "--json"]
    ports = ["--port", str(port), "--watch-port", str(watch)]
    done = CliRunner().invoke(app, ["handoff", "vllm", *words, *ports, "--", "--step-s", "0.001"])
    thread.join()
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["url"], told["model"], told["method"]) == (plan_url(port), "some/model", "ngram")
    assert told["command"][-2:] == ["--step-s", "0.001"]
    config = json.loads(told["command"][told["command"].index("--speculative-config") + 1])
    assert (config["method"], config["num_speculative_tokens"]) == ("ngram", 3)
    assert seen["method"] == "ngram"
    assert not any(is_alive(pid) for pid in told["pids"])


class _NoVllm(QuietHandler):
    def do_GET(self) -> None:
        self.send(200, "# TYPE http_requests counter\nhttp_requests_total 3\n", "text/plain")


def test_bad_input_is_one_line_before_any_work(
    vllm: str, quiet_logs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    port = str(free_port())
    started = ("m/m", "--vllm", vllm, "--port", port)
    with other_server(_NoVllm) as elsewhere, bind("127.0.0.1", 0) as used:
        used.listen()
        taken = str(used.getsockname()[1])
        cases = [
            (("m/m", "--spec", "ngram"), "there is no vllm on the PATH"),
            (("m/m", "--vllm", vllm, "--port", taken), f"cannot listen on 127.0.0.1:{taken}"),
            ((*started, "--spec", "ngram", "--watch-port", taken), f"cannot listen on 127.0.0.1:{taken}"),
            (
                ("--attach", f"http://127.0.0.1:{free_port()}", "--watch-port", "0"),
                "error: cannot reach http",
            ),
            (("--attach", elsewhere, "--watch-port", "0"), "so it is no vLLM"),
            (("--attach", "localhost:8000"), "is no address of a server"),
            (("m/m", "--attach", elsewhere), "omit MODEL"),
            (("--attach", elsewhere, "--", "--dtype", "float32"), "omit flags behind --"),
            (("--attach", elsewhere, "--off-side", "canary"), "--off-side canary restarts vLLM"),
            (("--attach", elsewhere, "--off-side", "instance"), "give it with --off-url"),
            ((*started, "--off-side", "both"), "unknown --off-side 'both'"),
            ((*started, "--off-url", elsewhere), "--off-url is the second server of --off-side instance"),
            ((*started, "--off-side", "canary"), "without speculation there is nothing to compare"),
            ((*started, "--off-env", "CUDA"), "--off-env takes NAME=VALUE"),
            ((*started, "--", "--port", "1"), "--port behind the -- is written by handoff itself"),
            ((*started, "stray"), "'stray' is no flag"),
            ((*started, "--spec", "lookahead"), "vLLM"),
            ((*started, "--api-key-env", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE"),
        ]
        for words, message in cases:
            code, text = handoff(*words)
            assert code == 2, (words, text)
            assert message in text, (words, text)
            assert text.startswith("error: ")
            assert len(text.splitlines()) == 1


def test_a_death_at_the_start_is_told_with_its_lines(vllm: str, quiet_logs: None) -> None:
    words = ("m/m", "--vllm", vllm, "--port", str(free_port()), "--watch-port", "0", "--spec", "ngram")
    code, text = handoff(*words, "--", "--fake-error", "ValueError: the fake has no memory left")
    assert code == 2
    lines = text.splitlines()
    assert lines[-3:-1] == ["  INFO loading m/m", "  ValueError: the fake has no memory left"]
    assert lines[-1].startswith(
        "error: vLLM ended with exit code 1 before it was ready; its last line: ValueError"
    )
