"""The builds of the CPU kernels: for which instructions they are compiled, and by which command.

All compute the same bits; they differ in speed. Nothing but the standard library is imported here: what puts compiled
kernels into a wheel (`hatch_build.py`) runs without the package's dependencies.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "kernels"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Where a wheel has its compiled kernels; a source checkout has none."""

FLAGS = ("-O3", "-ffp-contract=off", "-std=c++20", "-fPIC", "-shared", "-pthread")
STATIC = (
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,--exclude-libs,ALL",
    "-Wl,--gc-sections",
    "-s",
)
"""For a library that other systems load: nothing of the compiler's own is expected there."""
COMPILERS = ("c++", "g++", "clang++")
CPUINFO = Path("/proc/cpuinfo")
"""Where Linux says what the processor has."""


@dataclass(frozen=True, slots=True)
class Build:
    """The kernels for one instruction set."""

    name: str
    machine: str
    """As `machine()` says it; empty: any."""
    flags: tuple[str, ...]
    needs: frozenset[str]
    """What the processor must have, as /proc/cpuinfo calls it."""

    @property
    def stem(self) -> str:
        """How the names of its libraries begin."""
        return f"kernels-{self.name}-{self.fingerprint}"

    @property
    def file_name(self) -> str:
        """Return the file name of the library that a wheel has."""
        return f"{self.stem}.so"

    @property
    def fingerprint(self) -> str:
        """Changes with the sources, the flags and the instructions."""
        return _fingerprint(self)

    def command(self, compiler: list[str], target: Path, sources: Path = SOURCES) -> list[str]:
        """What compiles the kernels into the shared library `target`."""
        return [*compiler, *FLAGS, *self.flags, str(sources / "kernels.cpp"), "-o", str(target)]


_AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

_VNNI = ("-march=x86-64-v4", "-mavx512vnni")

BUILDS = (
    Build(
        "amx",
        "x86_64",
        (*_VNNI, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        _AVX512 | {"avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"},
    ),
    Build("avx512_vnni", "x86_64", _VNNI, _AVX512 | {"avx512_vnni"}),
    Build("avx512", "x86_64", ("-march=x86-64-v4",), _AVX512),
    Build("avx2_vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
    Build("avx2", "x86_64", ("-march=x86-64-v3",), _AVX2),
    Build("neon_dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
    Build("neon", "aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
    Build("generic", "", (), frozenset()),
)
"""The fastest first. `amx` has the kernels of `avx512_vnni` too, for a system that refuses its tiles (`tiles.h`)."""


def machine() -> str:
    """The type of this machine's processor: 'x86_64', 'aarch64'."""
    name = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(name, name)


@functools.cache
def processor_flags() -> frozenset[str]:
    """What this processor has and the system lets programs use, as Linux calls it."""
    if CPUINFO.is_file():
        for line in CPUINFO.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    if machine() == "aarch64":  # every processor of macOS
        return frozenset({"asimd"})
    return frozenset()


def runnable(flags: Collection[str] | None = None, processor: str | None = None) -> list[Build]:
    """The builds that a processor with these flags runs, the fastest first; without arguments, this one.

    `generic` is for machines that no other build is for: on an x86 processor without fused multiply-adds it would be
    slower than PyTorch's operators.
    """
    flags = processor_flags() if flags is None else flags
    processor = machine() if processor is None else processor
    named = [build for build in BUILDS if build.machine == processor]
    return [build for build in named or BUILDS[-1:] if build.needs <= set(flags)]


def choose(forced: str = "", flags: Collection[str] | None = None, processor: str | None = None) -> Build:
    """The build for a processor, this one unless said otherwise: the fastest, or the one named `forced`.

    Raises `ValueError` for one that it cannot run, `LookupError` where there is none.
    """
    is_told = flags is not None or bool(processor_flags())
    builds = runnable(flags, processor)
    names = [build.name for build in builds]
    runs = f"this one runs {', '.join(names) or 'none of the CPU kernels'}"
    if forced:
        known = {build.name: build for build in BUILDS}
        if forced not in known:
            raise ValueError(
                f"SLIPSTREAM_CPU_ISA is {forced!r}, and must be one of {', '.join(known)}; {runs}"
            )
        if forced not in names:
            raise ValueError(f"SLIPSTREAM_CPU_ISA is {forced!r}, which is not for this processor; {runs}")
        return known[forced]
    if not builds and not is_told:
        raise LookupError(
            f"this system does not say in {CPUINFO} which instructions its processor has, by which the CPU kernels are "
            "chosen"
        )
    if not builds:
        raise LookupError(
            "this processor has neither AVX2 with FMA nor NEON, which the CPU kernels are made for"
        )
    return builds[0]


def compiler(chosen: str | None) -> list[str]:
    """The C++ compiler's command: `chosen` (of CXX), else the first that is installed. Raises `LookupError`."""
    command = shlex.split(chosen) if chosen else [next(filter(shutil.which, COMPILERS), "")]
    if not command or shutil.which(command[0]) is None:
        raise LookupError(
            f"there is no C++ compiler ({chosen or ', '.join(COMPILERS)}) to build the CPU kernels with; install one, "
            "or set CXX"
        )
    return command


def compiler_key(command: list[str]) -> str:
    """Changes with a compiler's command and what it says of its version."""
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, check=False, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = b""
    return hashlib.sha256("\0".join(command).encode() + b"\0" + said).hexdigest()[:8]


@functools.cache
def _fingerprint(build: Build) -> str:
    digest = hashlib.sha256("\0".join((*FLAGS, build.name, build.machine, *build.flags)).encode())
    for source in sorted(file for file in SOURCES.iterdir() if file.suffix in (".h", ".cpp")):
        digest.update(f"{source.name}\0".encode() + source.read_bytes())
    if not build.machine:
        digest.update(machine().encode())
    digest.update(sys.platform.encode())
    return digest.hexdigest()[:16]
