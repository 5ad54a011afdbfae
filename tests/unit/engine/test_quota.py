"""A control group's CPU quota is read as the system writes it, and caps threads that nobody asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from slipstream import LLM
from slipstream.cli.main import app
from slipstream.models.cpu import quota as quotas
from slipstream.models.cpu import threads
from slipstream.models.cpu.quota import read_quota, threads_in

PROCESS = 8


def groups(folder: Path, membership: str, files: dict[str, str]) -> float | None:
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return read_quota(folder, folder / "membership")


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/", {"cpu.max": "50000 25000"}, 2.0),
        ("0::/", {}, None),
        ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "300000 100000"}, 1.0),
        ("0::/a/b", {"a/b/cpu.max": "300000 100000"}, 3.0),
        ("0::/docker/of/the/host", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/../elsewhere", {"cpu.max": "250000 100000"}, 2.5),
        (
            "2:cpuset:/\n1:cpu,cpuacct:/box\n0::/",
            {
                "cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n",
                "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            },
            0.5,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {"cpu.max": "what is this"}, None),
    ],
)
def test_the_least_limit_around_the_process(
    membership: str, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    assert groups(tmp_path, membership, files) == expected


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert read_quota(tmp_path, tmp_path / "nothing") is None


@pytest.mark.parametrize(("quota", "number"), [(0.3, 1), (1.0, 1), (1.5, 2), (2.0, 2), (2.01, 3)])
def test_parts_of_a_core_are_worth_a_thread(quota: float, number: int) -> None:
    assert threads_in(quota) == number


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """One that began with so many threads, under a quota of one and a half cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(PROCESS)
    monkeypatch.setattr(threads, "UNASKED", PROCESS)
    monkeypatch.setattr(threads, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(threads, "num_cores", lambda: PROCESS)
    yield monkeypatch
    torch.set_num_threads(before)


def test_threads_that_nobody_asked_for_are_capped(process: pytest.MonkeyPatch) -> None:
    assert threads.available() == 2
    with threads.limit(None) as number:
        assert number == torch.get_num_threads() == 2
    assert torch.get_num_threads() == PROCESS  # the process's other work is not ours to limit
    llm = LLM(kv_cache_bytes=2**22)
    assert llm.engine.model.num_threads == 2
    process.setattr(threads, "cpu_quota", lambda: None)
    assert threads.available() == PROCESS


def test_a_number_that_was_given_is_taken(
    process: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with threads.limit(PROCESS):
        assert threads.available() == PROCESS
    assert LLM(kv_cache_bytes=2**22, num_threads=3).engine.model.num_threads == 3
    assert "num_threads is 3, but this process may use 1.5 cores" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        LLM(kv_cache_bytes=2**22, num_threads=2)
    assert "num_threads" not in caplog.text
    torch.set_num_threads(5)
    assert threads.available() == 5
    torch.set_num_threads(PROCESS)
    process.setattr(threads, "UNASKED", None)  # OMP_NUM_THREADS said so
    assert threads.available() == PROCESS


def test_info_says_so(process: pytest.MonkeyPatch) -> None:
    process.setattr(quotas, "cpu_quota", lambda: 1.5)
    printed = CliRunner().invoke(app, ["info"]).stdout
    assert "2, under a CPU quota of 1.5 cores" in printed
    details = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert (details["threads"], details["cpu_quota"]) == (2, 1.5)
