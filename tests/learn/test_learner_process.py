"""The learner's process: one that dies or hangs is told of, and what it wrote is kept within bounds."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.learn.background.learner_process import (
    KILL_S,
    MAX_STARTS,
    SILENT_S,
    LearnerLog,
    LearnerProcess,
)
from slipstream.learn.background.messages import DraftingCosts

SPEAKS = """
from slipstream.learn.background.messages import CODEC, LearnEvent
from slipstream.rpc.bound_program import end_with_parent
from slipstream.rpc.children import parent_socket
from slipstream.rpc.sockets import next_body
end_with_parent()
sock, frames = parent_socket(), CODEC.frames()
def tell(event, **status):
    sock.sendall(CODEC.frame(LearnEvent(event, status)))
"""
ANSWERS = f"""
{SPEAKS}
tell("begun")
while next_body(sock, frames) is not None:
    tell("alive")
"""
"""It is heard of once, and then only when anything is said to it."""
HANGS = f"""
{SPEAKS}
import time
tell("ready")
time.sleep(600)
"""
"""It does not even read what is said to it."""
WAKES = f"""
{SPEAKS}
import os, time
tell("ready")
while not os.path.exists(os.environ["STAND_IN_WAKES"]):
    time.sleep(0.01)
while (body := next_body(sock, frames)) is not None:
    tell("heard", message=repr(CODEC.read(body)))
"""
"""It reads nothing until there is a file of that name, then all, and says what."""
DIES = """
import sys
sys.stderr.write("the cause: \\u00fc\\n")
sys.exit(3)
"""


PR_SET_CHILD_SUBREAPER = 36


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def started(
    text: str, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> tuple[LearnerProcess, Path]:
    (folder / "stand_in.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    log = folder / "learner.log"
    return LearnerProcess({}, "stand_in", log, clock), log


def wait_until(what: Any) -> None:
    deadline_s = time.monotonic() + 280
    while not what():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


def watched(process: LearnerProcess, clock: Clock, seconds: float) -> None:
    for _ in range(int(seconds)):
        clock.now_s += 1
        process.watch()


def say_more_than_a_socket_holds(process: LearnerProcess) -> None:
    """In a thread of its own, so that a test ends even where that never returns."""

    def say() -> None:
        for number in range(10_000):
            process.tell_costs(number % 2, 0.5)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    thread.join(timeout=120)
    if thread.is_alive():
        os.kill(process.pid or 0, signal.SIGKILL)
        pytest.fail("it waits for a process that does not read")


def test_a_process_that_reads_nothing_stops_nobody_and_is_ended(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = started(HANGS, tmp_path, clock, monkeypatch)
    try:
        process.watch()
        first = process.pid
        assert process.messages.get(timeout=120) == {"event": "ready"}
        say_more_than_a_socket_holds(process)
        watched(process, clock, SILENT_S + 1)
        assert "hangs" in process.fault
        watched(process, clock, KILL_S - SILENT_S)
        assert process.num_deaths == 1
        assert process.pid not in (None, first)
    finally:
        process.close()


def test_what_it_could_not_take_is_said_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes = tmp_path / "wakes"
    monkeypatch.setenv("STAND_IN_WAKES", str(wakes))
    process, _ = started(WAKES, tmp_path, clock, monkeypatch)
    heard: list[str] = []

    def is_all_heard() -> bool:
        process.watch()
        while not process.messages.empty():
            heard.append(process.messages.get().get("message", ""))
        return heard[-1:] == [repr(DraftingCosts(1.0, 0.5))]

    try:
        process.watch()
        say_more_than_a_socket_holds(process)
        wakes.touch()
        wait_until(is_all_heard)
        assert len(heard) < 10_000, "what the socket did not take is not said later"
    finally:
        process.close()


def test_a_process_that_hangs_raises_an_alarm_and_is_ended(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, log = started(ANSWERS, tmp_path, clock, monkeypatch)
    try:
        process.watch()
        first = process.pid
        assert process.messages.get(timeout=120) == {"event": "begun"}
        process.pause()
        watched(process, clock, 2 * KILL_S)
        assert process.fault == "", "it is stopped"
        assert process.rested_s == pytest.approx(2 * KILL_S, abs=2)
        process.resume()
        watched(process, clock, SILENT_S - 2)
        assert process.fault == ""
        watched(process, clock, 3)
        assert process.fault.startswith("the learner's process hangs: nothing was heard of it for 300 s")
        assert str(log) in process.fault
        process.tell_costs(0.1, 0.2)
        wait_until(lambda: process.fault == "")
        watched(process, clock, KILL_S - 1)
        assert "hangs" in process.fault
        watched(process, clock, 2)
        assert process.num_deaths == 1
        assert process.pid not in (None, first)
    finally:
        process.close()


def test_a_clock_that_jumps_is_no_silence(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = started(HANGS, tmp_path, clock, monkeypatch)
    try:
        process.watch()
        process.messages.get(timeout=120)
        clock.now_s += 10 * KILL_S  # this process was stopped, the learner with it
        process.watch()
        assert process.fault == ""
    finally:
        process.close()


def test_the_alarm_of_one_that_died_names_the_file_with_the_cause(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, log = started(DIES, tmp_path, clock, monkeypatch)

    def given_up() -> bool:
        process.watch()
        return process.num_deaths >= MAX_STARTS

    wait_until(given_up)
    assert process.fault == f"the learner's process died with exit code 3; what it wrote is in {str(log)!r}"
    wait_until(lambda: log.read_text("utf-8") == MAX_STARTS * "the cause: ü\n")
    assert log.stat().st_mode & 0o777 == 0o600
    process.close()


def test_the_log_is_bounded_and_keeps_the_latest(tmp_path: Path) -> None:
    log = LearnerLog(tmp_path / "learner.log", max_bytes=1000)
    for number in range(500):
        log.add(f"line {number}\n")
        assert log.file.stat().st_size <= 1000
    lines = log.file.read_text().splitlines()
    assert lines[-1] == "line 499"
    assert all(line.startswith("line ") for line in lines)
    log.add("x" * 5000)
    assert log.file.stat().st_size <= 1000


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = tmp_path / "text"
    text.write_text("one\ntwo\n")
    stream = text.open()
    LearnerLog(tmp_path / "file" / "learner.log").follow(stream)
    assert stream.closed


def state_of(pid: int) -> str:
    """As the system tells it; empty where there is no such process."""
    try:
        status: str = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""
    return status


def test_it_is_stopped_at_any_instant_and_goes_on(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    process, _ = started(ANSWERS, tmp_path, clock, monkeypatch)
    try:
        process.pause()  # there is none yet
        assert not process.rests
        process.watch()
        process.pause()  # it has not begun: killed now, this process would leave it stopped
        assert not process.rests
        assert process.messages.get(timeout=120) == {"event": "begun"}
        pid = process.pid
        assert pid is not None
        process.pause()
        wait_until(lambda: state_of(pid) == psutil.STATUS_STOPPED)
        assert process.rests
        process.tell_costs(0.1, 0.2)
        time.sleep(0.2)
        assert process.messages.empty(), "it does not even hear what is said to it"
        process.resume()
        assert process.messages.get(timeout=120) == {"event": "alive"}
        assert not process.rests
        process.pause()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: state_of(pid) in ("", psutil.STATUS_ZOMBIE))
        process.watch()
        assert process.num_deaths == 1
        assert not process.rests, "the next one is not stopped"
        assert process.messages.get(timeout=120) == {"event": "begun"}
    finally:
        process.close()


def test_it_is_given_leave_to_keep(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    process, _ = started(ANSWERS, tmp_path, clock, monkeypatch)
    try:
        process.watch()
        assert process.messages.get(timeout=120) == {"event": "begun"}
        process.let_keep()
        assert process.messages.get(timeout=120) == {"event": "alive"}
    finally:
        process.close()


KILLED = """
import time
from slipstream.learn.background.learner_process import LearnerProcess
process = LearnerProcess({}, "stand_in")
process.watch()
process.messages.get(timeout=120)
process.pause()
print(process.pid, flush=True)
time.sleep(600)
"""


def test_one_that_is_stopped_does_not_outlive_a_server_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where somebody of the same session adopts it, as the first process of a container does."""
    (tmp_path / "stand_in.py").write_text(ANSWERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.pathsep.join(sys.path)}")
    adopts = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    if adopts is not None:
        adopts(PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        learner = int(server.stdout.readline())
        wait_until(lambda: state_of(learner) == psutil.STATUS_STOPPED)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        if adopts is not None:
            adopts(PR_SET_CHILD_SUBREAPER, 0)
    wait_until(lambda: state_of(learner) in ("", psutil.STATUS_ZOMBIE))


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no idle class")
@pytest.mark.parametrize(("niceness", "idle"), [(19, True), (3, False)])
def test_a_learner_runs_where_nobody_else_wants_to(niceness: int, idle: bool) -> None:
    code = (
        "import os\nfrom slipstream.learn.background.learner import stand_back\n"
        f"stand_back({niceness})\nprint(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(min(os.nice(0) + niceness, 19)), str(idle)]
