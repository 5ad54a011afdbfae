"""`python -m benchmarks.gpu.path` without a GPU: its budget, what it skips and goes on with, its page, its parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import suite
from benchmarks.gpu.path import page, runner
from benchmarks.gpu.path.__main__ import NO_DEVICE, main
from benchmarks.gpu.path.part import INCOMPLETE, Part, settings_of
from benchmarks.gpu.path.runner import PARTS, SUMMARY, Plan, run_part, run_parts
from benchmarks.harness.command import ROOT
from slipstream.profiling.provenance import commit

SCRIPTS = {
    "quick": "print('hello')",
    "raises": "raise SystemExit('no')",
    "incomplete": f"raise SystemExit({INCOMPLETE})",
    "hangs": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])",
}


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["path", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main()


def script_of(asked: list[str]) -> Any:
    def command(name: str, until_s: float) -> Seq[str]:
        asked.append(name)
        return [sys.executable, "-c", SCRIPTS.get(name, SCRIPTS["quick"])]

    return command


def plan_of(folder: Path, *names: str, budget_s: float = 600.0, limit_s: float = 60.0) -> Plan:
    return Plan(dict.fromkeys(names, limit_s), budget_s, folder, "cpu")


def finished(folder: Path, name: str, **others: Any) -> None:
    """A part's result, as a call before has left it."""
    result = {"settings": settings_of("cpu"), "provenance": {"commit": commit()}, "cells": {}, **others}
    (folder / f"{name}.json").write_text(json.dumps(result))


def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, "--budget", "500", "--output", str(tmp_path / "out"))
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"{NO_DEVICE}\n"
    assert not (tmp_path / "out").exists()


def test_an_unknown_part_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "--parts", "device,bit", "--output", "x")
    assert "unknown 'bit'; there are device, kernels, bits" in capsys.readouterr().err


def test_time_that_is_not_needed_goes_to_the_next() -> None:
    plan = Plan({"a": 10.0, "b": 50.0, "c": 40.0}, 120.0, Path())
    assert plan.limit_s("a", 120.0) == 30.0, "what no part has been promised"
    assert plan.limit_s("b", 117.0) == 77.0
    assert plan.limit_s("c", 100.0) == 100.0
    assert plan.limit_s("b", 60.0) == 50.0, "its own seconds, though the last one's are not left then"
    assert plan.limit_s("b", 20.0) == 20.0


def test_all_that_section_8_promises_fits_its_budget() -> None:
    assert sum(PARTS.values()) <= 500


def test_each_part_ends_by_itself_or_is_ended_and_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "LEAST_S", 0.0)
    names = ["raises", "hangs", "incomplete", "quick"]
    limits = {"raises": 60.0, "hangs": 1.0, "incomplete": 60.0, "quick": 60.0}
    monkeypatch.setattr(Plan, "limit_s", lambda self, name, left_s: limits[name])
    outcomes = run_parts(plan_of(tmp_path, *names), script_of([]))
    assert [outcomes[name]["outcome"] for name in names] == [
        "failed with status 1",
        "out of time",
        "incomplete",
        "done",
    ]
    told = json.loads((tmp_path / SUMMARY).read_text())
    assert told["parts"] == outcomes
    assert told["provenance"]["commit"] == commit()
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("== hangs")][
        -1
    ] == "== hangs: out of time"


def test_what_a_part_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(f'{{child.pid}} '); child.wait()"
    )
    wait = subprocess.Popen.wait

    def waits_for_the_child(self: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(self)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith(" "):
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("part", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waits_for_the_child)
    assert run_part([sys.executable, "-c", script], 3.0, os.environ) == "out of time"
    pid = int((tmp_path / "pid").read_text())
    end_s = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_spent_budget_begins_nothing(tmp_path: Path) -> None:
    asked: list[str] = []
    outcomes = run_parts(plan_of(tmp_path, "quick", "other", budget_s=0.0), script_of(asked))
    assert [each["outcome"] for each in outcomes.values()] == ["no time", "no time"]
    assert not asked


def test_finished_parts_are_kept(tmp_path: Path) -> None:
    asked: list[str] = []
    finished(tmp_path, "quick")
    finished(tmp_path, "other", provenance={"commit": "of another day"})
    finished(tmp_path, "third", settings={"device": "another"})
    outcomes = run_parts(plan_of(tmp_path, "quick", "other", "third"), script_of(asked))
    assert [each["outcome"] for each in outcomes.values()] == ["kept", "done", "done"]
    assert asked == ["other", "third"]


def test_a_run_that_is_stopped_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    wait = subprocess.Popen.wait

    def stopped(self: Any, timeout: float | None = None) -> int:
        if timeout is not None and len(asked) == 2 and not pids:
            pids.append(self.pid)
            raise KeyboardInterrupt
        return wait(self, timeout)

    asked: list[str] = []
    monkeypatch.setattr(subprocess.Popen, "wait", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_parts(plan_of(tmp_path, "quick", "hangs"), script_of(asked))
    assert json.loads((tmp_path / SUMMARY).read_text())["parts"].keys() == {"quick"}
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def part_of(folder: Path, seconds: float = 600.0) -> Part:
    return Part(folder / "bits.json", "cpu", time.time() + seconds)


def test_a_cell_that_fails_is_missing_and_tried_again(tmp_path: Path) -> None:
    part = part_of(tmp_path)
    assert part.cell("first", lambda: {"n": 1}) == {"n": 1}
    assert part.cell("second", lambda: 1 // 0) is None
    assert part.cell("third", lambda: 3) == 3
    assert part.finish() == INCOMPLETE
    assert not (tmp_path / "bits.json").exists()
    read = page.read(tmp_path)["bits"]
    assert read["cells"] == {"first": {"n": 1}, "third": 3}
    assert read["missing"]["second"].startswith("ZeroDivisionError")

    measured: list[str] = []
    again = part_of(tmp_path)
    for name in ("first", "second", "third"):
        again.cell(name, lambda name=name: measured.append(name) or 2)  # type: ignore[misc]
    assert again.finish() == 0
    assert measured == ["second"]
    result = json.loads((tmp_path / "bits.json").read_text())
    assert result["cells"] == {"first": {"n": 1}, "second": 2, "third": 3}
    assert result["provenance"]["commit"] == commit()
    assert not list(tmp_path.glob("*.partial.json"))
    assert plan_of(tmp_path, "bits").finished("bits")


def test_a_cell_is_not_begun_without_the_time_that_it_needs(tmp_path: Path) -> None:
    part = part_of(tmp_path, seconds=20.0)
    assert part.cell("long", lambda: 1, needs_s=100) is None
    assert part.cell("short", lambda: 1, needs_s=1) == 1
    assert part.missing["long"].startswith("no time: it needs some 100 s")


def results(**changed: Any) -> dict[str, Any]:
    """Of a run in which every bar holds, but for what is changed."""
    values = {
        "off_ms": 1.5, "chain_ms": 2.0, "many_step_ms": 2.0, "idle": 0.1, "many_ms": 2.2, "outside": 0, "text": [1, 2],
        "large_ms": 2.0, "theirs_ms": 2.1, "loaded": 1.005, "gain": 2.6, "per_step": 3.5, "ours": 1.04,
        **changed,
    }  # fmt: skip
    cells = [("1G", context, *each) for context in (128, 2048) for each in ((1, 1), (64, 1), (1, 8))]
    passes: dict[str, Any] = {
        f"{shape} {context} {rows} {sequences}": {
            "shape": shape, "way": "captured", "context": context, "rows": rows, "sequences": sequences,
            "ms": 2.0 if rows == sequences == 1 else values["many_ms"], "bytes_read": 2e9,
        }
        for shape, context, rows, sequences in cells
    }  # fmt: skip
    passes["8B"] = {**passes["1G 128 1 1"], "shape": "8B", "way": "fused", "ms": values["large_ms"]}
    for rows, ms in ((1, 2.0), (64, values["many_ms"])):
        cell = {"shape": "1G", "context": 128, "rows": rows, "sequences": 1, "ms": ms, "bytes_read": 2e9}
        passes[f"fused {rows}"] = {**cell, "way": "fused"}
        passes[f"cuBLAS {rows}"] = {**cell, "way": "fused, cuBLAS", "ms": ms / values["ours"]}
    engine: dict[str, Any] = {}
    for requests in (1, 8):
        for name, text in (("off", [1, 2]), ("chain of 4", values["text"])):
            about = {"configuration": name, "requests": requests}
            counts = [{"replayed": 200 - values["outside"], "outside": {"too many rows": values["outside"]}}]
            is_off = name == "off"
            engine[f"{name} {requests}"] = {
                **about,
                "tokens_per_s": 300.0 if is_off else 300.0 * values["gain"],
                "num_tokens": 700,
                "decoding_steps": 700 if is_off else 700 / values["per_step"],
                "passes": counts,
                "texts": [text] * 28,
            }
            step_ms = values["off_ms" if is_off else "chain_ms"]
            times = {"step_ms": step_ms, "idle": values["idle"], "draft_ms": 1.0, "host_ms": 0.3}
            engine[f"steps of {name} {requests}"] = {**about, **times, "waits": 1}
    many = {"configuration": "off", "requests": 64, "step_ms": values["many_step_ms"], "waits": 1}
    engine["steps of off, 64"] = many
    engine["loaded"] = {"drafter": "chain of 4", "over_off": values["loaded"], "ratios": [values["loaded"]]}
    theirs = {f"{name}, compiled": {"ms": values["theirs_ms"], "first_s": 20.0} for name in ("1G", "8B")}
    rates = {"copy_gb_per_s": 1300, "read_gb_per_s": 1300}
    parts = {
        "device": {"rates": rates},
        "steps": passes,
        "baseline": theirs,
        "engine": engine,
    }
    return {"run": {}, **{name: {"cells": found} for name, found in parts.items()}}


def verdicts(result: dict[str, Any]) -> list[str]:
    lines = page.tables(result).splitlines()
    bars = lines[: lines.index("### The device")] if "### The device" in lines else lines
    return [
        line.split("|")[4].strip() for line in bars if line.startswith("|") and ("≤" in line or "≥" in line)
    ]


NUM_BARS = 18


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"off_ms": 3.6, "chain_ms": 4.8, "many_step_ms": 4.8}, [0, 8, 16]),
        ({"idle": 0.2}, [1]),
        ({"many_ms": 2.4}, [2, 3, 4]),
        ({"outside": 3}, [5]),
        ({"text": [1, 3]}, [6]),
        ({"large_ms": 2.2, "theirs_ms": 2.3}, [7]),
        ({"chain_ms": 2.1}, [9]),
        ({"gain": 2.4, "per_step": 3.3}, [10]),
        ({"per_step": 3.8}, [11]),
        ({"many_step_ms": 2.5}, [12]),
        ({"loaded": 1.02}, [13]),
        ({"theirs_ms": 1.9}, [17]),
        ({"ours": 1.06}, [14, 15]),
    ],
    ids=str,
)
def test_the_bars(changed: dict[str, Any], missed: list[int]) -> None:
    found = verdicts(results(**changed))
    assert found == ["**missed**" if number in missed else "held" for number in range(NUM_BARS)]


def test_nothing_measured_holds_no_bar() -> None:
    assert verdicts({"run": {}}) == ["not measured"] * NUM_BARS


def test_the_page_is_written_between_its_marks(tmp_path: Path) -> None:
    docs, out = tmp_path / "docs", tmp_path / "out"
    docs.mkdir()
    out.mkdir()
    (docs / "gpu.md").write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    for name, result in results(text=[7]).items():
        if name != "run":
            (out / f"{name}.json").write_text(json.dumps(result))
    origin = {
        "device": "a GPU",
        "date": "2026-11-29",
        "commit": None,
        "command": "python -m benchmarks.gpu.path",
    }
    outcomes = {"bits": {"outcome": "out of time", "seconds": 50}}
    (out / SUMMARY).write_text(json.dumps({"provenance": origin, "parts": outcomes}))
    page.publish(out, docs)
    text = (docs / "gpu.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| 1 | chain of 4 | 780 | 2.60 | 0 of 28 | 0.0% | 2.00 | 1.00 | 0.30 | 10% | 1 |" in text
    assert "- bits: out of time" in text
    assert "a GPU, 2026-11-29, commit unknown" in text
    assert json.loads((docs / page.RESULT).read_text())["steps"]["cells"]


def test_the_published_page_has_the_marks() -> None:
    text = (ROOT / "docs/benchmarks/gpu.md").read_text()
    assert text.index(page.BEGIN) < text.index(page.END)


CASES = """
import time, pathlib, pytest
def test_right(): pass
def test_wrong(): assert False
def test_absent(): pytest.skip("no")
def test_slow():
    pathlib.Path("begun").touch()
    time.sleep({seconds})
def test_never_reached(): pass
"""


@pytest.mark.parametrize("is_ended", [False, True])
def test_tests_that_are_ended_count_as_far_as_they_came(
    is_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests/gpu").mkdir(parents=True)
    (tmp_path / "tests/gpu/test_some.py").write_text(CASES.format(seconds=600 if is_ended else 0))
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    wait = subprocess.Popen.wait

    def until_the_slow_one(self: Any, timeout: float | None = None) -> int:
        if timeout is None:
            return wait(self)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("pytest", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", until_the_slow_one)
    found = suite.run_tests(100.0 if is_ended else None)
    assert found["failed"] == ["test_wrong"]
    assert found["skipped"] == 1
    assert found["passed"] == (1 if is_ended else 3)
    assert found["complete"] == (not is_ended)


@pytest.mark.long
def test_every_part_runs_on_a_cpu_in_small_sizes(tmp_path: Path) -> None:
    """A GPU's minutes shall not be lost to a mistake that a CPU can find."""
    command = [sys.executable, "-m", "benchmarks.gpu.path", "--device", "cpu", "--budget", "1000"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": f"{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = json.loads((tmp_path / SUMMARY).read_text())["parts"]
    assert {name: each["outcome"] for name, each in outcomes.items()} == dict.fromkeys(PARTS, "done"), (
        done.stderr
    )
    assert done.returncode == 0
    assert "| tiny | captured | 24 | 1 × 4 |" in done.stdout
    cells = page.read(tmp_path)
    assert all(cell["error"] < 0.02 for cell in cells["kernels"]["cells"].values() if "error" in cell)
    assert cells["kernels"]["cells"]["choice of 1,500"]["equal"] == 4
    assert cells["bits"]["cells"]["attention of 1G"] == {"rows": 6, "equal": 6}
    assert cells["bits"]["cells"]["noise"]["integers_equal"]
    own = [cell for name, cell in cells["bits"]["cells"].items() if name.startswith("own product")]
    assert own
    assert all(all(cell["places"].values()) and cell["alone_agrees"] for cell in own)
    assert page.unequal_texts(cells["engine"]["cells"]) == 0
    assert page.share_outside(cells["engine"]["cells"]) == 0
    assert len(cells["engine"]["cells"]["a drafter that is loaded and not asked"]["ratios"]) == 5
    assert cells["engine"]["cells"]["steps of off, 64 at once"]["step_ms"] > 0
    assert cells["tests"]["cells"]["tests"]["skipped"] > 50
