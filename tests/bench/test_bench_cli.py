"""The verb: what it refuses before any work, what it costs to import, where results go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.profiling.provenance import command, commit, provenance

ROOT = Path(__file__).parents[2]


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", *args])


REFUSALS = {
    "unknown drafter": (["--spec", "ngarm"], "did you mean 'ngram'?"),
    "only off": (["--spec", "off"], "nothing to compare with speculation off"),
    "a model without a drafter": (["some/model"], "nothing to compare with speculation off; choose drafters"),
    "draft of another target": (["some/model", "--spec", "draft"], "--spec draft:PATH"),
    "lengths": (["--num-speculative-tokens", "2,x"], "--num-speculative-tokens takes whole numbers"),
    "length 0": (["--num-speculative-tokens", "0"], "of at least 1"),
    "concurrency": (["--concurrency", "1,,2"], "--concurrency takes whole numbers"),
    "max_tokens": (["--max-tokens", "many"], "--max-tokens takes a whole number of at least 1, or data"),
    "max_tokens 0": (["--max-tokens", "0"], "--max-tokens takes a whole number"),
    "temperature": (["--temperature", "-1"], "temperature must be a finite number"),
    "workload": (
        ["--workload", "prompts.txt"],
        "is none of sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE",
    ),
    "no file": (["--workload", "nowhere.jsonl"], "there is no file 'nowhere.jsonl'"),
    "verifier": (["--verifier", "couple"], "did you mean 'coupled'?"),
    "served model without url": (["--served-model", "x"], "--served-model is about a server; give its --url"),
    "metrics without url": (["--metrics-url", "x"], "--metrics-url is about a server"),
    "output is a file": (["--output", "README.md"], "cannot write 'README.md': is no folder"),
    "html in no folder": (
        ["--html", "no/such/folder/x.html"],
        "cannot write 'no/such/folder/x.html': there is no folder",
    ),
    "nobody there": (
        ["--url", "http://127.0.0.1:9/v1", "--timeout-s", "5"],
        "cannot reach http://127.0.0.1:9/v1",
    ),
    "no url": (["--url", "127.0.0.1"], "cannot reach 127.0.0.1"),
    "data without references": (
        ["--max-tokens", "data", "--kv-cache-bytes", "32MiB"],
        "neither output_tokens nor a reference",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        "logging.raiseExceptions", False
    )  # of handlers that other tests have left, with closed streams
    args, error = REFUSALS[case]
    done = run(*args)
    assert done.exit_code == 2
    assert error in done.stderr
    *before, line = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert [said.partition(" ")[0] for said in before] in ([], ["measuring"])
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("args", "name"), [(["--output", "{}"], "bench.json"), (["--html", "{}/page.html"], "page.html")]
)
def test_a_report_is_not_written_over_unless_asked(args: list[str], name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("an hour's work")
    found = [arg.format(tmp_path) for arg in args]
    done = run(*found, "--workload", "nowhere.jsonl")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: cannot write '{tmp_path / name}': it is there already")
    assert "--overwrite" in done.stderr
    assert "no file 'nowhere.jsonl'" in run(*found, "--overwrite", "--workload", "nowhere.jsonl").stderr
    assert (tmp_path / name).read_text() == "an hour's work"


def test_results_are_printed_and_written(tmp_path: Path) -> None:
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"prompt": "SELECT name FROM"}\n')
    args = [
        "--workload",
        str(workload),
        "--max-tokens",
        "6",
        "--repeats",
        "1",
        "--raw",
        "--kv-cache-bytes",
        "40MiB",
    ]
    done = run(*args, "--num-speculative-tokens", "1,2", "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 0, done.output
    for text in ("draft γ=1", "draft γ=2", "1 of 1", "peak memory", "1 (few)", "No conclusion: draft γ="):
        assert text in done.stdout
    assert "written:" in done.stderr
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert not (tmp_path / "bench.json").exists()


def test_starting_the_command_loads_nothing_heavy() -> None:
    heavy = ("torch", "scipy", "matplotlib", "httpx2", "prometheus_client", "numpy", "slipstream.tools.bench")
    program = f"import slipstream.cli.main, sys; print([n for n in {heavy!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_server_is_benched_without_loading_a_model() -> None:
    modules = "slipstream.tools.bench.server.remote, slipstream.tools.bench.report.server_report, sys"
    program = f"import {modules}; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_provenance() -> None:
    found = provenance()
    assert json.loads(json.dumps(found)) == found
    assert {"date", "commit", "command", "python", "slipstream", "versions", "cpu", "threads"} <= found.keys()
    assert found["versions"]["torch"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert (commit() or "").removesuffix("+changes") == head.stdout.strip()


def test_commands_name_no_more_of_a_path_than_a_reader_can_use() -> None:
    assert command(["/opt/bin/slipstream", "bench", "--max-tokens", "8"]) == "slipstream bench --max-tokens 8"
    told = [
        "/opt/bin/slipstream",
        "bench",
        "/home/me/model",
        "--spec",
        "draft:/a/b/c",
        "--output=/tmp/x",
        "d/e",
    ]
    assert command(told) == "slipstream bench model --spec draft:c --output=x d/e"
    assert command(["slipstream", "bench", "--url", "http://host:1/v1/x"]).endswith("http://host:1/v1/x")
    assert command(["/opt/slipstream/cli/__main__.py", "a b"]) == "slipstream 'a b'"
    told = command([str(ROOT / "benchmarks/control/__main__.py"), "--rounds", "3"])
    assert told == "python -m benchmarks.control --rounds 3"
    told = command([str(ROOT / "benchmarks/start.py"), "--models", "1g"])
    assert told == "python -m benchmarks.start --models 1g"
    assert command(["/elsewhere/run.py"]) == "python run.py"
