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

from slipstream import LLM, SamplingParams
from slipstream.cli.main import app
from slipstream.serve.config import ServeConfig

SECTION = (Path(__file__).parents[2] / "README.md").read_text().split("\n## Serve it\n")[1].split("\n## ")[0]
WRITTEN = "http://127.0.0.1:8000"


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)[number]


@pytest.fixture
def url(make_app: MakeApp) -> Iterator[str]:
    """The server of `slipstream serve`, elsewhere."""
    with running(make_app(served_model_name="embedded-pair")) as (url, _):
        yield url


def said_without_speculation(plain: LLM, messages: list[dict[str, str]], seed: int) -> str:
    """The text of an engine that never drafts, with the server's defaults and the README's 32 tokens."""
    [output] = plain.chat([messages], SamplingParams(seed=seed, max_tokens=32))
    return output.outputs[0].text


def test_its_commands_run(url: str, tmp_path: Path) -> None:
    serve, load = (shlex.split(line, comments=True)[1:] for line in block("sh").splitlines())
    verbs: Any = get_command(app)
    settings = verbs.commands["serve"].make_context("serve", serve[1:]).params
    assert settings["port"] is None, "8000, as it says"
    assert ServeConfig().port == 8000
    assert ServeConfig().host == "127.0.0.1"
    assert load[1] == WRITTEN
    report = tmp_path / "load.json"
    given = ["--max-tokens", "4", "--output", str(report)]
    done = CliRunner().invoke(app, ["load", url, *load[2:], *given])
    assert done.exit_code == 0, done.output
    assert "by status: 200: 50" in done.stdout
    result = json.loads(report.read_text())
    assert result["complete"]
    requests = result["requests"]
    assert [request["status"] for request in requests] == [200] * 50
    tasks = {request["task"] for request in requests}
    assert len(tasks) == 7
    assert all(0 < request["time_to_first_token_s"] <= request["latency_s"] for request in requests)
    assert all(1 <= request["num_output_tokens"] <= 4 for request in requests)
    measured = [figures for figures in result["figures"] if figures["task"] is not None]
    assert {figures["task"] for figures in measured} == tasks, "acceptance by task, as the comment says"
    every = next(figures for figures in result["figures"] if figures["task"] is None)
    assert every["num_requests"] == 50
    assert every["tokens_per_s"] > 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_its_curl_is_answered(url: str, plain: LLM, tmp_path: Path) -> None:
    words = shlex.split(block("sh", 1).replace("\\\n", " ").replace(WRITTEN, url))
    assert words[0] == "curl"
    headers = tmp_path / "headers"
    done = subprocess.run(
        [*words, "-sS", "--noproxy", "*", "-D", str(headers)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answer = json.loads(done.stdout)
    assert (answer["object"], answer["model"]) == ("chat.completion", "embedded-pair")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert 1 <= usage["completion_tokens"] <= 32
    assert (usage["completion_tokens"] == 32) or choice["finish_reason"] == "stop"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    seed = re.search(r"^x-slipstream-seed: (\d+)", headers.read_text(), re.MULTILINE | re.IGNORECASE)
    assert seed is not None
    asked = json.loads(words[words.index("-d") + 1])["messages"]
    assert choice["message"]["content"] == said_without_speculation(plain, asked, int(seed[1]))


def test_its_client_runs(url: str, plain: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    program = block("py").replace(WRITTEN, url)
    assert program.count("stream=True") == 1
    namespace: dict[str, Any] = {}
    exec(program.replace("stream=True", "stream=True, seed=5"), namespace)
    namespace["client"].close()
    printed = capsys.readouterr().out
    assert printed == said_without_speculation(plain, namespace["messages"], seed=5)
    assert printed.startswith("SELECT")
    assert namespace["chunk"].choices[0].finish_reason in ("stop", "length")
