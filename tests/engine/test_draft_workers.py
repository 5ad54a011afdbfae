"""Draft workers over real sockets change how fast a text comes and nothing else, whatever becomes of them."""

from __future__ import annotations

import itertools
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.metrics.worker import WorkerStats
from slipstream.draft.remote import link as link_module
from slipstream.draft.remote import worker as worker_module
from slipstream.draft.remote.address import Address
from slipstream.draft.remote.ahead import AheadDrafting
from slipstream.draft.remote.handshake import fingerprint, new_nonce, proof
from slipstream.draft.remote.link import LinkTerms, SocketLink
from slipstream.draft.remote.options import ServedOptions
from slipstream.draft.remote.protocol import MAX_GREETING_BYTES, PROTOCOL_VERSION, checked, encode
from slipstream.draft.remote.serving import serve_drafter
from slipstream.draft.remote.worker import DraftWorker
from slipstream.errors import ConfigError
from slipstream.rpc.frames import Frames
from slipstream.rpc.sockets import next_body
from tests.kit.draft_worker import running_worker
from tests.kit.engines import MakeLLM

DRAFT: dict[str, Any] = {"method": "draft_model", "model": EMBEDDED_DRAFT}
STUBS = "slipstream.testing.stub_drafters"
PATIENT = {"max_wait_ms": 2000}
"""So that a test does not depend on who is faster."""
KEY = b"sixteen characters and more"
CAPACITY = {"max_requests": 4}


def params(temperature: float = 0.0, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=3, ignore_eos=True)


def texts(llm: LLM, prompts: list[list[int]], asked: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, asked)]


def remote(*addresses: Address | str, **options: Any) -> dict[str, Any]:
    return {"method": "remote", "workers": [str(address) for address in addresses], **options}


def workers_of(llm: LLM) -> tuple[WorkerStats, ...]:
    return llm.engine.stats().draft_workers


def until(true: Callable[[], bool]) -> None:
    """Wait for what another thread does; fails after two minutes."""
    for _ in range(2400):
        if true():
            return
        time.sleep(0.05)
    pytest.fail("it did not come to pass within two minutes")


@pytest.fixture(scope="module")
def worker() -> Iterator[Address]:
    with running_worker(EMBEDDED_TARGET, DRAFT, **CAPACITY) as address:
        yield address


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("wait", [PATIENT, {}, {**PATIENT, "wait_tokens": 1}], ids=["waits", "never", "one"])
def test_the_text_is_the_targets(
    worker: Address,
    wait: dict[str, Any],
    temperature: float,
    plain: LLM,
    prompts: list[list[int]],
    make_llm: MakeLLM,
) -> None:
    llm, asked = make_llm(remote(worker, **wait)), params(temperature)
    outputs = llm.generate(prompts[:4], asked)
    assert [output.outputs[0].token_ids for output in outputs] == texts(plain, prompts[:4], asked)
    [stats] = workers_of(llm)
    assert (stats.state, stats.num_connections) == ("connected", 1)
    assert stats.num_continuations > 0
    if wait:
        drafted = make_llm({**DRAFT, "num_speculative_tokens": 4})
        here = sum(output.metrics.num_accepted_tokens for output in drafted.generate(prompts[:4], asked))
        there = sum(output.metrics.num_accepted_tokens for output in outputs)
        assert there > 0.3 * here if "wait_tokens" in wait else there == here


@pytest.mark.parametrize("delay_s", [0.01, 0.1, 1.0])
def test_a_slow_worker_changes_nothing_and_is_not_waited_for(
    delay_s: float, plain: LLM, prompts: list[list[int]], make_llm: MakeLLM
) -> None:
    asked = params()
    truth = texts(plain, prompts[:2], asked)
    oracle = [prompt + text for prompt, text in zip(prompts[:2], truth, strict=True)]
    slow = {"method": f"{STUBS}:SlowDrafter", "delay_s": delay_s, "texts": oracle}
    with running_worker(EMBEDDED_TARGET, slow) as address:
        llm = make_llm(remote(address))
        assert texts(llm, prompts[:2], asked) == truth
        [stats] = workers_of(llm)
        assert stats.num_late_continuations > 0
        impatient = make_llm(remote(address, max_wait_ms=2))
        assert texts(impatient, prompts[:2], asked) == truth


def test_a_worker_that_goes_and_comes_back_is_found_again(
    tmp_path: Path, plain: LLM, prompts: list[list[int]], make_llm: MakeLLM
) -> None:
    asked = params(0.8, 40)
    truth = texts(plain, prompts[:3], asked)
    path = f"unix:{tmp_path}/worker"
    with ExitStack() as first:
        first.enter_context(running_worker(EMBEDDED_TARGET, DRAFT, path, **CAPACITY))
        llm = make_llm(remote(path, **PATIENT))
        num_steps = 0

        def on_step(_: object) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 5:
                first.close()

        llm.engine.on_step = on_step
        assert texts(llm, prompts[:3], asked) == truth
        assert num_steps > 5
    until(lambda: workers_of(llm)[0].state == "away")
    assert workers_of(llm)[0].why
    assert texts(llm, prompts[:3], asked) == truth
    with running_worker(EMBEDDED_TARGET, DRAFT, path, **CAPACITY):
        until(lambda: workers_of(llm)[0].state == "connected")
        before = workers_of(llm)[0].num_continuations
        assert texts(llm, prompts[:3], asked) == truth
        stats = workers_of(llm)[0]
        assert stats.num_connections == 2
        assert stats.num_continuations > before


def test_an_engine_begins_without_its_worker(
    tmp_path: Path, plain: LLM, prompts: list[list[int]], make_llm: MakeLLM
) -> None:
    path = f"unix:{tmp_path}/worker"
    llm = make_llm(remote(path, **PATIENT))
    assert "no such file" in workers_of(llm)[0].why
    truth = texts(plain, prompts[:1], params())
    assert texts(llm, prompts[:1], params()) == truth
    with running_worker(EMBEDDED_TARGET, DRAFT, path, **CAPACITY):
        until(lambda: workers_of(llm)[0].state == "connected")
        assert texts(llm, prompts[:1], params()) == truth
        assert workers_of(llm)[0].num_continuations > 0


def test_several_workers_and_several_engines(
    worker: Address, plain: LLM, prompts: list[list[int]], make_llm: MakeLLM
) -> None:
    asked = params(0.8)
    truth = texts(plain, prompts[:4], asked)
    with running_worker(EMBEDDED_TARGET, DRAFT, **CAPACITY) as second:
        engines = [make_llm(remote(worker, second, **PATIENT)) for _ in range(2)]
        found: dict[int, list[list[int]]] = {}

        def run(number: int) -> None:
            found[number] = texts(engines[number], prompts[:4], asked)

        threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {0: truth, 1: truth}
        for llm in engines:
            assert all(stats.num_continuations > 0 for stats in workers_of(llm))


def test_auto_leaves_out_a_worker_that_does_not_pay(
    plain: LLM, prompts: list[list[int]], make_llm: MakeLLM
) -> None:
    asked = params(0.0, 120)
    slow = {"method": f"{STUBS}:SlowDrafter", "delay_s": 0.1, "accuracy": 0.0, "texts": []}
    with running_worker(EMBEDDED_TARGET, slow) as address:
        away = {"method": "remote", "workers": str(address), "max_wait_ms": 150}
        llm = make_llm({"method": "auto", "drafters": [away, {"method": "suffix"}]})
        methods: list[str] = []
        llm.engine.on_observe = lambda items: methods.extend(item.method for item in items)
        assert texts(llm, prompts[:2], asked) == texts(plain, prompts[:2], asked)
        assert methods.count("remote") < 0.25 * len(methods)
        assert "remote" in {method.name for method in llm.engine.control_report().methods}
        assert len(workers_of(llm)) == 1


# --- who must not be used ---------------------------------------------------------------------------------------


def test_a_worker_of_another_vocabulary_is_refused(worker: Address, tmp_path: Path) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    from slipstream.draft.registry import create_drafter
    from slipstream.testing.stub_drafters import draft_context

    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=other)
    context = draft_context(2, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"another vocabulary \(4,096 tokens, this target 2\)"):
        create_drafter(SpeculativeConfig.from_mapping(remote(worker)), context)


def test_a_worker_whose_drafts_cannot_be_judged_is_refused(worker: Address, make_llm: MakeLLM) -> None:
    with pytest.raises(
        ConfigError, match=r"makes coupled drafts.*judges one_hot.*draft_sample_method greedy"
    ):
        LLM(speculative_config={**remote(worker), "verifier": "rejection"})


def test_greedy_drafts_serve_the_classical_verifiers(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    greedy = {**DRAFT, "draft_sample_method": "greedy"}
    with running_worker(EMBEDDED_TARGET, greedy, **CAPACITY) as address:
        for verifier in ("rejection", "block", "coupled"):
            llm = make_llm({**remote(address, **PATIENT), "verifier": verifier})
            [output] = llm.generate(prompts[:1], params(0.8))
            assert output.metrics.num_draft_tokens > 0


def test_keys_are_asked_for_and_must_be_the_same(worker: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "SLIPSTREAM_WORKER_KEY"
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match="not on this machine, so it needs a shared key"):
        LLM(speculative_config=remote("10.9.8.7:7070"))
    served = serve_drafter(EngineConfig(EMBEDDED_TARGET), SpeculativeConfig("ngram"), ServedOptions())
    with pytest.raises(ConfigError, match="can be reached from other machines, so it needs a shared key"):
        DraftWorker(served, Address.parse("0.0.0.0:0"))
    with running_worker(EMBEDDED_TARGET, {"method": "ngram"}, key=KEY) as guarded:
        with pytest.raises(ConfigError, match="requires a key"):
            LLM(speculative_config=remote(guarded))
        monkeypatch.setenv(variable, "another key, long enough")
        with pytest.raises(ConfigError, match="the engine does not know the key"):
            LLM(speculative_config=remote(guarded))
        monkeypatch.setenv(variable, KEY.decode())
        LLM(speculative_config=remote(guarded))
    with pytest.raises(ConfigError, match="the worker does not know the key"):
        LLM(speculative_config=remote(worker))


def test_an_address_that_is_taken_is_one_line(worker: Address) -> None:
    served = serve_drafter(EngineConfig(EMBEDDED_TARGET), SpeculativeConfig("ngram"), ServedOptions())
    with pytest.raises(ConfigError, match=f"cannot listen at {worker}"):
        DraftWorker(served, worker).run()


# --- workers that misbehave -------------------------------------------------------------------------------------


@contextmanager
def impostor(llm: LLM, then: Callable[[socket.socket, Frames], None], **change: Any) -> Iterator[Address]:
    """A worker that greets as one should, but for `change`, and does what it likes `then`."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                try:
                    _greet(connection)
                except OSError:
                    continue

    def _greet(connection: socket.socket) -> None:
        frames, nonce = Frames(MAX_GREETING_BYTES), new_nonce()
        hello = _message(connection, frames)
        challenge = {"protocol": PROTOCOL_VERSION, "nonce": nonce, "needs_key": False}
        connection.sendall(encode({"type": "challenge", **challenge, **change}))
        _message(connection, frames)
        tokenizer = llm.engine.tokenizer
        welcome = {
            "mac": proof(b"", "worker", hello["nonce"], nonce),
            "vocabulary": fingerprint(tokenizer),
            "vocab_size": 4096,
            "kind": "coupled",
            "drafter": "an impostor",
        }
        connection.sendall(encode({"type": "welcome", **welcome}))
        frames.max_bytes = 2**24
        then(connection, frames)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield Address(*listening.getsockname()[:2])
    finally:
        listening.close()


def _message(connection: socket.socket, frames: Frames) -> dict[str, Any]:
    body = next_body(connection, frames)
    if body is None:
        raise OSError("gone")
    return checked(body)


def says_nothing(connection: socket.socket, frames: Frames) -> None:
    while connection.recv(1 << 16):
        pass


def says_garbage(connection: socket.socket, frames: Frames) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"\x00\x00\x00\x05hello")


def says_too_much(connection: socket.socket, frames: Frames) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"\xff\xff\xff\xff" + b"x" * 1000)


def lies(connection: socket.socket, frames: Frames) -> None:
    """Continuations of other lengths, with tokens that do not exist, for requests that do not exist, of the wrong
    text."""
    for turn in itertools.count():
        message = _message(connection, frames)
        if message["type"] not in ("open", "commit"):
            continue
        length = message.get("length", len(message["tokens"]))
        continuation = {**message, "type": "tail", "length": length, "draft_s": 0.0, "tokens": [7, 7]}
        bad: list[dict[str, Any]] = [
            {"length": length + 1},
            {"length": 0},
            {"hash": b"12345678"},
            {"tokens": [4096]},
            {"tokens": []},
            {"tokens": [1] * 5000},
            {"request": 12345},
            {},  # for this very text, and wrong all the same
        ]
        turn %= len(bad)  # each is the last word at times
        connection.sendall(b"".join(encode(continuation | change) for change in bad[turn:] + bad[:turn]))


@pytest.mark.parametrize(
    "then", [says_nothing, says_garbage, says_too_much, lies], ids=lambda each: each.__name__
)
def test_a_worker_that_misbehaves_changes_nothing(
    then: Callable[[socket.socket, Frames], None],
    plain: LLM,
    prompts: list[list[int]],
    make_llm: MakeLLM,
) -> None:
    with impostor(plain, then) as address:
        llm = make_llm(remote(address, max_wait_ms=1))
        for temperature in (0.0, 0.8):
            asked = params(temperature)
            assert texts(llm, prompts[:2], asked) == texts(plain, prompts[:2], asked)
        assert llm.engine.stats().num_draft_failures == 0
        llm.engine.drafter.close()  # type: ignore[attr-defined]


def test_a_worker_of_another_protocol_is_refused(plain: LLM) -> None:
    with (
        impostor(plain, says_nothing, protocol=9) as address,
        pytest.raises(ConfigError, match=r"the worker speaks version 9 of the draft protocol, this side 1"),
    ):
        LLM(speculative_config=remote(address))
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            with web.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        llm = LLM(speculative_config=remote(Address(*web.getsockname()[:2])))
        assert "is it a draft worker?" in workers_of(llm)[0].why


def reads_nothing(connection: socket.socket, frames: Frames) -> None:
    threading.Event().wait(60)


def test_a_worker_that_reads_nothing_is_left_and_that_is_said(
    plain: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_BACKLOG_BYTES", 2**20)
    monkeypatch.setattr(link_module, "DOUBT_S", 200.0)
    monkeypatch.setattr(link_module, "SILENCE_S", 300.0)
    terms = LinkTerms(fingerprint(plain.engine.tokenizer), 4096, frozenset({"coupled"}), 4, b"")
    with impostor(plain, reads_nothing) as address, caplog.at_level("INFO", "slipstream"):
        link = SocketLink(address, terms, threading.Condition())
        link.wait_tried(120)
        while link.connected:
            link.send({"type": "open", "tokens": [1] * 2**18})
        assert link.state() == ("away", "it does not read what it is sent")
        link.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"draft worker {address} is connected",
        f"draft worker {address} is away: it does not read what it is sent",
    ]


def test_a_worker_that_is_silent_counts_as_away_until_it_speaks(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before it is left: its connection stays, and is used again."""
    monkeypatch.setattr(link_module, "DOUBT_S", 200.0)
    monkeypatch.setattr(link_module, "PING_EVERY_S", 0.05)
    monkeypatch.setattr(link_module, "SILENCE_S", 300.0)
    speak = threading.Event()

    def is_stopped(connection: socket.socket, frames: Frames) -> None:
        speak.wait(120)
        connection.sendall(encode({"type": "pong", "sent_s": 0.0}))
        threading.Event().wait(60)

    terms = LinkTerms(fingerprint(plain.engine.tokenizer), 4096, frozenset({"coupled"}), 4, b"")
    with impostor(plain, is_stopped) as address:
        link = SocketLink(address, terms, threading.Condition())
        link.wait_tried(120)
        assert link.connected
        monkeypatch.setattr(link_module, "DOUBT_S", 0.2)
        until(lambda: not link.connected)
        assert link.state() == ("away", "it has not answered for 0.2 s")
        generation = link.generation
        monkeypatch.setattr(link_module, "DOUBT_S", 200.0)
        speak.set()
        until(lambda: link.connected)
        assert link.state() == ("connected", "")
        assert link.generation == generation
        link.close()


def greeted(address: Address) -> tuple[socket.socket, Frames]:
    """A connection to a worker as an engine makes it."""
    connection, frames, nonce = address.connect(120), Frames(MAX_GREETING_BYTES), new_nonce()
    hello = {"type": "hello", "protocol": PROTOCOL_VERSION, "nonce": nonce, "depth": 4}
    connection.sendall(encode(hello))
    challenge = _message(connection, frames)
    connection.sendall(encode({"type": "proof", "mac": proof(b"", "engine", nonce, challenge["nonce"])}))
    assert _message(connection, frames)["type"] == "welcome"
    return connection, frames


def test_what_waits_for_a_drafter_is_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long messages fill less than their number allows; once the drafter takes them, all are read."""
    gate = threading.Event()
    monkeypatch.setattr(worker_module, "MAX_UNTAKEN_BYTES", 2**16)
    monkeypatch.setattr(AheadDrafting, "receive", lambda *_: [][gate.wait(120) :])
    release = {"type": "release", "request": 1, "finished": True, "filler": b"x" * 2**14}
    with running_worker(EMBEDDED_TARGET, {"method": "ngram"}, f"unix:{tmp_path}/worker") as address:
        connection, frames = greeted(address)
        with connection:
            connection.settimeout(0.3)
            data = encode(release) * 400
            sent = 0

            def send_all() -> None:
                nonlocal sent
                while sent < len(data):
                    sent += connection.send(data[sent : sent + 2**16])

            with pytest.raises(TimeoutError):
                send_all()
            assert 2**16 < sent < len(data) / 3
            gate.set()
            connection.settimeout(120)
            connection.sendall(data[sent:] + encode({"type": "ping", "sent_s": 1.0}))
            assert _message(connection, frames) == {"type": "pong", "sent_s": 1.0}


def test_strangers_do_not_disturb_a_worker(
    worker: Address, plain: LLM, prompts: list[list[int]], make_llm: MakeLLM
) -> None:
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"\x00", encode({"type": "ping", "sent_s": 0.0}), b""):
        with worker.connect(120) as stranger:
            stranger.sendall(greeting)
    hello = {"type": "hello", "protocol": 9, "nonce": new_nonce(), "depth": 4}
    with worker.connect(120) as stranger:
        stranger.sendall(encode(hello))
        stranger.settimeout(120)
        frames = Frames(MAX_GREETING_BYTES)
        _message(stranger, frames)
        assert "the engine speaks version 9 of the draft protocol" in _message(stranger, frames)["reason"]
    llm = make_llm(remote(worker, **PATIENT))
    assert texts(llm, prompts[:1], params()) == texts(plain, prompts[:1], params())
    assert workers_of(llm)[0].num_continuations > 0


# --- another process --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_worker_process_is_killed_and_stopped_while_texts_run(
    tmp_path: Path, plain: LLM, prompts: list[list[int]], make_llm: MakeLLM
) -> None:
    """SIGKILL, SIGSTOP and SIGCONT at steps drawn at random; six texts each time, all as without speculation."""
    path = f"unix:{tmp_path}/worker"
    command = [
        sys.executable,
        "-m",
        "slipstream.cli.main",
        "draft-worker",
        "--listen",
        path,
        "--threads",
        "1",
    ]
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    asked = params(0.8, 40)
    truth = texts(plain, prompts[:6], asked)
    rng = random.Random(0)
    start()
    try:
        until(Path(path.removeprefix("unix:")).exists)
        llm = make_llm(remote(path, max_wait_ms=5))
        for what in (None, signal.SIGSTOP, signal.SIGKILL, signal.SIGSTOP):
            left = rng.randint(3, 15)

            def on_step(_: object, what: signal.Signals | None = what) -> None:
                nonlocal left
                left -= 1
                if left == 0 and what is not None:
                    started[-1].send_signal(what)

            llm.engine.on_step = on_step
            assert texts(llm, prompts[:6], asked) == truth
            assert left < 0
            if what is signal.SIGKILL:
                until(lambda: workers_of(llm)[0].state == "away")
                assert texts(llm, prompts[:6], asked) == truth
                start()
            elif what is signal.SIGSTOP:
                until(lambda: workers_of(llm)[0].state == "away")  # it answers no ping
                assert texts(llm, prompts[:6], asked) == truth
                started[-1].send_signal(signal.SIGCONT)
            until(lambda: workers_of(llm)[0].state == "connected")
            before = workers_of(llm)[0].num_continuations
            assert texts(llm, prompts[:6], asked) == truth
            assert workers_of(llm)[0].num_continuations > before
        assert workers_of(llm)[0].num_connections >= 2, "the killed one's successor is another connection"
    finally:
        for process in started:
            process.kill()
            process.wait()
