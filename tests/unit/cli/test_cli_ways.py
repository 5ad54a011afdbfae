"""The command line's ways of naming things, and what it says beside an answer."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.cli.main import app

pytestmark = pytest.mark.usefixtures("shared_engines")


def run(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize(
    "verb",
    [
        ["bench", "--repeats", "0"],
        ["info", "--quick"],
        ["serve", "--port", "-1"],
        ["tree", "--file", "no.jsonl"],
    ],
    ids=lambda verb: verb[0],
)
def test_a_model_is_an_argument_or_a_flag(verb: list[str]) -> None:
    """What is refused behind the model is refused alike, and two models are one too many."""
    said = {
        run(*verb, *way).output
        for way in (["a/there"], ["--model", "a/there"], ["-m", "a/there"], ["a/there", "-m", "a/there"])
    }
    assert len(said) == 1
    two = run(verb[0], "a/here", "--model", "a/there")
    assert two.exit_code == 2
    assert "two models are given: 'a/here' and --model 'a/there'; omit one of them" in two.output


def test_chat_without_a_template_says_raw(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED_DRAFT, tmp_path / "model", ignore=shutil.ignore_patterns("*.jinja"))
    result = run("generate", "hi", "--chat", "--model", str(tmp_path / "model"))
    assert result.exit_code == 2
    assert "has no chat template, which --chat needs; use --raw" in result.output


def test_a_drafter_of_ones_own_by_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_drafters.py").write_text(
        "from slipstream.draft.lookup.ngram import NgramDrafter\n\n\nclass Mine(NgramDrafter):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    args = ["generate", "one two one two one", "--raw", "--temperature", "0", "--max-tokens", "8", "--json"]
    result = run(*args, "--spec", "my_drafters:Mine")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["speculation"]["method"] == "my_drafters:Mine"
    missing = run(*args, "--spec", "no_such_module:Mine")
    assert missing.exit_code == 2
    assert (
        "'no_such_module:Mine' cannot be loaded: No module named 'no_such_module'; modules are searched"
        in missing.output
    )
    misspelt = run(*args, "--spec", "my_drafters:Mime")
    assert misspelt.exit_code == 2
    assert (
        "module 'my_drafters' has no attribute 'Mime'\n" in misspelt.output
    )  # found, so nothing about where to look
    assert "unknown drafter 'draf'; did you mean 'draft'?" in run(*args, "--spec", "draf").output
    assert "is vLLM's" in run(*args, "--spec", "mlp_speculator").output


def test_json_is_compact_and_a_cut_answer_is_marked() -> None:
    numbers = {"a": {"enum": [1]}, "b": {"enum": [2]}}
    schema = {"type": "object", "properties": numbers, "required": ["a", "b"], "additionalProperties": False}
    args = ["generate", "Numbers", "--temperature", "0", "--json-schema", json.dumps(schema)]
    whole = run(*args, "--max-tokens", "32")
    assert whole.stdout == '{"a":1,"b":2}\n'
    assert "was cut" not in whole.stderr
    cut = run(*args, "--max-tokens", "3")
    assert "note: the answer was cut after 3 tokens, before its form was whole; --max-tokens" in cut.stderr
    assert cut.exit_code == 0


def test_more_threads_than_cores_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.models.cpu.threads.num_cores", lambda: 0)
    run("generate", "hi", "--spec", "off", "--max-tokens", "1", "--threads", "1")
    assert "num_threads is 1, but this process may use 0 cores" in caplog.text


def test_a_prediction_is_read_from_a_file_and_drafts(tmp_path: Path) -> None:
    """The answer itself as the prediction: the same text, most of it accepted from the prediction."""
    args = ["generate", "Once upon a time", "--raw", "--temperature", "0", "--max-tokens", "32", "--json"]
    off = json.loads(run(*args, "--spec", "off").stdout)["requests"][0]["outputs"][0]
    file = tmp_path / "expected.txt"
    file.write_text(off["text"])
    result = run(*args, "--spec", "off", "--prediction", str(file))
    assert result.exit_code == 0, result.output
    on = json.loads(result.stdout)["requests"][0]["outputs"][0]
    assert on["text"] == off["text"]
    assert on["metrics"]["num_steps"] < off["metrics"]["num_steps"]
    accepted = on["metrics"]["num_accepted_prediction_tokens"]
    text = run(*[arg for arg in args if arg != "--json"], "--spec", "off", "--prediction", str(file))
    assert accepted > 0
    assert f"{accepted} of its tokens accepted, 0 rejected" in text.output
    missing = run(*args, "--prediction", str(tmp_path / "nowhere.txt"))
    assert missing.exit_code == 2
    assert "nowhere.txt" in missing.output
