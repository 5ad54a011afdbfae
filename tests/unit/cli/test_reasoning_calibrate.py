"""`slipstream reasoning calibrate`: the fastest threshold that keeps the accuracy, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.cli.main import app
from slipstream.reasoning.calibration import CalibrationCell, choose_threshold, is_expected


def cell(threshold: float, num_wrong: int, num_passes: int, num: int = 400) -> CalibrationCell:
    right = [False] * num_wrong + [True] * (num - num_wrong)
    return CalibrationCell(threshold, right, 100, 50, num_passes, 4000)


def test_the_fastest_threshold_that_keeps_the_accuracy() -> None:
    reference = [True] * 400
    cells = [cell(3, 40, 1000), cell(5, 4, 1500), cell(7, 0, 1800), cell(8, 0, 2500)]
    assert choose_threshold(reference, cells, 0.05) is cells[1]
    assert choose_threshold(reference, cells, 0.01) is cells[2]
    assert choose_threshold(reference, cells, 0.0) is None
    few = [cell(7, 0, 100, num=20)]
    assert choose_threshold([True] * 20, few, 0.02) is None, "twenty problems show nothing"


@pytest.mark.parametrize(
    ("text", "expected", "right", "exact"),
    [
        ("so 4 and 5</think> The answer is 45.", "45", True, False),
        ("45 </think> The answer is 455", "45", False, False),
        ("</think> (45)", "45", True, False),
        ("</think> 45", "45", True, True),
        ("</think> is 45", "45", False, True),
        ("no end 7", "7", True, False),
        ("</think> x = -3/4", "-3/4", True, False),
    ],
)
def test_what_counts_as_right(text: str, expected: str, right: bool, exact: bool) -> None:
    assert is_expected(text, expected, "</think>", exact) is right


def test_the_command(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"Say {word}", "expected": word} for word in ("yes", "no", "the")]
    problems.write_text("\n".join(map(json.dumps, rows)))
    draft = json.dumps({"model": EMBEDDED_DRAFT, "separator": " "})
    args = [
        *("reasoning", "calibrate", str(problems), "--judge", "logprob", "--thresholds", "-9,-0.1"),
        *("--reasoning-draft", draft, "--allow-lossy", "--max-tokens", "24", "--temperature", "0"),
        *("--protect-first-steps", "0", "--max-loss", "1"),
    ]
    found = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert found["lossy"] is True
    lax, strict = found["thresholds"]
    assert lax["kept_share"] > strict["kept_share"]
    assert found["reasoning"] == {"judge": "logprob", "threshold": -9.0, "protect_first_steps": 0}
    printed = CliRunner().invoke(app, [*args, "--max-loss", "0.01"])
    assert "no threshold keeps the accuracy within 1 points" in " ".join(printed.stdout.split())
    assert "target alone: 3 problems" in printed.stderr


@pytest.mark.parametrize(
    ("line", "flags", "said"),
    [
        ('{"prompt": "a"}', ["--allow-lossy"], 'line 1 needs "expected"'),
        ('{"prompt": "a", "expected": "b"}', [], "set allow_lossy (--allow-lossy)"),
        ('{"prompt": "a", "expected": "b"}', ["--allow-lossy", "--thresholds", "x"], "takes numbers"),
        ('{"prompt": "a", "expected": "b"}', ["--allow-lossy", "--thresholds", "70"], "within [0, 9]"),
    ],
)
def test_bad_input_is_a_line(tmp_path: Path, line: str, flags: list[str], said: str) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(line)
    args = ["reasoning", "calibrate", str(problems), "--reasoning-draft", EMBEDDED_DRAFT, *flags]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert said in result.stderr


def test_without_a_draft(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"prompt": "a", "expected": "b"}')
    result = CliRunner().invoke(app, ["reasoning", "calibrate", str(problems), "--allow-lossy"])
    assert result.exit_code == 2
    assert "name one with --reasoning-draft" in result.stderr
