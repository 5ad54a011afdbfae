"""Faults planted in the CPU kernels, all in one program: compiling is what takes time, and it is done once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from slipstream.models.cpu import builds


@dataclass(frozen=True)
class Fault:
    """A change of the kernels that a driver must find. `after` is in force where `faulty` is true."""

    name: str
    file: str
    before: str
    after: str
    finding: str = ""
    """What the driver says of it."""


def plant(faults: Seq[Fault], folder: Path) -> tuple[Path, tuple[str, ...]]:
    """(kernels with every fault, flags to compile with them). PLANTED chooses one by its number; -1 is none."""
    kernels = folder / "kernels"
    shutil.copytree(builds.SOURCES, kernels)
    for number, fault in enumerate(faults):
        source = (kernels / fault.file).read_text()
        assert fault.before in source, "the kernels have changed: plant the fault anew"
        after = fault.after.replace("faulty", f"(planted == {number})")
        (kernels / fault.file).write_text(source.replace(fault.before, after))
    header = folder / "planted.h"
    header.write_text('#include <cstdlib>\nstatic const int planted = std::atoi(std::getenv("PLANTED"));\n')
    return kernels, ("-include", str(header))
