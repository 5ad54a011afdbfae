"""Compile the CPU kernels into a wheel: `make wheel`.

Only where the environment has HATCH_BUILD_HOOK_ENABLE_CUSTOM=true. Other builds, editable ones among them, hold the
sources alone and are for any machine. SLIPSTREAM_WHEEL_MACHINE names a machine to cross-compile for ('aarch64').
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the builds for one type of machine. The wheel's tag names it, and the oldest glibc that loads them."""

    folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        if sys.platform != "linux":
            raise SystemExit(
                "wheels with compiled CPU kernels are built on Linux; elsewhere build one without"
            )
        builds = load_builds(Path(self.root))
        machine = os.environ.get("SLIPSTREAM_WHEEL_MACHINE") or builds.machine()
        compiler = compiler_for(machine, builds)
        wanted = [build for build in builds.BUILDS if build.machine == machine]
        if not wanted:
            known = sorted({build.machine for build in builds.BUILDS if build.machine})
            raise SystemExit(
                f"there is no build of the CPU kernels for {machine}, only for {', '.join(known)}"
            )
        self.folder = tempfile.mkdtemp(prefix="slipstream-kernels-")
        oldest = 0
        for build in wanted:
            target = Path(self.folder) / build.file_name
            subprocess.run([*build.command(compiler, target), *builds.STATIC], check=True)
            build_data["force_include"][str(target)] = f"slipstream/models/cpu/prebuilt/{target.name}"
            oldest = max(oldest, newest_glibc(target.read_bytes()))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{oldest}_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder)


def load_builds(root: Path) -> ModuleType:
    """`slipstream.models.cpu.builds`, without the package around it, whose dependencies are not here."""
    spec = importlib.util.spec_from_file_location("builds", root / "src/slipstream/models/cpu/builds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def compiler_for(machine: str, builds: ModuleType) -> list[str]:
    try:
        own = machine == builds.machine()
        command: list[str] = builds.compiler(os.environ.get("CXX") if own else f"{machine}-linux-gnu-g++")
    except LookupError as error:
        raise SystemExit(str(error)) from None
    return command


def newest_glibc(library: bytes) -> int:
    """The minor version of glibc 2 that a library's symbols need."""
    return max((int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)), default=17)
