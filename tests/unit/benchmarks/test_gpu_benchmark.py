"""What of `python -m benchmarks.gpu` needs no GPU: its command line, its page, and how waits are traced to lines."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import page, trace
from benchmarks.gpu.__main__ import NO_DEVICE, SECTIONS, main
from slipstream.config import reject_unknown


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main()


def test_help_names_the_sections(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        call(monkeypatch, "--help")
    told = capsys.readouterr().out
    assert all(section in told for section in SECTIONS)
    assert "--quick" in told
    assert "--output" in told


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for arguments in ([], ["--quick", "--output", str(tmp_path)]):
        with pytest.raises(SystemExit) as stopped:
            call(monkeypatch, *arguments)
        assert stopped.value.code == NO_DEVICE == "no CUDA device; this agenda needs one"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sections", "speeed", "--output", "x"], "unknown 'speeed'; there are device, tests"),
        (["--quick"], "need --output FOLDER"),
        (["--sections", "step"], "need --output FOLDER"),
    ],
)
def test_a_wrong_call_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, *arguments)
    assert told in capsys.readouterr().err


def test_a_wait_is_counted_at_the_line_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def names() -> Iterator[str]:
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        yield "a"

    found = trace.waits(lambda: [reject_unknown(names(), ["a"], "name") for _ in range(6)], 3)
    [(line, times)] = found.items()
    assert line.startswith("config.py:")
    assert line.endswith(" reject_unknown")
    assert times == 2
    assert modes == ["warn", 0]


def test_the_page_keeps_what_stands_around_the_tables(tmp_path: Path) -> None:
    file = tmp_path / "gpu.md"
    file.write_text(f"# Title\n\nbefore\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    tests = {"passed": 13, "skipped": 0, "failed": ["test_a"], "seconds": 60.4}
    row = {
        "drafter": "ngram",
        "tokens_per_s": 90.4,
        "speedup": 1.234,
        "speedup_interval": {"low": 1.1, "high": 1.3},
        "tau": 1.5,
        "num_compared": 14,
        "num_identical": 13,
    }
    speed = [{"model": "small", "dtype": "float16", "concurrency": 8, "rows": [row]}]
    page.write({"tests": tests, "speed": speed, "self": "int8 is for CPUs"}, file)
    text = file.read_text()
    assert text.startswith("# Title\n\nbefore\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "13 passed, 1 failed, 0 skipped, 60 s.\n- test_a\n" in text
    assert "| small, float16 | 8 | ngram | 90 | 1.23 | 1.10 to 1.30 | 1.50 | 13 of 14 |" in text
    assert "int8 is for CPUs" in text
