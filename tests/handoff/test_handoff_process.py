"""The server process: its command, its start, its death, its end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from handoff_cases import fake_command, free_port, is_alive, running, serve_command

from slipstream.errors import ConfigError, RemoteError
from slipstream.tools.handoff.plan import (
    HandoffPlan,
    OffSide,
    ServeCommand,
    check_extra,
    check_free,
    plain_url,
    url_of,
)
from slipstream.tools.handoff.process import VllmProcess, find_vllm, version_of


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fake_command(tmp_path_factory.mktemp("vllm"))


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait until `condition()` holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.02)


def test_the_command_says_everything_once() -> None:
    command = ServeCommand(
        "vllm", "a/model", "0.0.0.0", 8123, ("--speculative-config", "{}"), ("--dtype", "float32"), "name"
    )
    assert command.words() == [
        *("vllm", "serve", "a/model", "--host", "0.0.0.0", "--port", "8123"),
        *("--served-model-name", "name", "--speculative-config", "{}", "--dtype", "float32"),
    ]


def test_its_version(vllm: str, tmp_path: Path) -> None:
    assert find_vllm(vllm) == vllm
    assert version_of(vllm) == "0.32.0"
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'no module named vllm' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="exit code 1: no module named vllm"):
        version_of(str(broken))
    broken.write_text("#!/bin/sh\necho 'true (GNU coreutils) 9.1. Written by Jim Meyering.'\n")
    with pytest.raises(ConfigError, match=r"is not vLLM: its --version ends with 'Meyering\.'"):
        version_of(str(broken))


def test_no_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no vllm on the PATH; install it .* --vllm .* --attach URL"):
        find_vllm(None)
    with pytest.raises(ConfigError, match="is a folder; name the file"):
        find_vllm(str(tmp_path))
    with pytest.raises(ConfigError, match="is no command that can be run"):
        find_vllm(str(tmp_path / "vllm"))


def test_it_is_waited_for_and_stopped_with_its_children(vllm: str, tmp_path: Path) -> None:
    port, child, log, loaded = free_port(), tmp_path / "child", tmp_path / "log", tmp_path / "loaded"
    command = serve_command(vllm, port, "--fake-child", str(child), "--fake-load", str(loaded))
    process = VllmProcess(command, f"http://127.0.0.1:{port}", log=log)
    process.start()
    try:
        process.wait_until_healthy(60, lambda passed_s, line: loaded.touch())
        assert process.exit_code is None
        assert process.last_lines == ["INFO loading some/model"]
        pids = [process.pid, int(child.read_text())]
        assert all(is_alive(pid) for pid in pids if pid)
    finally:
        process.stop(grace_s=5)
    assert process.exit_code == -signal.SIGTERM
    until(lambda: not any(is_alive(pid) for pid in pids if pid))
    assert log.read_text() == "INFO loading some/model\n"


def test_a_stopped_one_is_not_killed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another process's by then."""
    process = VllmProcess([sys.executable, "-c", ""], "http://127.0.0.1:9")
    process.start()
    process.stop(grace_s=5)
    killed: list[int] = []
    monkeypatch.setattr("os.killpg", lambda group, sig: killed.append(group))
    process.stop()
    assert killed == []
    process.start()
    process.stop(grace_s=5)
    assert killed == [process.pid], "a new one is"


def test_one_that_ignores_the_request_is_killed(vllm: str) -> None:
    port = free_port()
    with running(serve_command(vllm, port, "--fake-stubborn"), port) as process:
        process.stop(grace_s=0.2)
        assert process.exit_code == -signal.SIGKILL


def test_its_death_is_told_with_its_last_lines(vllm: str) -> None:
    command = serve_command(vllm, free_port(), "--fake-error", "ValueError: no kernel for eagle3")
    process = VllmProcess(command, "http://127.0.0.1:9")
    process.start()
    message = "exit code 1 before it was ready; its last line: ValueError: no kernel for eagle3"
    with pytest.raises(RemoteError, match=message):
        process.wait_until_healthy(30, lambda passed_s, line: None)
    assert process.last_lines == ["INFO loading some/model", "ValueError: no kernel for eagle3"]


def test_one_that_never_serves_is_given_up(vllm: str) -> None:
    port = free_port()
    process = VllmProcess(serve_command(vllm, port, "--fake-silence"), f"http://127.0.0.1:{port}")
    process.start()
    try:
        with pytest.raises(RemoteError, match=r"not ready after 0.3 s \(--start-timeout-s\)"):
            process.wait_until_healthy(0.3, lambda passed_s, line: None)
        process.abandon()
        with pytest.raises(RemoteError, match="given up"):
            process.wait_until_healthy(30, lambda passed_s, line: None)
    finally:
        process.stop(grace_s=5)


def test_it_ends_when_its_parent_is_killed(vllm: str, tmp_path: Path) -> None:
    program = (
        "import sys, time; from slipstream.tools.handoff.process import VllmProcess\n"
        "process = VllmProcess(sys.argv[1:], 'http://127.0.0.1:9'); process.start()\n"
        "print(process.pid, flush=True); time.sleep(60)"
    )
    command = serve_command(vllm, free_port(), "--fake-silence")
    with subprocess.Popen(
        [sys.executable, "-c", program, *command], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    until(lambda: not is_alive(pid))


@pytest.mark.parametrize(
    "word",
    [
        "--port",
        "--speculative-config={}",
        "--speculative_config",
        "--speculative-config.method",
        "-sc",
        "--host",
        "--api-key=x",
    ],
)
def test_flags_that_handoff_writes_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="is written by handoff itself; use -"):
        check_extra(["--dtype", "float32", word])


def test_a_used_port_is_named() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on .*; choose another with --port"):
            check_free("127.0.0.1", bound.getsockname()[1], "--port")


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_addresses_of_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as bound:
            bound.bind(("::1", 0))
            port = bound.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    check_free("::1", port, "--port")
    check_free("::", port, "--port")


def test_where_a_server_is_reached() -> None:
    assert url_of("127.0.0.1", 80) == url_of("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert url_of("::", 80) == url_of("::1", 80) == "http://[::1]:80"
    with pytest.raises(ConfigError, match="that is no address"):
        check_free("a" * 64, 80, "--port")


@pytest.mark.parametrize(
    ("given", "url"),
    [("http://a:1/v1", "http://a:1"), ("https://a/b/v1/", "https://a/b"), ("http://a:1/", "http://a:1")],
)
def test_addresses(given: str, url: str) -> None:
    assert plain_url(given) == url
    with pytest.raises(ConfigError, match="is no address"):
        plain_url("localhost:8000")


def test_contradictions_of_the_off_side() -> None:
    where = {"url": "http://127.0.0.1:8000", "method": "ngram"}
    with pytest.raises(ConfigError, match="--off-side canary restarts vLLM, but --attach"):
        HandoffPlan(**where, off_side=OffSide.CANARY)
    with pytest.raises(
        ConfigError, match="--off-side instance needs a second server, and --attach starts none"
    ):
        HandoffPlan(**where, off_side=OffSide.INSTANCE)
    assert json.dumps(OffSide.NONE) == '"none"'
