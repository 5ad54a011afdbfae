"""Other people's clients against a real server (`benchmarks/clients`). None of them is a dependency: each runs where
its variable, such as SLIPSTREAM_CLIENT_LM_EVAL, names the interpreter of an environment that has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.clients.__main__ import RESULT
from benchmarks.clients.driving import clients, drive, interpreters, variable
from benchmarks.clients.server import Running, serving

SCRIPT = """
import sys
sys.path.insert(0, {drives!r})
from wire import expect, run

def drive(job, report):
    with report.check("good") as told:
        told["seen"] = job.model
    with report.check("bad"):
        expect(1 == 2, "one is not two")

run(("pip",), drive)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "client",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(name not in interpreters({}), reason=f"{variable(name)} is not set"),
        )
        for name in clients()
    ],
)
def test_the_client_meets_its_checks(client: str) -> None:
    with serving() as server:
        report = drive(client, interpreters({})[client], server)
    assert report["met"], json.dumps(report, indent=1)


def test_what_was_recorded_met_its_checks() -> None:
    recorded = json.loads(RESULT.read_text())
    assert set(recorded) <= set(clients())
    for client, report in recorded.items():
        assert report["met"], client


def test_a_check_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    script = tmp_path / "drive_x.py"
    script.write_text(SCRIPT.format(drives=str(Path(drive.__code__.co_filename).parent / "drives")))
    log = tmp_path / "log"
    log.write_text('{"level": "info"}\nnot JSON\n')
    report = drive("x", sys.executable, Running("http://127.0.0.1:1", log), script)
    assert not report["met"]
    assert report["checks"]["good"] == {"met": True, "seen": "pair"}
    assert report["checks"]["bad"]["error"] == "AssertionError: one is not two"
    assert report["checks"]["the script ran to its end"]["met"]


def test_a_client_that_cannot_start_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    server = Running("http://127.0.0.1:1", log)
    assert "No such file" in drive("x", str(tmp_path / "python"), server)["error"]
    assert "can't open file" in drive("x", sys.executable, server, tmp_path / "none.py")["error"]
