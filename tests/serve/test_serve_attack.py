"""The attack run: what it reports, and a small one of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attack.__main__ import main
from benchmarks.attack.run import Bounds, attack, count_forged
from benchmarks.attack.scenarios import FORGED
from benchmarks.attack.table import table

ROOT = Path(__file__).parents[2]
FIGURES: dict[str, Any] = {
    "what": "something",
    "statuses": {"200": 3, "ConnectionResetError": 1},
    "finish_reasons": {"error": 3},
    "small_requests": {"longest_s": 20.7, "num_failed": 1, "num_requests": 9},
    "health": {"longest_s": 3.25},
    "survived": False,
    "exit_code": -6,
    "killed_for_memory": False,
    "rss_growth_bytes": 2**30,
    "rss_peak_growth_bytes": 2**31,
    "num_warning_lines": 2,
    "num_forged_lines": 5,
}


def test_two_results_side_by_side() -> None:
    after = FIGURES | {"survived": True, "num_forged_lines": 0, "header_mib_taken": 1}
    *_, row = table({"one": after}, {"one": FIGURES}).splitlines()
    assert row.startswith("| something | 20.70 → 20.70 | 3.25 → 3.25 | 1 of 9 → 1 of 9 | 1024 (2048) → ")
    assert "| 5 → 0 |" in row
    assert "3 x 200, 1 x ConnectionResetError, finish_reason error: 3 → " in row
    assert row.endswith("| no (exit code -6) → yes |")
    assert "| not run → 0 |" in table({"two": after}, {"one": FIGURES})


def test_forged_lines_are_found_behind_every_line_end() -> None:
    for ending in ("\n", "\r\n", "\u0085", "\u2028", "\x1b[2K\r", "\r\x1b[2K"):
        assert count_forged(f"2026-01-01 INFO path=/v1/x{ending}{FORGED} status=404\n") == 1
    assert count_forged(f"2026-01-01 INFO path=/v1/x\\n{FORGED} status=404\n{{}}") == 0


def test_wrong_arguments_are_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"checks": {}}))
    for arguments, words in (
        (["--server-python-path", str(tmp_path)], "no package slipstream"),
        (["--before", str(other)], "not a result of this benchmark"),
    ):
        monkeypatch.setattr(sys, "argv", ["attack", *arguments])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert words in capsys.readouterr().err


@pytest.mark.long
def test_a_small_attack() -> None:
    names = ["large_prompts", "endless_header", "silent_connections", "log_injection"]
    for name, figures in attack(ROOT / "src", names, Bounds(scale=0.5, seconds=10)):
        assert figures["survived"], name
        assert figures["num_forged_lines"] == 0
        assert figures["small_requests"]["num_failed"] == figures["health"]["num_failed"] == 0, name
