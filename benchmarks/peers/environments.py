"""One virtual environment a peer, outside of the repository, built once for each state of its requirements."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.command import ROOT
from benchmarks.peers.catalog import PEERS
from slipstream.config import reject_unknown
from slipstream.errors import ConfigError

REQUIREMENTS = Path(__file__).parent / "requirements"

CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
WITHOUT_AMX = (f"-DCMAKE_C_FLAGS={_NO_AMX}", f"-DCMAKE_CXX_FLAGS={_NO_AMX}")
"""Against what -march=native turns on."""

LLAMA_TOOLS = ("llama-server", "llama-quantize")
LLAMA_FALLBACK = "llama-server-without-amx"
"""Beside the tools where the processor has AMX: the worker takes it where the other one crashes as it starts."""
CPUINFO = Path("/proc/cpuinfo")


class EnvironmentFailed(Exception):
    """A peer cannot be installed here; the message is the reason that the report prints."""


@dataclass(frozen=True)
class Elsewhere:
    """What lies ready outside of the folder of environments, as the command line says."""

    environments: Mapping[str, Path] = field(default_factory=dict)
    """By peer: an environment that is used as it is, whatever versions it holds; the results say which."""
    llama_binaries: Path | None = None
    """A folder with llama.cpp's `llama-server` and `llama-quantize`."""

    def check(self) -> None:
        """Raises `ConfigError` for a place that does not hold what it should."""
        reject_unknown(self.environments, PEERS[1:], "peer")
        for peer, environment in self.environments.items():
            if not (environment / "bin/python").exists():
                raise ConfigError(
                    f"--environments: {environment} is no environment for {peer}: it has no bin/python"
                )
        for name in LLAMA_TOOLS:
            if self.llama_binaries is not None and not (self.llama_binaries / name).is_file():
                raise ConfigError(f"--llama-binaries: there is no {name} in {self.llama_binaries}")


NOWHERE = Elsewhere()


def ensure(peer: str, folder: Path, say: Callable[[str], None], elsewhere: Elsewhere = NOWHERE) -> Path:
    """The interpreter that runs `peer`'s worker; its environment is built where it is missing or outdated.

    Slipstream runs in the interpreter of this process. Raises `EnvironmentFailed` with the reason.
    """
    if peer == "slipstream":
        return Path(sys.executable)
    if peer in elsewhere.environments:
        return elsewhere.environments[peer] / "bin/python"
    environment = folder / peer
    python = environment / "bin/python"
    stamp = environment / ".requirements"
    wanted = _fingerprint(peer)
    tools_missing = peer == "llamacpp" and not all(
        (environment / "bin" / tool).exists() for tool in LLAMA_TOOLS
    )
    compiling = tools_missing and elsewhere.llama_binaries is None
    if stamp.is_file() and stamp.read_text() == wanted and python.exists() and not compiling:
        return python
    say(f"{peer}: building its environment in {environment}")
    if not python.exists():
        venv.EnvBuilder(with_pip=True).create(environment)
    for arguments in _installs(peer):
        run_command(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        )
    _install_optional(peer, python, say)
    if compiling:
        say("llamacpp: compiling it, about ten minutes on two cores")
        build_llama_tools(environment)
    stamp.write_text(wanted)
    return python


def process_environment(
    peer: str, folder: Path, threads: int, elsewhere: Elsewhere = NOWHERE
) -> dict[str, str]:
    """Environment variables of a peer's worker: threads, no network, and what its own documentation recommends."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if peer == "slipstream":
        variables["PYTHONPATH"] = str(ROOT / "src")
    if peer == "openvino":
        variables["OPENVINO_TELEMETRY_OPTOUT"] = "1"
    if peer == "llamacpp":
        environment = elsewhere.environments.get(peer, folder / peer)
        variables["LLAMA_BINARIES"] = str(elsewhere.llama_binaries or environment / "bin")
    if peer == "vllm":
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with two cores the other process only takes time
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            # This version cannot load what its ahead-of-time compiler saved; torch's own cache works.
            "VLLM_USE_AOT_COMPILE": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor-cache"),
            "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),  # compiled graphs, from the second start on
            "LD_PRELOAD": ":".join(_vllm_preloads(elsewhere.environments.get(peer, folder / peer))),
        }
    return variables


def _vllm_preloads(environment: Path) -> list[str]:
    """Its CPU guide asks for Intel's OpenMP, which comes with it, and tcmalloc, which the system may have."""
    patterns = ("lib/*/libtcmalloc_minimal.so.4", "lib/*/libtcmalloc.so.4", "lib64/libtcmalloc*.so.4")
    allocators = [str(path) for pattern in patterns for path in sorted(Path("/usr").glob(pattern))]
    openmp = environment / "lib/libiomp5.so"
    return allocators[:1] + ([str(openmp)] if openmp.exists() else [])


def _fingerprint(peer: str) -> str:
    files = sorted(REQUIREMENTS.glob(f"{peer}*.txt"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _installs(peer: str) -> list[list[str]]:
    """torch first and alone, so that a CPU build of it stays; then the pins as they stand, without dependencies."""
    file = REQUIREMENTS / f"{peer}.txt"
    torch = [line for line in file.read_text().splitlines() if line.startswith("torch==")]
    return [*([line] for line in torch), ["--no-deps", "-r", str(file)]]


def _install_optional(peer: str, python: Path, say: Callable[[str], None]) -> None:
    file = REQUIREMENTS / f"{peer}-optional.txt"
    if file.is_file():
        try:
            run_command([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(file)])
        except EnvironmentFailed as failure:
            say(f"{peer}: {file.name} could not be installed: {failure}")


def build_llama_tools(environment: Path) -> None:
    """Build the tools, and on a processor with AMX the server without it too, which is all if the first build fails."""
    sources = environment / "sources"
    sources.mkdir(exist_ok=True)
    pip = [str(environment / "bin/python"), "-m", "pip", "download", "--quiet", "--no-deps"]
    requirement = str(REQUIREMENTS / "llamacpp-source.txt")
    run_command([*pip, "--no-binary", "llama-cpp-python", "-r", requirement, "--dest", str(sources)])
    [archive] = sources.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(sources, filter="data")
    [tree] = sources.glob("llama_cpp_python-*/vendor/llama.cpp")
    binaries = environment / "bin"
    has_amx = CPUINFO.is_file() and "amx_tile" in CPUINFO.read_text().split()
    try:
        _compile_llama(environment, tree, environment / "build", ())
    except EnvironmentFailed:
        if not has_amx:
            raise
    else:
        for name in LLAMA_TOOLS:
            (environment / "build/bin" / name).rename(binaries / name)
    if has_amx:
        plain = environment / "build-without-amx"
        _compile_llama(environment, tree, plain, WITHOUT_AMX)
        (plain / "bin/llama-server").rename(binaries / LLAMA_FALLBACK)
        if not (binaries / "llama-server").exists():
            shutil.copy(binaries / LLAMA_FALLBACK, binaries / "llama-server")
            (plain / "bin/llama-quantize").rename(binaries / "llama-quantize")


def _compile_llama(environment: Path, tree: Path, build: Path, more: Sequence[str]) -> None:
    tool = environment / "bin/cmake"
    make_program = f"-DCMAKE_MAKE_PROGRAM={environment / 'bin/ninja'}"
    run_command(
        [str(tool), "-G", "Ninja", "-S", str(tree), "-B", str(build), make_program, *CMAKE_OPTIONS, *more]
    )
    parallel = str(os.cpu_count() or 1)
    run_command([str(tool), "--build", str(build), "--target", *LLAMA_TOOLS, "--parallel", parallel])


def run_command(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise EnvironmentFailed(f"{' '.join(command[1:4])} failed: {lines[-1] if lines else 'no message'}")
