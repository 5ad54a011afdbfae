"""Finding the CPU kernels: the build for this machine, compiled once, and doing without where that is impossible."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.config import cache_folder
from slipstream.errors import ConfigError
from slipstream.models import load_model, resolve
from slipstream.models.cpu import builds, native, pages, structs
from slipstream.models.cpu.builds import BUILDS, Build
from slipstream.models.cpu.packed_weight import PackedWeight
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.linear.int8 import Int8
from slipstream.models.loading import load_plain
from slipstream.models.matrices import read_and_forgotten


def forget_library() -> None:
    """It is looked for again."""
    native._load.cache_clear()


def forget_sources() -> None:
    """They are read again."""
    builds._fingerprint.cache_clear()


@pytest.fixture
def forgotten() -> Iterator[None]:
    """No library is loaded yet, and none is afterwards."""
    forget_library()
    resolve.warn_once.cache_clear()
    yield
    forget_library()
    resolve.warn_once.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that hands out what was compiled when this run of the tests began, and notes that it was asked."""
    assert native.unavailable() is None
    forget_library()
    built, *_ = sorted(cache_folder().glob(f"{native.build().stem}-*.so"))
    program = tmp_path / "c++"
    program.write_text(
        '#!/bin/sh\nfor target; do :; done\n[ "$target" = --version ] && exit\n'
        f'cp "{built}" "$target"\necho "$@" >> "$0.calls"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return program


def calls(compiler: Path) -> list[str]:
    """The command lines of a `compiler`."""
    return compiler.with_name("c++.calls").read_text().splitlines()


@pytest.mark.usefixtures("forgotten")
def test_compiled_once_and_kept(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    assert native.unavailable() is None
    [call] = calls(compiler)
    assert call.startswith(f"{' '.join(builds.FLAGS)} ")
    (built,) = (tmp_path / "cache").iterdir()
    forget_library()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.unavailable() is None, "the second time needs no compiler"
    assert list((tmp_path / "cache").iterdir()) == [built]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("damage", ["cut", "a byte", "of another machine"])
def test_a_kept_library_that_does_not_load_is_compiled_anew(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept,) = cache_folder().glob(f"{native.build().stem}-*.so")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    content = bytearray(kept.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        content[18 if damage == "of another machine" else len(content) // 2] ^= 255
    broken = tmp_path / kept.name
    broken.write_bytes(content)
    if damage == "of another machine":  # and whole
        broken = broken.rename(
            tmp_path / f"{kept.stem.rpartition('-')[0]}-{native.library_digest(broken)}.so"
        )

    def compile_anew(wanted: Build, compiler: list[str], folder: Path, stem: str) -> Path:
        assert kept.stem.startswith(stem)
        return Path(shutil.copy(kept, folder / f"{stem}-{native.library_digest(kept)}.so"))

    monkeypatch.setattr(native, "_compile", compile_anew)
    assert native.unavailable() is None
    assert Path(native.library()._name).name == kept.name
    forget_library()
    monkeypatch.setattr(native, "_compile", None)
    assert native.unavailable() is None, "the next time what was compiled is kept"


@pytest.mark.usefixtures("forgotten")
def test_another_compiler_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of a compiler compiles anew too: its command is the same."""
    (kept,) = cache_folder().glob(f"{native.build().stem}-*.so")
    script = tmp_path / "compiler"

    def install(version: str) -> None:
        script.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo {version} && exit\nexit 3\n")
        script.chmod(0o755)

    install("1")
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    key = builds.compiler_key([str(script)])
    (tmp_path / "cache").mkdir()
    shutil.copy(kept, tmp_path / "cache" / f"{native.build().stem}-{key}-{native.library_digest(kept)}.so")
    assert native.unavailable() is None, "it is this compiler's"
    forget_library()
    install("2")
    assert "could not build the CPU kernels: exit status 3" in str(native.unavailable())


def test_the_sources_alone_name_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(builds.SOURCES, kernels)
    monkeypatch.setattr(builds, "SOURCES", kernels)

    def name() -> str:
        forget_sources()
        return BUILDS[0].stem

    try:
        before = name()
        (kernels / "linear.h.orig").write_text("an editor's")
        (kernels / "__pycache__").mkdir()
        assert name() == before
        (kernels / "linear.h").write_text((kernels / "linear.h").read_text() + "\n")
        assert name() != before
    finally:
        forget_sources()


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
    assert not isinstance(first.executor, CpuKernels)
    assert not isinstance(second.executor, CpuKernels)
    messages = [record.message for record in caplog.records]
    assert len([message for message in messages if str(native.unavailable()) in message]) == 1
    assert messages.count("compiling the CPU kernels, once; this takes some seconds") <= 1
    assert reason in str(native.unavailable())
    assert "\n" not in str(native.unavailable())
    with pytest.raises(ConfigError, match="cpu_kernels is native, but"):
        load_model(EMBEDDED_DRAFT, cpu_kernels="native")
    left = [each.name for each in tmp_path.iterdir() if each.name != "verdicts"]
    assert left == [], "a failed build leaves nothing behind"


@pytest.mark.usefixtures("forgotten")
def test_a_cache_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file" / "folder"))
    assert native.unavailable() is None
    assert len(calls(compiler)) == 1
    assert "set SLIPSTREAM_CACHE to a folder that can be written" in caplog.text


@pytest.mark.long
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


def test_a_system_that_does_not_tell_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(builds.platform, "machine", lambda: "x86_64")
    builds.processor_flags.cache_clear()
    try:
        with pytest.raises(LookupError, match=r"this system does not say in .*none which instructions"):
            builds.choose()
    finally:
        builds.processor_flags.cache_clear()


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
    (kept,) = cache_folder().glob(f"{native.build().stem}-*.so")
    prebuilt, cache = tmp_path / "prebuilt", tmp_path / "cache"
    for folder in (prebuilt, cache):
        folder.mkdir()
    name = native.build().file_name
    shutil.copy(kept, prebuilt / name)
    monkeypatch.setattr(builds, "PREBUILT", prebuilt)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(cache))
    assert native.unavailable() is None
    assert list(cache.iterdir()) == []
    forget_library()
    broken = tmp_path / "broken"  # what is loaded from a path stays so
    broken.mkdir()
    (broken / name).write_text("of another C library")
    monkeypatch.setattr(builds, "PREBUILT", broken)
    assert "there is no C++ compiler" in str(native.unavailable())


def test_pytorchs_defaults_do_not_reach_the_kernels() -> None:
    weight = torch.randn(7, 5)
    rows = torch.randn(3, 5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        packed = PackedWeight([weight], [None], Int8.kernel)
        ours = packed.multiply(rows)
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours.dtype == torch.float32
    assert torch.allclose(ours, rows @ weight.T, atol=0.1)
    with pytest.raises(TypeError, match=r"not torch\.bfloat16"):
        packed.multiply(rows.bfloat16())


FORK = """
import os
import torch
from slipstream.models.cpu.packed_weight import PackedWeight
from slipstream.models.linear.float32 import Float32

packed = PackedWeight([torch.randn(64, 32)], [None], Float32.kernel)
rows = torch.randn(2, 32)
expected = packed.multiply(rows)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(packed.multiply(rows), expected) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    """In a process of its own: the system may refuse to fork one that has mapped more than it has memory."""
    assert subprocess.run([sys.executable, "-c", FORK], check=False, timeout=120).returncode == 0


MIRRORS: dict[str, type[ctypes.Structure]] = {
    "RankPanel": structs.RankPanelStruct,
    "LowRank": structs.LowRankStruct,
    "Linear": structs.LinearStruct,
    "Norm": structs.NormStruct,
    "Mixture": structs.MixtureStruct,
    "RoundedHead": structs.RoundedHeadStruct,
    "Inputs": structs.InputsStruct,
    "Layer": structs.LayerStruct,
    "Model": structs.ModelStruct,
    "Batch": structs.BatchStruct,
    "Sight": structs.SightStruct,
    "LayerAttention": structs.LayerAttentionStruct,
    "Latent": structs.LatentStruct,
    "Eagle": structs.EagleStruct,
    "States": structs.StatesStruct,
    "Walk": structs.WalkStruct,
    "OuterProducts": structs.OuterProductsStruct,
    "Convolution": structs.ConvolutionStruct,
    "Block": structs.BlockStruct,
    "Heads": structs.HeadsStruct,
    "HeadRows": structs.HeadRowsStruct,
    "Drawing": structs.DrawingStruct,
    "Chains": structs.ChainsStruct,
    "Levels": structs.LevelsStruct,
}
OTHERWISE_CALLED = {"in_features": "in", "out_features": "out"}
"""Fields whose names are words of Python's, or would be."""


def test_every_struct_is_laid_out_as_in_the_sources(tmp_path: Path) -> None:
    """Sizes, and every field's place: one that only one side has would shift all others."""
    mirrored = {struct for struct in vars(structs).values() if _is_struct(struct)}
    assert mirrored == set(MIRRORS.values())
    ours, lines = [], []
    for name, struct in MIRRORS.items():
        ours.append(f"{name} {ctypes.sizeof(struct)}")
        lines.append(f'std::printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            ours.append(f"{name}.{field} {place.offset} {place.size}")
            member = OTHERWISE_CALLED.get(field, field)
            numbers = f"offsetof({name}, {member}), sizeof({name}::{member})"
            lines.append(f'std::printf("{name}.{field} %zu %zu\\n", {numbers});')
    program = tmp_path / "layout.cpp"
    files = ("chain", "eagle", "heads", "latent", "recurrent")
    headers = "".join(f'#include "{builds.SOURCES / name}.h"\n' for name in files)
    program.write_text(
        f"#include <cstddef>\n#include <cstdio>\n{headers}int main() {{\n{chr(10).join(lines)}\n}}\n"
    )
    command = ["c++", "-std=c++20", *native.build().flags, str(program), "-o", str(tmp_path / "layout")]
    subprocess.run(command, check=True)
    theirs = subprocess.run([str(tmp_path / "layout")], check=True, capture_output=True, text=True).stdout
    assert theirs.splitlines() == ours


def _is_struct(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ctypes.Structure) and value is not ctypes.Structure


def test_large_buffers_are_plain_memory() -> None:
    buffer = pages.huge_buffer(10_000_000)
    assert buffer.dtype == torch.uint8
    assert len(buffer) == 10_000_000
    buffer[-1] = 7
    assert int(buffer[-1]) == 7


def share_there(*tensors: torch.Tensor) -> float:
    """The share of the tensors' whole pages that this process has in memory."""
    num_there = num_pages = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        for tensor in tensors:
            found = pages._pages(tensor)
            told = os.pread(file.fileno(), 8 * len(found), 8 * (found.start // mmap.PAGESIZE))
            num_there += sum(entry >> 63 for entry in memoryview(told).cast("Q"))
            num_pages += len(found)
    return num_there / num_pages


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the system does not tell of pages")
def test_only_pages_of_a_file_are_forgotten(tmp_path: Path) -> None:
    size = 2**23
    (tmp_path / "weights").write_bytes(bytes(range(256)) * (size // 256))
    storage = torch.UntypedStorage.from_file(str(tmp_path / "weights"), shared=False, nbytes=size)
    mapped = torch.tensor([], dtype=torch.uint8).set_(storage)
    expected = int(mapped.sum())
    assert share_there(mapped) > 0
    pages.forget(mapped)
    assert share_there(mapped) == 0
    assert int(mapped.sum()) == expected
    mapped[size // 2] += 1
    pages.forget(mapped)
    assert int(mapped.sum()) == expected + 1, "what was written stays"
    own = torch.ones(size, dtype=torch.uint8)
    pages.forget(own)
    assert int(own.sum()) == size


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the system does not tell of pages")
def test_passes_before_packing_hold_little_of_the_file(tmp_path: Path) -> None:
    """28 MB of weights of more than one MB each, in the type in which they are stored."""
    shape = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).half().save_pretrained(tmp_path)
    model = load_plain(str(tmp_path), dtype=torch.float16, attention="eager").eval()
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        linears = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
        weights = [weight for weight in linears if weight.nbytes > 2**20]
        with read_and_forgotten(model):
            assert torch.equal(model(input_ids=ids).logits, expected)
        assert share_there(*weights) < 0.1
        assert torch.equal(model(input_ids=ids).logits, expected)
        assert share_there(*weights) > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
def test_weights_are_stacked_a_part_at_a_time(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a slice ends makes no difference."""
    shapes = [(101, 40)] * 2 if interleaved else [(70, 40), (33, 40), (1, 40), (98, 40)]
    weights = [torch.randn(shape) for shape in shapes]
    whole = PackedWeight(weights, [None] * len(weights), Int8.kernel, interleaved)
    monkeypatch.setattr(pages, "SLICE_WEIGHTS", 1)
    in_parts = PackedWeight(weights, [None] * len(weights), Int8.kernel, interleaved)
    rows = torch.randn(3, 40)
    assert torch.equal(in_parts.multiply(rows), whole.multiply(rows))
    assert torch.equal(in_parts.panels, whole.panels)
    if not interleaved:
        plain = PackedWeight([torch.cat(weights)], [None], Int8.kernel)
        assert torch.equal(plain.panels, whole.panels)
