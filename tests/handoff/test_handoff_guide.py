"""The guide's commands are the command line's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from slipstream.cli.main import app
from slipstream.control.monitor.alarms import LEARN_KINDS, AlarmKind
from slipstream.tools.handoff.plan import OffSide

PAGE = (Path(__file__).parents[2] / "docs/guides/handoff.md").read_text()
LINES = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()
]


@pytest.mark.parametrize("line", LINES)
def test_its_commands_are_understood(line: str) -> None:
    program, verb, *words = shlex.split(line)
    assert program == "slipstream"
    command: Any = get_command(app)
    command = command.commands[verb]
    if verb == "handoff":
        command, words = command.commands[words[0]], words[1:]
    parsed = command.make_context(verb, words).params
    assert set(parsed) >= {"url"} if verb != "handoff" else {"attach", "off_side"}


def test_its_defaults_and_names_are_the_codes() -> None:
    command: Any = get_command(app)
    defaults = {each.name: each.default for each in command.commands["handoff"].commands["vllm"].params}
    assert (defaults["port"], defaults["watch_port"], defaults["off_side"]) == (8000, 8001, "none")
    for kind in set(AlarmKind) - set(LEARN_KINDS):
        assert f"`{kind}`" in PAGE
    for side in OffSide:
        assert side == OffSide.NONE or f"--off-side {side}" in PAGE
    named = set(re.findall(r"(--[a-z][\w-]+)", PAGE)) - {
        "--tensor-parallel-size",
        "--version",
        "--concurrency",
    }
    options = {flag for each in command.commands["handoff"].commands["vllm"].params for flag in each.opts}
    assert named - options <= {"--url", "--duration"}
