"""`slipstream serve`: flags, environment, file, and a process from start to SIGTERM."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from serve_cases import wait_until
from typer.main import get_command
from typer.testing import CliRunner

from slipstream.cli.flags.options import ENGINE, SPECULATION
from slipstream.cli.flags.settings import merged
from slipstream.cli.main import app
from slipstream.cli.serve import SERVER
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.learn.records.served import ServedRecord
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import Ring, RingIdentity, read_ring
from slipstream.serve.config import ServeConfig
from slipstream.serve.learning import retention_thread

TOML = """
model = "from-file"
port = 1
max_num_seqs = 2
max_body_bytes = "1MiB"
api_key = ["one", "two"]
per_request_metrics = true

[speculative_config]
method = "ngram"
num_speculative_tokens = 3
"""
YAML = """
model: from-file
port: 1
max_num_seqs: 2
max_body_bytes: 1MiB
api_key: [one, two]
per_request_metrics: true
speculative_config: {method: ngram, num_speculative_tokens: 3}
"""


def settings(
    file: Path | None = None,
    environment: dict[str, str] | None = None,
    model: str | None = None,
    **flags: Any,
) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """What `serve` makes of its three sources."""
    sets = {"server": SERVER, "speculation": SPECULATION, "engine": ENGINE}
    given = {
        name: (flag_set, {f.name: flags[f.name] for f in flag_set.fields() if f.name in flags})
        for name, flag_set in sets.items()
    }
    return merged(model, given, file, environment or {})


@pytest.fixture(params=["toml", "yaml"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"serve.{request.param}"
    path.write_text(TOML if request.param == "toml" else YAML)
    return path


def test_a_file(file: Path) -> None:
    model, values = settings(file)
    assert model == "from-file"
    assert values["server"] == {
        "port": 1,
        "max_body_bytes": 2**20,
        "api_key": ["one", "two"],
        "per_request_metrics": True,
    }
    assert values["engine"] == {"max_num_seqs": 2}
    assert json.loads(values["speculation"]["speculative_config"])["num_speculative_tokens"] == 3


def test_the_environment_goes_before_the_file_and_flags_before_both(file: Path) -> None:
    environment = {
        "SLIPSTREAM_PORT": "2",
        "SLIPSTREAM_API_KEY": "three, four",
        "SLIPSTREAM_PER_REQUEST_METRICS": "off",
        "SLIPSTREAM_MAX_BODY_BYTES": "2KB",
        "SLIPSTREAM_REQUEST_TIMEOUT_S": "1.5",
        "SLIPSTREAM_MODEL": "from-environment",
        "SLIPSTREAM_CACHE": "/somewhere",
    }
    model, values = settings(file, environment, port=3)
    assert model == "from-environment"
    assert values["server"] == {
        "port": 3,
        "max_body_bytes": 2000,
        "api_key": ["three", "four"],
        "per_request_metrics": False,
        "request_timeout_s": 1.5,
    }
    assert settings(file, environment, model="flag")[0] == "flag"


def test_a_drafter_that_is_given_replaces_the_one_below(file: Path) -> None:
    assert settings(file, spec="off")[1]["speculation"] == {"spec": "off"}
    assert settings(file, {"SLIPSTREAM_DRAFT": "d"})[1]["speculation"] == {"draft": "d"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.toml", "prot = 1", "did you mean 'port'?"),
        ("a.toml", "port = ", "not valid TOML"),
        ("a.yaml", "port: [", "not valid YAML"),
        ("a.yaml", "- port", "names and values"),
        ("a.json", "{}", "neither .toml nor .yaml"),
        ("a.toml", 'max_body_bytes = "big"', "not a size"),
        ("a.toml", 'per_request_metrics = "maybe"', "true or false"),
        ("a.toml", 'port = "http"', "must be a number"),
        ("a.toml", "model = 5", "folder or hub id"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SlipstreamError) as caught:
        settings(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        settings(tmp_path / "nothing.toml")


def test_help_is_complete_and_names_the_environment() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    for flag in (
        "--port",
        "--api-key",
        "--max-waiting",
        "--config",
        "--spec",
        "--max-num-seqs",
        "--metrics-alias",
    ):
        assert flag in text
    assert "SLIPSTREAM_MAX_NUM_SEQS" in text


@pytest.mark.parametrize("verb", ["serve", "generate", "train"])
def test_help_cuts_no_name_and_eats_no_brackets(verb: str) -> None:
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    words = [verb]
    if verb == "train":
        words.append("eagle3")
        command = command.commands["eagle3"]
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    for parameter in command.params:
        for name in parameter.opts if parameter.param_type_name == "option" else ():
            assert re.search(rf"{name}\b", result.output), name
    assert "…\n" not in result.output
    if verb == "serve":
        assert "slipstream-llm[otel]" in result.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "70000"], "0 to 65535"),
        (["--log-level", "loud"], "unknown log_level"),
        (["--spec", "ngarm"], "did you mean 'ngram'?"),
        (["--host", "256.1.1.1"], "cannot listen"),
        (["--config", "{folder}/spec.toml"], "speculation spec must be"),
    ],
)
def test_refusals(tmp_path: Path, flags: list[str], says: str) -> None:
    (tmp_path / "spec.toml").write_text("spec = 5")
    result = CliRunner().invoke(app, ["serve", *(flag.format(folder=tmp_path) for flag in flags)])
    assert result.exit_code == 2
    assert says in result.output


def test_a_port_that_is_taken_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(app, ["serve", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2
    assert "cannot listen" in result.output
    assert "memory:" not in result.output


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A server that takes requests, its address and its log."""
    log = folder / "log"
    with log.open("w") as stderr:
        started = subprocess.Popen(
            [
                *(sys.executable, "-m", "slipstream.cli.main", "serve", "--port", "0", "--threads", "1"),
                *("--kv-cache-bytes", "40MiB", "--max-num-seqs", "2", *flags),
            ],
            stderr=stderr,
            text=True,
        )
    try:
        wait_until(lambda: started.poll() is not None or '"port": ' in log.read_text(), 800)
        found = re.search(r'"port": (\d+)', log.read_text())
        assert found, log.read_text()
        yield started, f"http://127.0.0.1:{found[1]}", log
    finally:
        started.kill()
        started.wait()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    with serving(tmp_path, "--grace-period-s", "200") as found:
        yield found


@pytest.mark.timeout(900)
def test_a_drafter_that_cannot_learn_serves_and_deletes_old_answers_all_the_same(tmp_path: Path) -> None:
    folder = LearnFolder(tmp_path / "learn")
    ring = Ring(folder, RingIdentity("model", "template"), 2**20)
    none = np.zeros(0, np.int32)
    for number, began_s in enumerate((1000.0, time.time())):
        ring.append(ServedRecord(f"{number}", "model", "template", none, none, created_s=began_s))
    ring.close()
    flags = ("--one-process", "--spec", "ngram", "--learn", str(folder.path), "--learn-max-age", "30d")
    with serving(tmp_path, *flags) as (_, url, log):
        body = {"prompt": "Once", "max_tokens": 3}
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=240).status_code == 200
        logged = [json.loads(line) for line in log.read_text().splitlines()]
        wait_until(lambda: [one.request_id for one in read_ring(folder)] == ["1"])
    [line] = [one["message"] for one in logged if "nothing is learned" in one["message"]]
    assert line == (
        "nothing is learned: drafter 'ngram' learns by itself: its tables take in every answer; "
        "--learn is for draft_model, eagle3, eagle, self and layer_skip; serving goes on"
    )


def test_where_nothing_is_learned_no_folder_is_made(tmp_path: Path) -> None:
    assert retention_thread(ServeConfig(learn=str(tmp_path / "learn"))) is None
    assert not (tmp_path / "learn").exists()


@pytest.mark.timeout(900)
def test_a_process_from_start_to_sigterm(process: tuple[subprocess.Popen[str], str, Path]) -> None:
    started, url, log = process
    body = {"prompt": "Once", "max_tokens": 800, "ignore_eos": True, "stream": True}
    with httpx2.Client(timeout=240) as client:
        assert client.get(f"{url}/v1/models").json()["data"][0]["id"] == "embedded-pair"
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            started.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert started.wait(timeout=120) == 0
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert "draining, 1 under way, up to 200 s" in [line["message"] for line in logged]
    [request] = [line for line in logged if line.get("path") == "/v1/completions"]
    assert request["output_tokens"] == 800
    assert "memory:" in log.read_text()


def test_names_of_the_release_before_work_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("learn_lanes: 5\n")
    assert settings(file)[1]["server"] == {"learn_versions": 5}
    assert settings(None, {"SLIPSTREAM_LEARN_LANES": "6"})[1]["server"] == {"learn_versions": 6}
    assert caplog.messages == [
        f"setting in {file} 'learn_lanes' is now called 'learn_versions'",
        "setting in the environment 'learn_lanes' is now called 'learn_versions'",
    ]
    file.write_text("learn_lanes: 5\nlearn_versions: 6\n")
    with pytest.raises(
        ConfigError, match="old name of 'learn_versions', which is given too; omit 'learn_lanes'"
    ):
        settings(file)


def test_flags_of_the_release_before_work_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for flag in (["--learn-lanes=0"], ["--learn-lanes", "0"]):
        result = CliRunner().invoke(app, ["serve", *flag])
        assert "learn_versions must be" in result.stderr
    assert caplog.messages == ["--learn-lanes is now called --learn-versions"] * 2
