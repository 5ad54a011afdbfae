"""What is typed at `slipstream chat`: edited on a terminal, brought back by the arrow keys, kept privately."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.cli.output.lines import MAX_LINE_BYTES, MAX_LINES, LineHistory

pytest.importorskip("readline")

SCRIPT = """
import sys
from slipstream.cli.output.lines import typed_lines
for line in typed_lines(sys.argv[1] == "yes"):
    print(f"<{line}>", flush=True)
"""
UP, LEFT = b"\x1b[A", b"\x1b[D"


def talk(folder: Path, typed: list[bytes], history: bool = True, command: list[str] | None = None) -> str:
    """What a terminal shows while lines are typed, each once the one before has been taken; Ctrl-D at the end."""
    command = command or [sys.executable, "-c", SCRIPT, "yes" if history else "no"]
    environment = os.environ | {"SLIPSTREAM_CACHE": str(folder), "TERM": "xterm", "INPUTRC": "/dev/null"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    shown = b""
    end = time.monotonic() + 240
    waiting = [*typed, b"\x04"]
    prompts = 0
    try:
        while time.monotonic() < end:
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end has closed
                break
            if waiting and shown.endswith(b"> ") and shown.count(b"> ") > prompts:
                prompts = shown.count(b"> ")
                os.write(ours, waiting.pop(0))
        assert process.wait(120) == 0, shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert not waiting, shown
    return shown.decode()


def test_lines_are_edited_and_come_back_in_the_next_chat(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shown = talk(folder, [b"tr" + LEFT + b"a\x05!\n", UP + b"?\n", b"\n"])
    assert "<tar!>" in shown
    assert "<tar!?>" in shown
    path = folder / "chat_history"
    assert path.read_text() == "tar!\ntar!?\n"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    shown = talk(folder, [UP + UP + b" again\n"])
    assert "<tar! again>" in shown
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_history_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "chat_history").write_text("before\n")
    shown = talk(tmp_path, [UP + b"one\n", UP + b" two\n"], history=False)
    assert "<one>" in shown
    assert "<one two>" in shown, "within one chat the arrow keys work"
    assert (tmp_path / "chat_history").read_text() == "before\n"


def test_a_place_that_cannot_be_written_costs_a_note(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = talk(tmp_path / "file" / "cache", [b"one\n"])
    assert "the history is not stored" in shown
    assert "<one>" in shown


def test_the_history_is_bounded(tmp_path: Path) -> None:
    history = LineHistory(tmp_path / "deep" / "chat_history")
    assert history.read() == []
    for number in range(MAX_LINES + 50):
        history.add(f"line {number}")
    history.add("x" * (MAX_LINE_BYTES + 1))
    history.add("two\nlines\ud800")
    kept = history.read()
    assert kept[-2:] == [f"line {MAX_LINES + 49}", "two lines?"]
    assert len(kept) == MAX_LINES
    assert history.path.read_text() == "".join(f"{line}\n" for line in kept)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "chat_history").symlink_to(tmp_path / "another")
    with pytest.raises(OSError, match="symbolic"):
        LineHistory(tmp_path / "chat_history").read()
    LineHistory(tmp_path / "chat_history").add("line")
    assert not (tmp_path / "another").exists()


@pytest.mark.long
def test_a_chat_on_a_terminal(tmp_path: Path) -> None:
    options = [
        "--temperature",
        "0",
        "--max-tokens",
        "4",
        "--cpu-kernels",
        "torch",
    ]  # compiled ones are in the cache
    command = [sys.executable, "-m", "slipstream.cli.main", "chat", *options]
    shown = talk(tmp_path, [b"Show me tra" + b"\x7f\x7far.\n", b"/reset\n", UP + UP + b"\n"], command=command)
    assert shown.count("[4 tokens") == 2
    assert (tmp_path / "chat_history").read_text() == "Show me tar.\n/reset\nShow me tar.\n"
