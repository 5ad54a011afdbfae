"""Where `benchmarks.learn` writes what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learn import PICTURE, QUICK_RESULT, RESULT, options_of

GIVEN = ["--data", "chat.jsonl", "--floor", "draft"]


def test_a_result_has_a_picture_of_its_own(tmp_path: Path) -> None:
    whole = options_of(GIVEN)
    assert (whole.output, whole.picture) == (RESULT, PICTURE)
    quick = options_of([*GIVEN, "--quick"])
    assert (quick.output, quick.picture) == (QUICK_RESULT, None)
    other = options_of([*GIVEN, "--quick", "--output", str(tmp_path / "math.json"), "--topic", "math"])
    assert (other.output, other.picture) == (tmp_path / "math.json", tmp_path / "math.svg")
    named = options_of([*GIVEN, "--output", str(QUICK_RESULT)])
    assert named.picture != PICTURE


@pytest.mark.parametrize(
    "other", [["--topic", "math"], ["--temperature", "1"], ["--model", "target"], ["--learner", "low_rank"]]
)
def test_another_run_needs_a_file_of_its_own(other: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for quick in ([], ["--quick"]):
        with pytest.raises(SystemExit):
            options_of([*GIVEN, *other, *quick])
        assert f"give --output: learn.json is not of another {other[0][2:]}" in capsys.readouterr().err
    assert options_of([*GIVEN, *other, "--output", "other.json"]).output == Path("other.json")
