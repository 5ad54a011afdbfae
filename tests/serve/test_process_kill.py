"""Real processes, one of which is killed in mid-stream."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
import pytest
from serve_cases import QUESTION, wait_until

from slipstream.errors import ProtocolError
from slipstream.serve.process.protocol import CODEC, VERSION, Failed, Hello
from slipstream.serve.process.spawn import WORKER, spawn_engine

pytestmark = pytest.mark.long

BODY = {
    "prompt": QUESTION,
    "max_tokens": 1200,
    "ignore_eos": True,
    "temperature": 0.8,
    "frequency_penalty": 0.1,
    "seed": 7,
    "stream": True,
}


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[psutil.Process, str]]:
    """`slipstream serve`, its process and its address."""
    log = folder / "log"
    command = [sys.executable, "-m", "slipstream.cli.main", "serve", "--port", "0", "--threads", "1"]
    with log.open("w") as stderr:
        started = subprocess.Popen(
            [*command, "--spec", "draft", "--kv-cache-bytes", "40MiB", *flags],
            stderr=stderr,
        )
    try:
        wait_until(lambda: started.poll() is not None or '"listening"' in log.read_text(), 800)
        found = re.search(r'"listening".*"port": (\d+)', log.read_text())
        assert found, log.read_text()
        yield psutil.Process(started.pid), f"http://127.0.0.1:{found[1]}"
    finally:
        started.kill()
        started.wait()


def engine_of(server: psutil.Process) -> psutil.Process:
    """The engine's process."""
    [found] = [child for child in server.children() if WORKER in child.cmdline()]
    return found


def stream(
    url: str, server: psutil.Process, kill_at: int | None = None
) -> tuple[str, list[dict[str, Any]], bool]:
    """The text, the events and whether the stream ended as it should; the engine is killed at an event."""
    events: list[dict[str, Any]] = []
    done = False
    with httpx2.stream("POST", f"{url}/v1/completions", json=BODY, timeout=240) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line:
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == kill_at:
                    engine_of(server).send_signal(signal.SIGKILL)
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    return text, events, done


def test_a_killed_engine_is_replaced_and_the_text_is_the_same(tmp_path: Path) -> None:
    with serving(tmp_path, "--engine-restarts", "1") as (server, url):
        expected, _, done = stream(url, server)
        assert done
        first = engine_of(server).pid
        text, _, done = stream(url, server, kill_at=3)
        assert done
        assert text == expected
        second = engine_of(server)
        assert second.pid != first
        assert "slipstream_engine_restarts_total" in httpx2.get(f"{url}/metrics").text
        assert httpx2.get(f"{url}/ready").status_code == 200
        # There is no second restart within ten minutes.
        text, events, done = stream(url, server, kill_at=3)
        assert not done
        assert expected.startswith(text)
        error = events[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "unavailable")
        assert "was ended by signal 9 (SIGKILL)" in error["message"]
        health = httpx2.get(f"{url}/health")
        assert (health.status_code, health.json()["error"]["message"]) == (503, "the engine has stopped")


def test_an_engine_ends_with_its_server(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, url):
        engine = engine_of(server)
        with httpx2.stream("POST", f"{url}/v1/completions", json=BODY, timeout=240) as response:
            next(response.iter_lines())
            server.kill()
            wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_signals_are_the_servers(tmp_path: Path) -> None:
    """A service manager signals every process of the service; the engine goes on until the drain is over."""
    with serving(tmp_path, "--grace-period-s", "200") as (server, url):
        with httpx2.stream("POST", f"{url}/v1/completions", json=BODY, timeout=240) as response:
            lines = response.iter_lines()
            next(lines)
            for process in (engine_of(server), server):
                process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait(120) in (0, None)


def test_a_process_of_another_version_is_refused() -> None:
    spawned = spawn_engine()
    frames = CODEC.frames()
    hello = msgspec.msgpack.encode(["hello", VERSION + 1, "9.9"])
    spawned.socket.sendall(len(hello).to_bytes(4, "big") + hello)
    spawned.socket.settimeout(240)
    got: list[Any] = []
    while data := spawned.socket.recv(2**16):
        got += [CODEC.read(body) for body in frames.add(data)]
    assert spawned.process.wait(120) == 1
    spawned.kill()
    assert isinstance(got[0], Hello)
    assert got[0].version == VERSION
    assert isinstance(got[1], Failed)
    assert got[1].error == ProtocolError.__name__
    assert f"speaks version {VERSION + 1}" in got[1].message
    assert CODEC.frame(got[0])


def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream.cli.main", "serve", str(tmp_path / "nowhere"), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "nowhere" in ended.stderr
