"""What verbs say before anything heavy is imported, and what they refuse before it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.cli.output import loading
from slipstream.core.model_path import check_model_path, describe, models_in
from slipstream.errors import ModelError

MISSING = "./no_such_folder"

REFUSED: dict[str, tuple[list[str], str]] = {
    "generate": (["generate", "hi", "--model", MISSING], "is not a folder"),
    "generate gguf": (["generate", "hi", "--model", "no_such.gguf"], "there is no file 'no_such.gguf'"),
    "generate draft": (["generate", "hi", "--spec", f"draft:{MISSING}"], "is not a folder"),
    "generate config": (
        ["generate", "hi", "--speculative-config", f'{{"method": "eagle3", "model": "{MISSING}"}}'],
        "is not a folder",
    ),
    "chat": (["chat", MISSING], "is not a folder"),
    "serve": (["serve", MISSING], "is not a folder"),
    "info": (["info", MISSING], "is not a folder"),
    "info draft": (["info", "--draft", MISSING], "is not a folder"),
    "tree": (["tree", MISSING], "is not a folder"),
    "bench": (["bench", MISSING], "is not a folder"),
    "bench file": (["bench", "--workload", "no_such.jsonl"], "no_such.jsonl"),
    "audit": (["audit", MISSING, "--spec", "ngram"], "is not a folder"),
    "audit file": (["audit", "--workload", "no_such.jsonl"], "no_such.jsonl"),
    "doctor": (["doctor", "embedded", MISSING], "is not a folder"),
    "doctor target": (["doctor", MISSING, "embedded"], "is not a folder"),
    "advise": (["advise", MISSING], "is not a folder"),
    "regenerate": (
        ["train", "regenerate", "--data", "no_such.jsonl", "--output", "out.jsonl"],
        "no_such.jsonl",
    ),
    "train": (["train", "eagle3", "--data", "no_such.jsonl", "--output", "out"], "no_such.jsonl"),
    "quantize": (["quantize", MISSING, "out"], "is not a folder"),
}

ALL = f"""
import contextlib, io, json, sys
from slipstream.cli.main import app
found = {{}}
for name, (args, _) in {REFUSED!r}.items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            app(args)
        except SystemExit as error:
            code = error.code
    heavy = [each for each in ("torch", "transformers", "fastapi") if each in sys.modules]
    found[name] = [code, said.getvalue(), heavy]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refused() -> dict[str, Any]:
    """Exit code, standard error, and what heavy modules were imported by then; one process for all, in order."""
    run = subprocess.run([sys.executable, "-c", ALL], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_missing_is_said_before_anything_heavy_is_imported(
    refused: dict[str, Any], name: str
) -> None:
    code, said, heavy = refused[name]
    assert code == 2
    *before, line = said.splitlines()
    assert line.startswith("error: ")
    assert before in ([], ["loading the embedded pair"])  # a draft's name is known once speculation is chosen
    assert REFUSED[name][1] in said
    assert heavy == []


SAYS = {
    "generate": (["generate", "hi", "--json"], "loading the embedded pair"),
    "chat": (["chat"], "loading the embedded pair"),
    "info": (["info", "--json"], "reading the embedded pair"),
    "info --measure": (["info", "--measure", "--quick"], "loading the embedded pair"),
    "tree": (["tree"], "loading the embedded pair"),
    "plan": (["plan", "--json"], "planning for the embedded pair"),
    "bench": (["bench"], "measuring the embedded pair"),
    "audit": (["audit"], "auditing the embedded pair"),
    "doctor": (["doctor", "embedded", "x/y"], "loading the embedded pair"),
    "regenerate": (
        ["train", "regenerate", "--data", "DATA", "--output", "DATA.out"],
        "answers come from",
    ),
    "train": (
        ["train", "eagle3", "--data", "DATA", "--output", "DATA.out", "--max-tokens", "9"],
        "training eagle3 for",
    ),
}


FIRST_WORDS = f"""
import json, sys
from slipstream.cli.main import app
from slipstream.cli.output.console import Console
found = {{}}
def say(self, text, **options):
    found[verb] = ["torch" in sys.modules, text]
    raise SystemExit
Console.print = say
for verb, (args, _) in {SAYS!r}.items():
    try:
        app([arg.replace("DATA", sys.argv[1]) for arg in args])
    except SystemExit:
        pass
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def first_words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Whether PyTorch was imported when a verb said its first words, and these; one process for all, in order."""
    data = tmp_path_factory.mktemp("first_words") / "data.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    command = [sys.executable, "-c", FIRST_WORDS, str(data)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("verb", SAYS)
def test_verbs_say_what_they_load_before_torch_is_imported(first_words: dict[str, Any], verb: str) -> None:
    has_torch, words = first_words[verb]
    assert words.startswith(SAYS[verb][1])
    assert not has_torch


SERVE = """
import sys
from slipstream.cli.main import app
from slipstream.draft import registry
def stop(*arguments):
    print("torch" in sys.modules)
    raise SystemExit
registry.validate = stop
app(["serve", "--port", "0", *sys.argv[1:]])
"""


def test_serve_first_logs_what_it_loads_in_the_form_of_its_logs() -> None:
    command = [sys.executable, "-c", SERVE, "--log-format", "json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.stdout == "False\n", run.stderr
    [line] = run.stderr.splitlines()
    assert json.loads(line)["message"] == "loading the embedded pair"


def test_a_name_that_leads_nowhere_here_is_said_to_be_one_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    hub = "(no file or folder here, so looked for on the hub)"
    draft = CliRunner().invoke(app, ["generate", "hi", "--draft", "no/draft", "--max-tokens", "2"])
    assert f"with the draft no/draft {hub}\n" in draft.stderr
    model = CliRunner().invoke(app, ["generate", "hi", "--model", "no/pe", "--max-tokens", "2"])
    assert f"loading no/pe {hub}\n" in model.stderr
    assert draft.exit_code == model.exit_code == 2


def test_results_are_alone_on_standard_output() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--json", "--max-tokens", "2"])
    assert json.loads(result.stdout)["model"] == "embedded pair"
    assert result.stderr.startswith("loading the embedded pair\n")


def test_a_terminal_has_a_spinner_that_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    from rich.console import Console

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(loading, "stderr", lambda: Console(file=screen, force_terminal=True, width=60))
    with loading.loading(None):
        pass
    assert "loading the embedded pair" in screen.getvalue()
    assert screen.getvalue().rstrip("\r").endswith("\x1b[2K")  # the line is erased


def test_names_that_lead_nowhere_are_told_from_ids_of_the_hub(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(3 * 2**20))
    for good in (str(file), str(tmp_path), "org/model", "org/repo:file.gguf"):
        check_model_path(good)
    for bad in (f"{tmp_path}/other.gguf", f"{tmp_path}/other", "./other", "~/other", "a/b/c"):
        with pytest.raises(ModelError, match=r"other|a/b/c"):
            check_model_path(bad)
    (tmp_path / "plain.txt").write_text("text")
    with pytest.raises(ModelError, match="is not a folder"):
        check_model_path(str(tmp_path / "plain.txt"))
    assert describe(str(file)) == f"{file} (3 MiB)"
    assert describe("org/model") == "org/model (no file or folder here, so looked for on the hub)"


def test_names_without_an_owner_are_refused_unless_the_hub_has_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models--cached").mkdir()
    (tmp_path / "folder").mkdir()
    for good in ("gpt2", "gpt2-medium", "distilgpt2", "cached", "folder"):
        check_model_path(good)
    right = r"a checkpoint folder, a \.gguf file or a hub id \(owner/name\)"
    with pytest.raises(
        ModelError, match=rf"'smollm3'; did you mean 'smollm2'\? Give {right}, or .*: embedded, smollm2"
    ):
        check_model_path("smollm3")
    with pytest.raises(ModelError, match=rf"there is no model 'gpt2-mine'; give {right}"):
        check_model_path("gpt2-mine")
    with pytest.raises(
        ModelError, match=rf"'smollm2' can be .* its own drafter with eagle3, but not this; give {right}"
    ):
        check_model_path("smollm2")


def test_models_of_inner_drafters_are_found() -> None:
    options = {
        "drafters": [{"method": "suffix"}, {"method": "draft_model", "model": "a"}],
        "draft": {"model": "b"},
    }
    assert list(models_in(options)) == ["a", "b"]
    assert list(models_in(None)) == []
