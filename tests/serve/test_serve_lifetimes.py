"""Requests that end early, wait, time out or are drained: nothing goes on running or is held, and no client waits."""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx2
import pytest
from serve_cases import MODEL, QUESTION, JumpingLoop, MakeApp, running, wait_until
from starlette.testclient import TestClient

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.engine.engine import Engine
from slipstream.serve.api import stream as streams
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.lifecycle import DrainingServer

LONG = {"model": MODEL, "prompt": QUESTION, "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def slow(drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes every step of the engine last longer."""

    def make(seconds: float) -> None:
        step = drafting.engine.step

        def slow_step() -> Any:
            time.sleep(seconds)
            return step()

        monkeypatch.setattr(drafting.engine, "step", slow_step)

    return make


@pytest.fixture
def held(drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Steps begin, which sets the first event, and wait for the second one."""
    begun, may_go_on = threading.Event(), threading.Event()
    step = drafting.engine.step

    def held_step() -> Any:
        begun.set()
        assert may_go_on.wait(120)
        return step()

    monkeypatch.setattr(drafting.engine, "step", held_step)
    yield begun, may_go_on
    may_go_on.set()


def is_idle(engine: Engine) -> bool:
    """Nothing runs and no slot of the cache is held."""
    return not engine.has_unfinished and engine.stats().num_held_slots == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_request_at_once(
    make_app: MakeApp, drafting: LLM, slow: Callable[[float], None], stream: bool
) -> None:
    slow(0.2)  # the whole answer would take a minute or more with speculation
    app = make_app()
    with running(app) as (url, _):
        with _abandoned(url, stream):
            wait_until(lambda: drafting.engine.has_unfinished)
        wait_until(lambda: is_idle(drafting.engine))
        assert app.state.service.admission.num_answers == 0
        text = httpx2.get(f"{url}/metrics").text
        assert f'request_success_total{{finished_reason="abort",model_name="{MODEL}"}} 2.0' in text


def test_a_client_that_does_not_read_holds_its_places_no_longer_than_one_that_waits(
    make_app: MakeApp,
    drafting: LLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(streams, "LAST_WRITES_S", 0.2)
    monkeypatch.setattr("slipstream.serve.network.connection.NOT_READ_S", 1e6)
    event, written = streams.event, threading.Event()

    def large(payload: dict[str, Any], name: str | None) -> bytes:
        written.set()
        return event(payload | {"more_than_buffers_hold": "x" * 2**20}, name)

    monkeypatch.setattr(streams, "event", large)
    app, loop = make_app(request_timeout_s=3000.0), JumpingLoop()
    with caplog.at_level(logging.INFO), running(app, send_buffer=4096, loop=loop) as (url, _):
        with closing(_asking(url, {**LONG, "n": 4, "stream": True}, receive_buffer=4096)):
            assert written.wait(120)
            assert app.state.service.admission.num_answers == 4
            loop.jump(3001.0)
            wait_until(lambda: app.state.service.admission.num_answers == 0)
            wait_until(lambda: "client_does_not_read" in _last_fields(caplog))
            wait_until(lambda: is_idle(drafting.engine))
        assert httpx2.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200


def _last_fields(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """What the log says of the request that ended last."""
    ended = [record for record in caplog.records if record.name == "slipstream.serve.access"]
    fields: dict[str, Any] = vars(ended[-1])["fields"] if ended else {}
    return fields


def _asking(url: str, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A connection on which a request has been sent; of its response the client holds `receive_buffer` bytes."""
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((host, int(port)))
    connection.sendall(head.encode() + raw)
    return connection


def _abandoned(url: str, stream: bool) -> closing[socket.socket]:
    """A request on a socket that is closed in the middle of its stream, or before its answer has come."""
    connection = _asking(url, {**LONG, "n": 2, "stream": stream})
    if stream:
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
    return closing(connection)


def test_a_full_queue_is_refused_and_leaves_no_state(
    make_app: MakeApp, held: tuple[threading.Event, threading.Event]
) -> None:
    app = make_app(max_waiting=1)  # beside the four that run
    with running(app) as (url, _), ThreadPoolExecutor(8) as pool:
        body = {**LONG, "max_tokens": 150}
        jobs = [pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=120) for _ in range(8)]
        wait_until(lambda: sum(job.done() for job in jobs) == 3)
        held[1].set()
        answers = [job.result() for job in jobs]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 3
        for answer in refused:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert answer.json()["error"]["code"] == "queue_full"
        assert httpx2.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200


def test_a_request_that_takes_too_long(
    make_app: MakeApp, drafting: LLM, slow: Callable[[float], None]
) -> None:
    slow(0.2)
    app, loop = make_app(), JumpingLoop()
    with running(app, loop=loop) as (url, _), ThreadPoolExecutor(1) as pool:
        whole = pool.submit(httpx2.post, f"{url}/v1/completions", json=LONG, timeout=120)
        wait_until(lambda: drafting.engine.has_unfinished)
        loop.jump(601.0)
        assert whole.result().status_code == 504
        assert whole.result().json()["error"]["code"] == "timeout"
        wait_until(lambda: is_idle(drafting.engine))
        body = {**LONG, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            loop.jump(601.0)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout", "and not [DONE]"
        wait_until(lambda: is_idle(drafting.engine))
        text = httpx2.get(f"{url}/metrics", timeout=120).text
        assert f'request_success_total{{finished_reason="abort",model_name="{MODEL}"}} 2.0' in text


def test_a_stream_that_has_not_begun_fails_with_a_status(
    make_app: MakeApp, held: tuple[threading.Event, threading.Event]
) -> None:
    with TestClient(make_app(request_timeout_s=0.1)) as client:
        late = client.post("/v1/completions", json={**LONG, "stream": True})
        assert late.status_code == 504
        assert late.headers["content-type"] == "application/json"
        held[1].set()


def test_an_engine_that_fails_is_unhealthy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LLM(kv_cache_bytes=32 * 2**20)  # it is broken for good

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(own.engine.runner, "launch", fail)
    with TestClient(create_app(AsyncEngine(engine=own.engine), ServeConfig(), MODEL)) as client:
        assert client.get("/health").status_code == 200
        for stream in (True, False):
            answer = client.post("/v1/completions", json={**LONG, "stream": stream})
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "server_error"
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 503
        assert client.get("/metrics").status_code == 200


def test_drain_finishes_what_runs_and_takes_nothing_new(
    make_app: MakeApp, slow: Callable[[float], None]
) -> None:
    slow(0.01)
    app = make_app(grace_period_s=240)
    with running(app) as (url, server), ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            httpx2.post,
            f"{url}/v1/completions",
            json={**LONG, "max_tokens": 200, "stream": True},
            timeout=120,
        )
        wait_until(lambda: app.state.service.admission.num_answers == 1)
        assert httpx2.get(f"{url}/ready").status_code == 200
        server.handle_exit(signal.SIGTERM, None)
        assert httpx2.get(f"{url}/ready").status_code == 503
        assert httpx2.get(f"{url}/health").status_code == 200
        late = httpx2.post(f"{url}/v1/completions", json=LONG)
        assert late.status_code == 503
        assert "shutting down" in late.json()["error"]["message"]
        assert "retry-after" in late.headers
        answer = job.result()
        assert answer.text.endswith("data: [DONE]\n\n")
        wait_until(lambda: _refuses(url))


def test_drain_breaks_off_what_does_not_end(make_app: MakeApp, slow: Callable[[float], None]) -> None:
    slow(0.2)  # the answers would take a minute or more
    app = make_app(grace_period_s=0.3)
    with running(app) as (url, server), ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(httpx2.post, f"{url}/v1/completions", json={**LONG, "stream": stream}, timeout=120)
            for stream in (True, False)
        ]
        wait_until(lambda: app.state.service.admission.num_answers == 2)
        server.handle_exit(signal.SIGTERM, None)
        streamed, whole = (job.result() for job in jobs)
        last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "unavailable"
        assert whole.status_code == 503
        wait_until(lambda: _refuses(url))


def _refuses(url: str) -> bool:
    try:
        httpx2.get(f"{url}/health", timeout=1)
    except httpx2.HTTPError:
        return True
    return False


def test_the_event_loop_never_waits_for_the_engine(
    make_app: MakeApp, held: tuple[threading.Event, threading.Event]
) -> None:
    begun, may_go_on = held
    with running(make_app()) as (url, _), ThreadPoolExecutor(1) as pool:
        job = pool.submit(httpx2.post, f"{url}/v1/completions", json={**LONG, "max_tokens": 4}, timeout=120)
        assert begun.wait(120)
        for _ in range(3):
            assert httpx2.get(f"{url}/health", timeout=60).status_code == 200
        assert not job.done(), "the engine is in the middle of a step"
        may_go_on.set()
        assert job.result().status_code == 200


def test_many_clients_at_once_each_get_their_own_text(make_app: MakeApp, plain: LLM) -> None:
    prompts = [f"SELECT column{number} FROM" for number in range(12)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    expected = [output.outputs[0].text for output in plain.generate(prompts, params)]
    with running(make_app()) as (url, _), ThreadPoolExecutor(12) as pool:

        def ask(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            text: str = httpx2.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0][
                "text"
            ]
            return text

        assert list(pool.map(ask, prompts)) == expected


def test_who_reads_that_it_listens_can_connect(make_app: MakeApp) -> None:
    """The socket is bound before, and refuses connections until the server has started."""
    refused: list[int] = []
    lines: list[str] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            if lines[-1] == "listening":
                with socket.socket() as client:
                    refused.append(client.connect_ex(bound.getsockname()))

    logger = logging.getLogger("slipstream.serve.lifecycle")
    reader, level = Reader(), logger.level
    logger.addHandler(reader)
    logger.setLevel(logging.INFO)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = DrainingServer(make_app())
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        try:
            wait_until(lambda: len(lines) == 3)
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(120)
            logger.removeHandler(reader)
            logger.setLevel(level)
    assert refused == [0]
    assert lines == ["listening", f"API: {url}/v1", f"dashboard: {url}/dashboard"]
