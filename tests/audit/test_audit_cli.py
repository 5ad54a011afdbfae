"""The verb: what it refuses before any work, exit codes, where the certificate goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import serve
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.tools.audit.remote import counting

SMALL = ["--answers", "4", "--max-tokens", "8", "--prompts", "2"]


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["audit", *args])


REFUSALS = {
    "off": (["--spec", "off"], "there is no speculation to audit; choose a drafter, as in --spec ngram"),
    "a model without a drafter": (["some/model"], "there is no speculation to audit"),
    "against without a server": (["--against", "http://x/v1"], "--against is about a server; give its URL"),
    "two comparisons": (
        ["http://x", "--against", "http://y", "--reference", "z/z"],
        "--against and --reference both say what to compare with",
    ),
    "speculation of a server": (
        ["http://127.0.0.1:9", "--spec", "ngram"],
        "the server has its own speculation",
    ),
    "nobody there": (["http://127.0.0.1:9/v1", "--timeout-s", "5"], "cannot reach http://127.0.0.1:9/v1"),
    "confidence": (["--confidence", "1"], "--confidence must be at least 0.5 and below 1, got 1.0"),
    "mix": (["--mix", "fill"], "--mix must be full, served, common, samples, plain, greedy, got 'fill'"),
    "mix and parameters": (["--mix", "full", "--top-p", "0.5"], "--mix and sampling flags both choose"),
    "resume without a folder": (["--resume"], "--resume needs the folder of --output"),
    "no workload": (["--workload", "nowhere.jsonl"], "there is no file 'nowhere.jsonl'"),
    "tie margin": (["--tie-margin", "-1"], "--tie-margin must be at least 0 nats"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    args, error = REFUSALS[case]
    done = run(*args)
    assert done.exit_code == 2
    assert error in done.stderr
    *before, line = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert [said.partition(" ")[0] for said in before] in ([], ["auditing"])
    assert done.stdout == ""


def test_exit_codes_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "PATIENCE_S", 0.0)  # the fake engine's counters are never late
    folder = tmp_path / "audit"
    with serve() as one, serve() as other, serve(usage_factor=2) as faulty:
        done = run(one.url, "--against", other.url, *SMALL, "--output", str(folder))
        assert done.exit_code == 0, done.output
        assert "Certified. No deviation from http://127.0.0.1" in done.stdout
        assert {file.name for file in folder.iterdir()} == {"certificate.json", "audit.html", "answers.jsonl"}
        certificate = json.loads((folder / "certificate.json").read_text())
        assert certificate["decision"] == "certified"
        assert certificate["provenance"]["command"]
        again = run(one.url, "--against", other.url, *SMALL, "--output", str(folder))
        assert again.exit_code == 2
        assert "it is there already" in again.stderr
        done = run(faulty.url.removesuffix("/v1"), "--against", other.url, *SMALL, "--json")
        assert done.exit_code == 1
        found = json.loads(done.stdout)
        assert found["decision"] == "not certified"
        assert any(reason.startswith("usage: ") for reason in found["reasons"])
        alone = run(one.url, *SMALL)
        assert alone.exit_code == 2
        assert "cannot turn speculation off for a request; give --against URL" in alone.stderr


def test_a_server_that_dies_leaves_the_exit_code_of_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "PATIENCE_S", 0.0)
    args = ["--answers", "40", "--max-tokens", "8", "--output", str(tmp_path / "audit")]
    with serve(fails_after=75) as one, serve() as other:
        done = run(one.url, "--against", other.url, *args)
    assert done.exit_code == 2, "130 is that of Ctrl-C"
    certificate = json.loads((tmp_path / "audit/certificate.json").read_text())
    assert certificate["decision"] == "could not tell"
    assert not certificate["complete"]
    assert not certificate["interrupted"]


def test_a_fault_of_the_audit_itself_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr("slipstream.tools.audit.local.run_local", fail)
    done = run("--spec", "ngram")
    assert done.exit_code == 2
    assert "the audit itself failed, and nothing is certified: ZeroDivisionError: of its own" in done.stderr
    monkeypatch.setattr("slipstream.tools.audit.local.run_local", lambda plan: None)
    done = run("--spec", "ngram")
    assert done.exit_code == 2, "nor is a certificate that cannot be shown"
    assert "the audit itself failed, and nothing is certified: AttributeError" in done.stderr
