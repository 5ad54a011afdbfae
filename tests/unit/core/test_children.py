"""No child process imports what lies in the working directory."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import slipstream
from benchmarks.deploy import local_replicas
from slipstream.errors import DeployError
from slipstream.learn.background.learner_process import LearnerProcess
from slipstream.plan import process as plan_process
from slipstream.rpc.children import ProgramChild, child_environment, module_command
from slipstream.sampling.grammars import trial
from slipstream.serve.process import spawn

SOURCE = Path(slipstream.__file__).parent
STAND_IN = """
from pathlib import Path
import msgspec
Path("started").touch()
"""
HOSTILE = """
from pathlib import Path
Path("hostile").touch()
"""


def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "WORKER", "stand_in")
    spawned = spawn.spawn_engine()
    with spawned.socket:
        spawned.process.wait(60)


def learner(_: pytest.MonkeyPatch) -> None:
    process = LearnerProcess({}, "stand_in")
    process.watch()
    assert process._child is not None
    process._child.process.wait(60)
    process.close()


def memory_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_process, "_PROBE", "stand_in")
    with contextlib.suppress(IndexError):  # it prints nothing
        plan_process._measure()


def replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_replicas, "_REPLICA", "stand_in", raising=False)

    async def start() -> None:
        with contextlib.suppress(DeployError):
            await local_replicas.LocalReplicas(1).start()

    asyncio.run(start())


def grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WORKER", "stand_in")
    process = trial.TrialProcess()
    process.start()
    assert process._child is not None
    process._child.process.wait(60)
    process.close()


@pytest.mark.parametrize("start", [engine, learner, memory_probe, replica, grammars])
def test_a_module_in_the_working_directory_is_not_imported(
    start: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads, modules = tmp_path / "downloads", tmp_path / "modules"
    for folder, name, text in ((downloads, "msgspec", HOSTILE), (modules, "stand_in", STAND_IN)):
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(downloads)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(modules), ""])
    )  # an empty entry is the working directory
    start(monkeypatch)
    assert sorted(path.name for path in downloads.iterdir() if path.suffix != ".py") == ["started"]


def test_a_child_finds_the_package_where_its_parent_did(tmp_path: Path) -> None:
    done = subprocess.run(
        module_command("slipstream.rpc.children"),
        env=child_environment(PYTHONPATH=""),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0


def test_no_other_place_starts_python() -> None:
    """All others use both functions of `slipstream.rpc.children`, or its `SocketChild`, which uses the second one."""
    users: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        if path == SOURCE / "rpc/children.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "id", None))
            assert getattr(node, "arg", None) != "preexec_fn", path
            assert name not in ("executable", "get_context", "ProcessPoolExecutor"), path
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
                assert not any(each.split(".")[0] == "multiprocessing" for each in names), path
            if name == "start" and getattr(getattr(node, "value", None), "id", None) == "SocketChild":
                name = "child_environment"
            if name in ("module_command", "child_environment"):
                users.setdefault(str(path), set()).add(name)
    assert len(users) >= 4
    assert all(names == {"module_command", "child_environment"} for names in users.values()), users


MAPS_MUCH = """
import contextlib, mmap, os
from slipstream.rpc.children import ProgramChild

memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
size = memory * 6 // 10 // mmap.PAGESIZE * mmap.PAGESIZE
mapped = []
with contextlib.suppress(OSError):  # where the system lets no process map that much
    for _ in range(2):
        mapped.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
read = []
child = ProgramChild.start(["echo", "started"], os.environ, lambda stream: read.append(stream.read()))
assert child.process.wait() == 0
child.wait_for_output()
assert read == ["started\\n"], read
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count mappings otherwise")
def test_a_process_that_mapped_much_can_start_a_program() -> None:
    """Linux refuses to fork one with a mapping that is larger than the memory; these two are merged into one."""
    done = subprocess.run([sys.executable, "-c", MAPS_MUCH], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_program_that_is_not_there_is_an_error_at_once() -> None:
    with pytest.raises(FileNotFoundError, match="there is no such program"):
        ProgramChild.start(["no-such-program"], dict(os.environ), lambda stream: None)
