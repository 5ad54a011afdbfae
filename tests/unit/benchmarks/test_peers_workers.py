"""Peers on processors that do not have, or cannot run, what their fastest form wants."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.peers import environments
from benchmarks.peers.environments import LLAMA_FALLBACK, LLAMA_TOOLS, WITHOUT_AMX, EnvironmentFailed
from benchmarks.peers.workers import llamacpp
from benchmarks.peers.workers.loop import Refused

CRASHES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
ENDS = "raise SystemExit(3)"
SERVES = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words): pass
if "--version" in sys.argv:
    print("version: 7")
else:
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
REQUEST: dict[str, Any] = {
    **{"target": "t.gguf", "draft": "d.gguf", "weights": "Q8_0", "threads": 1, "options": {}},
    **{"max_num_seqs": 1, "max_model_len": 64},
}


def program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(llamacpp, "BINARIES", tmp_path)
    monkeypatch.setattr(llamacpp, "FALLBACK", tmp_path / LLAMA_FALLBACK)
    return tmp_path


def test_a_server_that_crashes_as_it_starts_is_replaced_by_the_one_without_amx(binaries: Path) -> None:
    program(binaries / "llama-server", CRASHES)
    with pytest.raises(Refused, match="llama-server ended with -4 while it started"):
        llamacpp.load(REQUEST)
    program(binaries / LLAMA_FALLBACK, SERVES)
    loaded = llamacpp.load(REQUEST)
    loaded.backend.process.kill()  # type: ignore[attr-defined]
    assert loaded.versions == {"llama.cpp": "7"}
    assert "built without AMX: with it, it crashes here" in loaded.notes


def test_a_server_that_refuses_a_model_is_believed(binaries: Path) -> None:
    program(binaries / "llama-server", ENDS)
    program(binaries / LLAMA_FALLBACK, SERVES)
    with pytest.raises(Refused, match="ended with 3"):
        llamacpp.load(REQUEST)


@dataclass
class Builds:
    """The options of each build, and whether those with AMX fail."""

    options: list[list[str]] = field(default_factory=list)
    amx_fails: bool = False


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    (tmp_path / "bin").mkdir()
    sources = tmp_path / "sources/llama_cpp_python-1/vendor/llama.cpp"
    builds = Builds()

    def run(command: list[str]) -> None:
        if "--build" in command:
            made = Path(command[command.index("--build") + 1]) / "bin"
            made.mkdir(parents=True)
            for name in LLAMA_TOOLS:
                (made / name).write_text(made.parent.name)
        elif "-B" in command:
            builds.options.append(command)
            if builds.amx_fails and WITHOUT_AMX[0] not in command:
                raise EnvironmentFailed("the compiler does not know these tiles")

    class Packed:
        def __enter__(self) -> Packed:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is open."""

        def extractall(self, _folder: Path, **_: object) -> None:
            sources.mkdir(parents=True)

    (tmp_path / "sources").mkdir()
    (tmp_path / "sources/llama_cpp_python-1.tar.gz").touch()
    (tmp_path / "cpuinfo").write_text("flags : avx512f amx_tile amx_int8")
    monkeypatch.setattr(environments, "run_command", run)
    monkeypatch.setattr(environments.tarfile, "open", lambda _: Packed())
    monkeypatch.setattr(environments, "CPUINFO", tmp_path / "cpuinfo")
    return builds


def test_llama_cpp_is_built_without_amx_too_where_there_is_amx(built: Builds, tmp_path: Path) -> None:
    environments.build_llama_tools(tmp_path)
    assert [WITHOUT_AMX[0] in options for options in built.options] == [False, True]
    assert (tmp_path / "bin/llama-server").read_text() == "build"
    assert (tmp_path / "bin" / LLAMA_FALLBACK).read_text() == "build-without-amx"


def test_where_the_build_with_amx_fails_the_other_is_all(built: Builds, tmp_path: Path) -> None:
    built.amx_fails = True
    environments.build_llama_tools(tmp_path)
    for name in (*LLAMA_TOOLS, LLAMA_FALLBACK):
        assert (tmp_path / "bin" / name).read_text() == "build-without-amx"


def test_elsewhere_one_build_is_enough(built: Builds, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags : avx2")
    environments.build_llama_tools(tmp_path)
    assert len(built.options) == 1
    assert not (tmp_path / "bin" / LLAMA_FALLBACK).exists()


@pytest.mark.parametrize(
    ("flags", "weights", "cache"),
    [
        ("avx2 fma", "bfloat16", "f32"),
        ("avx2 avx512_bf16", "bfloat16", "bf16"),
        ("avx2 fma", "float32", "f32"),
        ("avx2 fma", "int8", None),
    ],
)
def test_openvino_keeps_a_float32_cache_without_bfloat16(
    flags: str, weights: str, cache: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("openvino", "openvino_genai"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    worker = importlib.import_module("benchmarks.peers.workers.openvino")
    monkeypatch.delitem(sys.modules, worker.__name__)
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(worker, "CPUINFO", tmp_path / "cpuinfo")
    assert worker.precision_of(weights).get("KV_CACHE_PRECISION") == cache
