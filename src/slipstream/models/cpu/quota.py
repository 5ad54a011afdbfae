"""The share of the processor that a control group (a container's, say) leaves to this process."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def read_quota(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """How many cores' time this process may use: the least of its group's and of the groups' around it.

    None where nothing limits it, or where the system has no control groups. Both versions are read: `cpu.max`, and
    `cpu.cfs_quota_us` with its period.
    """
    try:
        lines = membership.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found: list[float] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            limits = (_of_version_2(folder) for folder in _groups(cgroups, group))
        elif "cpu" in controllers.split(","):
            mounts = {cgroups / "cpu", cgroups / controllers}
            limits = (_of_version_1(folder) for mount in mounts for folder in _groups(mount, group))
        else:
            continue
        found += [limit for limit in limits if limit is not None]
    return min(found, default=None)


@functools.cache
def cpu_quota() -> float | None:
    """See `read_quota`; it is read once in a process."""
    return read_quota()


def threads_in(quota: float) -> int:
    """How many threads are of use under a quota of so many cores: the next whole number.

    A group that has used up its time is stopped as a whole until the next period, all of its threads within one slice
    (5 ms) of each other. So two threads under 1.5 cores do not wait for one another: both run for three quarters of the
    time. One thread would leave a third of the quota unused. A third thread would add no time, only a longer stop at
    the end of each period.
    """
    return max(math.ceil(quota - 1e-6), 1)


def _groups(mount: Path, group: str) -> Iterator[Path]:
    """A group's folder and those around it. A container may see the host's path, of which only the root is here."""
    inside = PurePosixPath(group.lstrip("/"))
    if ".." not in inside.parts:
        for path in (inside, *inside.parents):
            yield mount / path
    else:
        yield mount


def _of_version_2(folder: Path) -> float | None:
    quota, period = [*_numbers(folder / "cpu.max"), None, None][:2]
    return quota / (period or 100_000) if quota is not None and quota > 0 else None


def _of_version_1(folder: Path) -> float | None:
    quota, period = (
        next(iter(_numbers(folder / f"cpu.cfs_{name}_us")), None) for name in ("quota", "period")
    )
    return quota / (period or 100_000) if quota is not None and quota > 0 else None  # -1: no limit


def _numbers(file: Path) -> list[int | None]:
    """The numbers in a file, None for a word; none where it cannot be read."""
    try:
        words = file.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []
    return [int(word) if word.lstrip("-").isdigit() else None for word in words]
