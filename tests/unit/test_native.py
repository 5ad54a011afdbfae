"""Compiling the CPU kernels: once, for this machine, and doing without where that is impossible."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.errors import ConfigError
from slipstream.models import load_model, loading, native


@pytest.fixture
def forgotten() -> Iterator[None]:
    """No library is loaded yet, and none is afterwards."""
    native.library.cache_clear()
    loading._warn_once.cache_clear()
    yield
    native.library.cache_clear()
    loading._warn_once.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    assert native.unavailable() is None
    (built,) = (tmp_path / "cache").iterdir()
    native.library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.unavailable() is None, "the second time needs no compiler"
    assert list((tmp_path / "cache").iterdir()) == [built]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "there is no C++ compiler (no-such-compiler)"),
        ("false", "false could not build the CPU kernels"),
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
    assert [record.message for record in caplog.records] == [
        f"{native.unavailable()}; PyTorch's own operators are used instead, which are slower"
    ]
    assert reason in str(native.unavailable())
    assert "\n" not in str(native.unavailable())
    with pytest.raises(ConfigError, match="cpu_kernels is native, but"):
        load_model(EMBEDDED_DRAFT, cpu_kernels="native")
    assert list(tmp_path.iterdir()) == [], "a failed build leaves nothing behind"


@pytest.mark.usefixtures("forgotten")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert native.unavailable() is None


def test_the_structs_have_the_sizes_of_the_sources(tmp_path: Path) -> None:
    """A field that only one side has would shift all others."""
    import subprocess

    program = tmp_path / "sizes.cpp"
    program.write_text(
        f'#include <cstdio>\n#include "{native.SOURCES / "decoder.h"}"\n'
        "int main() { std::printf("
        '"%zu %zu %zu %zu", sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(Batch)); }\n'
    )
    subprocess.run(
        ["c++", "-std=c++20", "-march=native", str(program), "-o", str(tmp_path / "sizes")], check=True
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
