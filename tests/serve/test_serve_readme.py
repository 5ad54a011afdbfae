"""The README's `Serve it`: its commands, its curl and its client run, against a server on a port of the test's own."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_cases import MakeApp, running
from typer.main import get_command
from typer.testing import CliRunner

from slipstream.cli.main import app

SECTION = (Path(__file__).parents[2] / "README.md").read_text().split("\n## Serve it\n")[1].split("\n## ")[0]
WRITTEN = "http://127.0.0.1:8000"


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)[number]


@pytest.fixture
def url(make_app: MakeApp) -> Iterator[str]:
    """The server of `slipstream serve`, elsewhere."""
    with running(make_app(served_model_name="embedded-pair")) as (url, _):
        yield url


def test_its_commands_run(url: str) -> None:
    serve, load = (shlex.split(line, comments=True)[1:] for line in block("sh").splitlines())
    verbs: Any = get_command(app)
    assert verbs.commands["serve"].make_context("serve", serve[1:]).params["port"] is None, "8000, as it says"
    assert load[1] == WRITTEN
    done = CliRunner().invoke(app, ["load", url, *load[2:], "--max-tokens", "4"])
    assert done.exit_code == 0, done.output
    assert "by status: 200: 50" in done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_its_curl_is_answered(url: str) -> None:
    words = shlex.split(block("sh", 1).replace("\\\n", " ").replace(WRITTEN, url))
    assert words[0] == "curl"
    done = subprocess.run(
        [*words, "-sS", "--noproxy", "*"], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["usage"]["completion_tokens"] <= 32


def test_its_client_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    exec(block("py").replace(WRITTEN, url), namespace)
    namespace["client"].close()
    assert len(capsys.readouterr().out) > 5
