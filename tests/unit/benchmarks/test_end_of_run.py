"""What the end of a run of the tests says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import summary

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest
import summary

@pytest.mark.parametrize("number", [1, 2])
def test_page(number):
    pytest.skip("no Chromium on the path, and SLIPSTREAM_CHROMIUM names none")

def test_other():
    pytest.skip("this machine has no IPv6")

@pytest.mark.parametrize("name", ["it's"])
def test_wrong(name):
    assert False

@pytest.fixture
def broken():
    raise ValueError

def test_set_up(broken):
    pass
"""


def skipped(reason: str) -> SimpleNamespace:
    return SimpleNamespace(longrepr=("test_a.py", 1, f"Skipped: {reason}"))


def test_each_reason_is_told_once_with_its_remedy() -> None:
    lines = list(
        summary.skips([skipped("no CUDA device"), skipped("reads /proc"), skipped("no CUDA device")])
    )
    assert lines == [
        "2 skipped: no CUDA device\n    to run them: run the tests on a machine with an NVIDIA GPU",
        "1 skipped: reads /proc",
    ]


def test_what_can_be_installed_has_a_remedy() -> None:
    """Every reason in the tests' files that names something to install has a remedy."""
    named = re.compile(r"not installed|no Chromium|compiler|no curl|is an extra|not here|command|no CUDA")
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for reason in re.findall(r'(?:reason=|pytest\.skip\()f?"([^"]+)"', file.read_text()):
            if named.search(reason) and "{" not in reason:
                [line] = summary.skips([skipped(reason)])
                assert "to run them: " in line, f"{file.name}: {reason}"


def test_the_end_of_a_run_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    for name in summary.TOLD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", "avx2")
    (tmp_path / "test_it.py").write_text(TESTS)
    hook = re.search(
        r"def pytest_terminal_summary.*?(?=\n\n\n)", (ROOT / "tests/conftest.py").read_text(), re.DOTALL
    )
    assert hook is not None
    (tmp_path / "conftest.py").write_text(f"import pytest\nimport summary\n\n{hook[0]}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    without = ("cacheprovider", "xdist", "hypothesispytest", "langsmith_plugin", "schemathesis")
    plain = [sys.executable, "-m", "pytest", "-q", *(f"-pno:{plugin}" for plugin in without)]
    told = subprocess.run(plain, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert (
        "2 skipped: no Chromium on the path, and SLIPSTREAM_CHROMIUM names none\n    to run them: apt-get"
        in told
    )
    assert "1 skipped: this machine has no IPv6\n" in told
    command = f"SLIPSTREAM_CPU_ISA=avx2 {sys.executable} -m pytest"
    assert f"{command} 'test_it.py::test_wrong[it'\"'\"'s]'\n{command} test_it.py::test_set_up\n" in told
