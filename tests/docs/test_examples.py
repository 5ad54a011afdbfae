"""The scripts in examples/ are short, and each prints what it says it shows."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture
def run(
    shared_engines: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], list[str]]:
    """Runs a script's `main` and returns the lines that it prints."""

    def printed(name: str) -> list[str]:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        done = module.main()
        if inspect.iscoroutine(done):
            asyncio.run(done)
        return capsys.readouterr().out.splitlines()

    return printed


def test_each_script_is_short_and_listed() -> None:
    assert len(SCRIPTS) == 6
    page = (FOLDER / "README.md").read_text()
    for name in SCRIPTS:
        source = (FOLDER / f"{name}.py").read_text()
        assert 15 <= len(source.splitlines()) <= 45, name
        assert 'if __name__ == "__main__":' in source
        assert f"[{name}.py]({name}.py)" in page


def test_generate(run: Callable[[str], list[str]]) -> None:
    lines = run("generate")
    assert lines[0].startswith("SELECT")
    assert lines[-3] == "finish reason: stop"
    found = re.fullmatch(r"accepted: (\d+) of the (\d+) tokens came from drafts", lines[-2])
    assert found is not None
    assert 0 < int(found[1]) < int(found[2])
    assert re.fullmatch(r"acceptance rate 0\.\d\d, \d\.\d\d tokens a target pass", lines[-1])


def test_batch_with_seeds(run: Callable[[str], list[str]]) -> None:
    *texts, equal, alone = run("batch_with_seeds")
    assert [line.split(":")[0] for line in texts] == ["seed 7", "seed 8", "seed 9"]
    assert equal == "same texts without speculation: True"
    assert alone == "same text without the others in the batch: True"


def test_compare_drafters(run: Callable[[str], list[str]]) -> None:
    _, *rows, identical = run("compare_drafters")
    assert identical == "texts identical: True"
    figures = {row[:12].strip(): [float(cell) for cell in row[12:].split()] for row in rows}
    assert list(figures) == ["off", "ngram", "suffix", "draft model", "draft tree"]
    assert figures["off"][:2] == [0, 0]
    assert figures["off"][3] == 1
    for accepted, drafted, passes, length in list(figures.values())[1:]:
        assert 0 < accepted <= drafted
        assert passes < figures["off"][2]
        assert length > 1


def test_stream_async(run: Callable[[str], list[str]]) -> None:
    lines = run("stream_async")
    pieces: dict[str, list[str]] = {}
    for line in lines:
        if found := re.match(r" *(movies|tar) \| '(.*)'$", line):
            pieces.setdefault(found[1], []).append(found[2])
    assert set(pieces) == {"movies", "tar"}
    assert len(pieces["tar"]) > 3, "it streams"
    written = "\n".join(lines)
    assert f"movies: {''.join(pieces['movies'])}\n" in written


def test_structured_output(run: Callable[[str], list[str]]) -> None:
    booking, phone = run("structured_output")
    parsed = json.loads(booking.removeprefix("booking: ").replace("'", '"').replace("True", "true"))
    assert list(parsed) == ["name", "guests", "outdoors"]
    assert 1 <= parsed["guests"] <= 20
    assert re.fullmatch(r"phone: \d{3}-\d{4}", phone)


def test_own_drafter(run: Callable[[str], list[str]]) -> None:
    accepted, same = run("own_drafter")
    assert same == "same text: True"
    found = re.fullmatch(r"accepted (\d+) of (\d+) draft tokens", accepted)
    assert found is not None
    assert 0 < int(found[1]) <= int(found[2])
