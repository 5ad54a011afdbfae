"""Finding the CPU kernels: the build for this machine, compiled once, and doing without where that is impossible."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.config import cache_folder
from slipstream.errors import ConfigError
from slipstream.models import load_model, loading
from slipstream.models.cpu import builds, native
from slipstream.models.cpu.builds import BUILDS, Build
from slipstream.models.linear.float32 import Float32
from slipstream.models.linear.int8 import Int8


@pytest.fixture
def forgotten() -> Iterator[None]:
    """No library is loaded yet, and none is afterwards."""
    native._load.cache_clear()
    loading.warn_once.cache_clear()
    yield
    native._load.cache_clear()
    loading.warn_once.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    assert native.unavailable() is None
    (built,) = (tmp_path / "cache").iterdir()
    native._load.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.unavailable() is None, "the second time needs no compiler"
    assert list((tmp_path / "cache").iterdir()) == [built]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "there is no C++ compiler (no-such-compiler)"),
        ("false", "false could not build the CPU kernels: exit status 1"),
    ],
)
def test_without_a_compiler_pytorch_computes_and_a_warning_says_why(
    compiler: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        first, second = load_model(EMBEDDED_DRAFT), load_model(EMBEDDED_DRAFT, quantization="int8")
    assert first.decoder is None
    assert second.decoder is None
    messages = [record.message for record in caplog.records]
    assert len([message for message in messages if str(native.unavailable()) in message]) == 1
    assert messages.count("compiling the CPU kernels, once; this takes some seconds") <= 1
    assert reason in str(native.unavailable())
    assert "\n" not in str(native.unavailable())
    with pytest.raises(ConfigError, match="cpu_kernels is native, but"):
        load_model(EMBEDDED_DRAFT, cpu_kernels="native")
    assert list(tmp_path.iterdir()) == [], "a failed build leaves nothing behind"


@pytest.mark.usefixtures("forgotten")
def test_a_cache_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file" / "folder"))
    assert native.unavailable() is None
    assert "set SLIPSTREAM_CACHE to a folder that can be written" in caplog.text


@pytest.mark.skipif(builds.machine() != "x86_64", reason="names x86 processors")
@pytest.mark.parametrize(
    "build", [build for build in BUILDS if build.machine != "aarch64"], ids=attrgetter("name")
)
def test_every_build_compiles(build: Build) -> None:
    command = [*build.command(["c++"], Path("/dev/null")), "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


ZEN_4 = "avx2 fma bmi1 bmi2 f16c movbe abm avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_tile amx_int8 amx_bf16"
ALDER_LAKE = "avx2 fma bmi1 bmi2 f16c movbe abm avx_vnni"


@pytest.mark.parametrize(
    ("processor", "flags", "names"),
    [
        ("x86_64", SAPPHIRE_RAPIDS, ["amx", "avx512_vnni", "avx512", "avx2"]),
        ("x86_64", ZEN_4, ["avx512_vnni", "avx512", "avx2"]),
        ("x86_64", ALDER_LAKE, ["avx2_vnni", "avx2"]),
        ("x86_64", "avx", []),
        ("aarch64", "fp asimd asimddp", ["neon_dotprod", "neon"]),
        ("aarch64", "fp asimd", ["neon"]),
        ("riscv64", "", ["generic"]),
    ],
)
def test_a_processor_runs_what_it_has_instructions_for(processor: str, flags: str, names: list[str]) -> None:
    assert [build.name for build in builds.runnable(flags.split(), processor)] == names
    if names:
        assert builds.choose("", flags.split(), processor).name == names[0]
        assert builds.choose(names[-1], flags.split(), processor).name == names[-1]


def test_a_processor_without_a_build_says_so() -> None:
    with pytest.raises(LookupError, match="neither AVX2 with FMA nor NEON"):
        builds.choose("", ["avx"], "x86_64")


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("forced", "message"),
    [
        (
            "avx1024",
            r"SLIPSTREAM_CPU_ISA is 'avx1024', and must be one of amx, avx512_vnni, .*; this one runs ",
        ),
        ("generic", r"SLIPSTREAM_CPU_ISA is 'generic', which is not for this processor; this one runs "),
    ],
)
def test_a_build_that_cannot_run_is_refused(
    forced: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", forced)
    with pytest.raises(ConfigError, match=message):
        load_model(EMBEDDED_DRAFT)


@pytest.mark.usefixtures("forgotten")
def test_kernels_of_the_package_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they do not load: then it is as without them."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    cached = cache_folder() / native.build().file_name
    prebuilt, cache = tmp_path / "prebuilt", tmp_path / "cache"
    for folder in (prebuilt, cache):
        folder.mkdir()
    shutil.copy(cached, prebuilt)
    monkeypatch.setattr(builds, "PREBUILT", prebuilt)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(cache))
    assert native.unavailable() is None
    assert list(cache.iterdir()) == []
    native._load.cache_clear()
    broken = tmp_path / "broken"  # what is loaded from a path stays so
    broken.mkdir()
    (broken / cached.name).write_text("of another C library")
    monkeypatch.setattr(builds, "PREBUILT", broken)
    assert "there is no C++ compiler" in str(native.unavailable())


def test_pytorchs_defaults_do_not_reach_the_kernels() -> None:
    weight = torch.randn(7, 5)
    rows = torch.randn(3, 5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        packed = native.PackedWeight([weight], [None], Int8.kernel)
        ours = packed.multiply(rows)
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours.dtype == torch.float32
    assert torch.allclose(ours, rows @ weight.T, atol=0.1)
    with pytest.raises(TypeError, match=r"not torch\.bfloat16"):
        packed.multiply(rows.bfloat16())


def test_a_forked_child_has_threads_of_its_own() -> None:
    packed = native.PackedWeight([torch.randn(64, 32)], [None], Float32.kernel)
    rows = torch.randn(2, 32)
    expected = packed.multiply(rows)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(packed.multiply(rows), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_structs_have_the_sizes_of_the_sources(tmp_path: Path) -> None:
    """A field that only one side has would shift all others."""
    program = tmp_path / "sizes.cpp"
    program.write_text(
        f'#include <cstdio>\n#include "{builds.SOURCES / "decoder.h"}"\n'
        "int main() { std::printf("
        '"%zu %zu %zu %zu", sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(Batch)); }\n'
    )
    subprocess.run(
        ["c++", "-std=c++20", *native.build().flags, str(program), "-o", str(tmp_path / "sizes")], check=True
    )
    sizes = subprocess.run([str(tmp_path / "sizes")], check=True, capture_output=True, text=True).stdout
    structs = (native.LinearStruct, native.LayerStruct, native.ModelStruct, native.BatchStruct)
    assert sizes == " ".join(str(native.ctypes.sizeof(struct)) for struct in structs)


def test_large_buffers_are_plain_memory() -> None:
    buffer = native.huge_buffer(10_000_000)
    assert buffer.dtype == torch.uint8
    assert len(buffer) == 10_000_000
    buffer[-1] = 7
    assert int(buffer[-1]) == 7
