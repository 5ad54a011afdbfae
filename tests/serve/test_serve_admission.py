"""A request costs next to nothing before it is admitted: slow, huge and too many clients delay no other."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError
from serve_cases import MESSAGES, MODEL, MakeApp, running, wait_until
from starlette.testclient import TestClient

from slipstream.serve.api.errors import ApiError
from slipstream.serve.api.schema import ChatBody, CompletionBody
from slipstream.serve.api.tokens import Tokens
from slipstream.serve.limits import Admission
from slipstream.serve.sized_threads import BOUNDS, size_of

JSON = {"Content-Type": "application/json"}
TEXT = {"model": MODEL, "prompt": "Once", "max_tokens": 2}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds up the tokenizer until it is set."""
    event = threading.Event()
    encode = Tokens._encode

    def waiting(self: Tokens, text: str, add_special_tokens: bool) -> list[int]:
        assert event.wait(120)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokens, "_encode", waiting)
    return event


def test_a_request_has_its_place_before_it_is_read_into_tokens(
    make_app: MakeApp, gate: threading.Event
) -> None:
    app = make_app(max_waiting=1)  # beside the four that run
    with running(app) as (url, _), ThreadPoolExecutor(2) as pool:
        body = {**TEXT, "prompt": ["One", "Two"], "n": 2}
        jobs = [pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=120)]
        wait_until(lambda: app.state.service.admission.num_answers == 4)
        jobs += [pool.submit(httpx2.post, f"{url}/v1/completions", json=TEXT, timeout=120)]
        wait_until(lambda: app.state.service.admission.num_answers == 5)
        for path, asked in (
            ("v1/completions", TEXT),
            ("v1/chat/completions", {"messages": MESSAGES}),
            ("tokenize", {"prompt": "a"}),
            ("detokenize", {"tokens": [1]}),
        ):
            refused = httpx2.post(
                f"{url}/{path}", json=asked, timeout=120
            )  # reads no text, for nobody can now
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert refused.headers["retry-after"] == "1"
        unread = httpx2.post(f"{url}/v1/completions", content=b"{", headers=JSON, timeout=120)
        assert unread.status_code == 429, "a body that is not read cannot be wrong"
        assert httpx2.get(f"{url}/health", timeout=120).status_code == 200
        gate.set()
        assert [job.result().status_code for job in jobs] == [200, 200]
        wait_until(lambda: app.state.service.admission.num_answers == 0)


def test_a_key_whose_queue_is_full_has_no_other_refused() -> None:
    admission = Admission(4, 1)
    with admission.admit(5, "a"):
        for num_answers in (1, 5):
            with pytest.raises(ApiError, match="too many requests are waiting"):
                admission.check_room(num_answers, "a")
        with admission.admit(5, "b"):
            assert admission.num_answers == 10
            with pytest.raises(ApiError, match="too many requests are waiting"), admission.admit(1, "b"):
                pass
    with admission.admit(5, "a"):
        assert admission.num_answers == 5


def test_places_are_given_back_where_preparing_fails_or_takes_too_long(
    make_app: MakeApp, gate: threading.Event
) -> None:
    with TestClient(make_app()) as client:
        assert client.post("/v1/completions", json={**TEXT, "prompt": [5] * 3000}).status_code == 400
    app = make_app(request_timeout_s=0.2)
    with TestClient(app) as client:
        late = client.post("/v1/completions", json=TEXT)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert app.state.service.admission.num_answers == 0
        gate.set()


def test_a_client_that_leaves_while_its_text_is_read(make_app: MakeApp, gate: threading.Event) -> None:
    app = make_app()
    with running(app) as (url, _):
        raw = json.dumps(TEXT).encode()
        with send(url, raw, len(raw)):
            wait_until(lambda: app.state.service.admission.num_answers == 1)
        wait_until(lambda: app.state.service.admission.num_answers == 0)
        assert not gate.is_set(), "the place is free while the text is still being read"
        gate.set()


LONG = "a " * 2_000_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["a", LONG], "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/detokenize", {"tokens": [1] * 100_000}),
    ],
    ids=["completion", "one of two", "chat", "tokenize", "tokenize chat", "detokenize"],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    make_app: MakeApp, path: str, body: dict[str, Any]
) -> None:
    app = make_app()
    spy = app.state.service.tokens._tokenizer = Spy(app.state.service.tokens._tokenizer)
    with TestClient(app) as client:
        refused = client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert spy.num_read == 0
        assert app.state.service.admission.num_answers == 0


class Spy:
    """A tokenizer that counts the characters and ids that it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_read += len(text)
        return self._tokenizer(text, **options)

    def apply_chat_template(self, *args: Any, tokenize: bool = True, **options: Any) -> Any:
        self.num_read += tokenize
        return self._tokenizer.apply_chat_template(*args, tokenize=tokenize, **options)

    def decode(self, token_ids: list[int]) -> str:
        self.num_read += len(token_ids)
        return str(self._tokenizer.decode(token_ids))


def test_a_short_prompt_passes_long_ones(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app, gate = make_app(), threading.Event()
    encode = Tokens._encode

    def waiting(self: Tokens, text: str, add_special_tokens: bool) -> list[int]:
        assert len(text) < 100 or gate.wait(120)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokens, "_encode", waiting)
    long = {**TEXT, "prompt": "word " * 1500}
    with running(app) as (url, _), ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(httpx2.post, f"{url}/v1/completions", json=long, timeout=120) for _ in range(3)]
        jobs.append(pool.submit(httpx2.post, f"{url}/tokenize", json={"prompt": long["prompt"]}, timeout=120))
        wait_until(lambda: app.state.service.admission.num_answers == 4)
        for path in ("v1/completions", "tokenize"):
            assert httpx2.post(f"{url}/{path}", json={"prompt": "Once"}, timeout=120).status_code == 200
        assert not any(job.done() for job in jobs)
        gate.set()
        assert [job.result().status_code for job in jobs] == [200] * 4


@pytest.mark.parametrize(
    ("values", "thread"),
    [
        (["a" * 100], 0),
        ([["a"] * 10], 0),
        ([[MESSAGES[0]] * 2, None], 0),
        (["a" * 5000], 1),
        ([[{"role": "user", "content": "a" * 5000}]], 1),
        ([["a"] * 3000], 1),
        ([[5] * 200_000], 2),
        ([[["a" * 3000] * 50]], 2),
    ],
    ids=lambda value: str(value)[:20],
)
def test_sizes_decide_whom_one_waits_for(values: list[Any], thread: int) -> None:
    assert sum(size_of(*values) > bound for bound in BOUNDS) == thread


def send(url: str, raw: bytes, length: int) -> socket.socket:
    """A connection on which a request of `length` bytes has begun with `raw`."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=120)
    connection.sendall(head.encode() + raw)
    return connection


def test_a_body_that_does_not_come_is_not_waited_for(make_app: MakeApp) -> None:
    app = make_app(body_timeout_s=0.3)
    with running(app) as (url, _), send(url, b'{"prompt"', 1000) as connection:
        answer = connection.makefile("rb").read()  # until the server closes, which it would not do by itself
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("body_timeout", "invalid_request_error")
        assert "within 0.3 s" in error["message"]
        assert app.state.service.admission.num_answers == 0


@pytest.mark.parametrize(
    ("cls", "body"),
    [
        (CompletionBody, {"prompt": [0.5] * 1000}),
        (CompletionBody, {"prompt": [[0.5] * 1000] * 1000}),
        (CompletionBody, {"prompt": "a", "stop": [1] * 1000}),
        (CompletionBody, {"prompt": "a", "logit_bias": {str(i): "a" for i in range(1000)}}),
        (CompletionBody, {"prompt": "a", **{f"x{i}": 1 for i in range(1000)}}),
        (CompletionBody, {"prompt": "a", "stream_options": {f"x{i}": 1 for i in range(1000)}}),
        (ChatBody, {"messages": [{}] * 1000}),
        (ChatBody, {"messages": MESSAGES, "tools": [{}] * 100}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_few_words_are_made_of_what_is_wrong_many_times(cls: Any, body: dict[str, Any]) -> None:
    """Each error takes a kilobyte and more: a body of 4 MiB took 4 GB and half a minute."""
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(body)
    assert caught.value.error_count() <= 5
