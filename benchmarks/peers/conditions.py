"""What else the machine has to do while a sample is taken: busy neighbours, or a quota of its cores.

A neighbour is a process that computes without end, of the same priority. A quota is set by a control group (version
2, or the `cpu` controller of version 1) into which the worker is moved before its call.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import ConfigError

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
STARTING_S = 0.15
"""A neighbour computes by then."""
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"
"""Its argument is the driver's process: it ends by itself when that is killed, however early."""


@dataclass(frozen=True)
class Condition:
    """Alone unless something is given."""

    neighbours: int = 0
    quota_cores: float | None = None

    @property
    def name(self) -> str:
        """As the report says it; empty for alone."""
        if self.quota_cores is not None:
            return f"a quota of {self.quota_cores:g} cores"
        return f"{self.neighbours} busy beside it" if self.neighbours else ""

    @contextmanager
    def imposed(self, processes: Iterable[int]) -> Iterator[None]:
        """Hold while the worker of these processes answers; raises `ConfigError` where there can be no quota."""
        loops = [
            subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(self.neighbours)
        ]
        if loops:
            time.sleep(STARTING_S)
        try:
            with contextlib.nullcontext() if self.quota_cores is None else quota(self.quota_cores, processes):
                yield
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()


ALONE = Condition()


@contextmanager
def quota(cores: float, processes: Iterable[int], root: Path = CGROUPS) -> Iterator[None]:
    """These processes may use `cores` cores together; raises `ConfigError` with the reason where that cannot be set."""
    folder, name, limit, no_limit = _group(root, cores)
    try:
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(limit)
        for process in processes:
            (folder / "cgroup.procs").write_text(str(process))
    except OSError as error:
        raise ConfigError(f"--quota needs a control group that can be written: {error}") from None
    try:
        yield
    finally:
        (folder / name).write_text(no_limit)  # they stay in the group, which limits nothing any more


def _group(root: Path, cores: float) -> tuple[Path, str, str, str]:
    """The group's folder, the file of its quota, the quota and what lifts it."""
    quota_us = round(cores * PERIOD_US)
    controllers = root / "cgroup.controllers"
    if controllers.is_file() and "cpu" in controllers.read_text().split():
        return root / "slipstream-peers", "cpu.max", f"{quota_us} {PERIOD_US}", f"max {PERIOD_US}"
    if (root / "cpu/cpu.cfs_quota_us").is_file():
        return root / "cpu/slipstream-peers", "cpu.cfs_quota_us", str(quota_us), "-1"
    raise ConfigError(f"--quota needs control groups with a cpu controller, and there are none at {root}")


def check(conditions: Iterable[Condition]) -> None:
    """Try every quota once, before any work."""
    for condition in conditions:
        if condition.quota_cores is not None:
            if condition.quota_cores <= 0:
                raise ConfigError(f"--quota takes a positive number of cores, got {condition.quota_cores:g}")
            with quota(condition.quota_cores, []):
                pass


def tidy(root: Path = CGROUPS) -> None:
    """Remove the group once its processes have ended."""
    for folder in (root / "slipstream-peers", root / "cpu/slipstream-peers"):
        with contextlib.suppress(OSError):
            folder.rmdir()
