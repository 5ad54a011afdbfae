"""Every build of the CPU kernels computes the same bits: on this processor, and NEON's under qemu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence as Seq
from operator import attrgetter
from pathlib import Path

import pytest
from test_tiles import AMX, EMULATION, as_wide_as_the_build

from slipstream.config import cache_folder
from slipstream.models.cpu import builds
from slipstream.models.cpu.builds import BUILDS, Build
from tests.kit.planted_faults import Fault, plant

DRIVER = Path(__file__).with_name("odd_shapes.cpp")
SEED, NUM_CASES = "7", "50"
GENERIC = BUILDS[-1]
AVX2 = next(build for build in BUILDS if build.name == "avx2")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


def emulated(build: Build) -> bool:
    return build.machine == "aarch64" != builds.machine()


def skip_unless_runnable(build: Build) -> None:
    if emulated(build):
        for program in (CROSS_COMPILER, EMULATOR):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")
    elif build.machine not in (builds.machine(), "") or not build.needs <= builds.processor_flags():
        pytest.skip("not for this processor")


QUICKLY_COMPILED = ("-O1", *(flag for flag in builds.FLAGS if not flag.startswith("-O")))
"""For drivers of which only the results count: compiling takes a third of the time."""


def compiled(
    build: Build, folder: Path, kernels: Path = builds.SOURCES, flags: Seq[str] = builds.FLAGS
) -> Path:
    """The driver of odd shapes."""
    program = folder / f"odd_shapes_{build.name}"
    flags = [flag for flag in flags if flag not in ("-shared", "-fPIC")]
    compiler = [CROSS_COMPILER, "-static"] if emulated(build) else ["c++"]
    command = [*compiler, *flags, *build.flags, f"-I{kernels}", str(DRIVER), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def printed_digest(build: Build, program: Path) -> str:
    """Return the digest of all results of the driver: products, embeddings, hidden states, logits."""
    run = [*([EMULATOR] if emulated(build) else []), str(program), SEED, NUM_CASES]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    return printed.rpartition("digest ")[2].strip()


def digest(build: Build, folder: Path, kernels: Path = builds.SOURCES, flags: Seq[str] = builds.FLAGS) -> str:
    return printed_digest(build, compiled(build, folder, kernels, flags))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """By the build that has the shortest vectors and no instructions of its own."""
    return digest(GENERIC, tmp_path_factory.mktemp("generic"), flags=QUICKLY_COMPILED)


@pytest.mark.parametrize("build", BUILDS[:-1], ids=attrgetter("name"))
def test_odd_shapes_have_the_same_bits(build: Build, expected: str, tmp_path: Path) -> None:
    skip_unless_runnable(build)
    assert digest(build, tmp_path) == expected


X86 = pytest.mark.skipif(
    sys.platform != "linux" or builds.machine() != "x86_64", reason="for x86 processors on Linux"
)


@X86
def test_emulated_tiles_have_the_same_bits(expected: str, tmp_path: Path) -> None:
    kernels = as_wide_as_the_build(tmp_path)
    assert digest(GENERIC, tmp_path, kernels, (*QUICKLY_COMPILED, *EMULATION)) == expected


WAVES = Fault(
    "waves",
    "attention.h",
    "constexpr size_t KEPT = size_t(4) << 20;",
    "static const size_t KEPT = faulty ? 64 : size_t(4) << 20;",
)
"""Attention that may keep nearly nothing, where otherwise only texts of many thousand tokens are cut into waves. It is
no fault: the bits stay."""
FAULTS = (
    Fault(
        "another-order",
        "vectors.h",
        "return parts[0] + parts[1];",
        "return faulty ? plus_partner<1>(parts[0], parts[1], Lanes()) : parts[0] + parts[1];",
    ),
    Fault(
        "sines-of-the-library",
        "sines.h",
        "const int64_t quarters",
        "if (faulty) return {std::sin(angle), std::cos(angle)};\n  const int64_t quarters",
    ),
    Fault(
        "another-tangent",
        "activations.h",
        "(1.0f - small) / (1.0f + small)",
        "(faulty ? splat(1.0f) : 1.0f - small) / (1.0f + small)",
    ),
    Fault("another-root", "decoder.h", "1.0f / std::sqrt(", "(faulty ? 0.99999994f : 1.0f) / std::sqrt("),
    Fault(
        "another-order-of-rows",
        "recurrent.h",
        "totals[n] = (sums[0][n] + sums[2][n]) + (sums[1][n] + sums[3][n]);",
        "totals[n] = sums[0][n] + sums[2][n] + (sums[1][n] + sums[3][n]);\n"
        "      if (faulty) for (int n = 0; n < N; ++n) totals[n] = sums[0][n] + sums[1][n] + sums[2][n] + sums[3][n];",
    ),
    WAVES,
)


@pytest.fixture(scope="module")
def planted_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver over kernels with every fault, of which the variable PLANTED chooses one by its number.

    Where the processor has no AMX its tiles are compiled in: the system refuses them, and the bits are the same.
    """
    skip_unless_runnable(AVX2)
    folder = tmp_path_factory.mktemp("planted")
    kernels, flags = plant(FAULTS, folder)
    refused = AMX if sys.platform == "linux" and "amx_tile" not in builds.processor_flags() else ()
    return compiled(AVX2, folder, kernels, (*QUICKLY_COMPILED, *refused, *flags))


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: fault.name if fault else "none")
def test_another_arithmetic_in_one_build_is_found(
    fault: Fault | None, planted_driver: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", str(FAULTS.index(fault) if fault else -1))
    found = printed_digest(AVX2, planted_driver) != expected
    assert found == (fault not in (None, WAVES))


def test_contracted_products_would_be_other_bits(expected: str, tmp_path: Path) -> None:
    """What `-ffp-contract=off` is for."""
    skip_unless_runnable(AVX2)
    flags = [flag.replace("-ffp-contract=off", "-ffp-contract=fast") for flag in QUICKLY_COMPILED]
    flags.append("-fexpensive-optimizations")  # what contracts
    assert digest(AVX2, tmp_path, flags=flags) != expected


def test_sines_are_right_to_the_last_place(tmp_path: Path) -> None:
    """Within one unit in the last place of a float."""
    program = tmp_path / "sines"
    source = DRIVER.with_name("sines.cpp")
    flags = ["-O2", "-ffp-contract=off", "-std=c++20", f"-I{builds.SOURCES}"]
    subprocess.run(["c++", *flags, str(source), "-o", str(program)], check=True)
    error, rest = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split(
        maxsplit=1
    )
    assert float(error) <= 0.51
    assert rest.strip() == "and NaN where they must be"


def test_activations_are_right(tmp_path: Path) -> None:
    """To a few roundings of a float, and NaN where they must be.

    Far below zero results are exponentials of numbers down to -87, whose own rounding counts there.
    """
    program = tmp_path / "activations"
    source = DRIVER.with_name("activations.cpp")
    flags = ["-O2", "-ffp-contract=off", "-std=c++20", f"-I{builds.SOURCES}"]
    subprocess.run(["c++", *flags, str(source), "-o", str(program)], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    errors = [float(error) for error in printed.split()]
    assert max(errors[:3]) < 2e-7, printed
    assert max(errors[3:]) < 2e-5, printed


LOGITS = """
import hashlib, sys
import torch
from slipstream.assets import EMBEDDED_TARGET
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, load_model
from slipstream.models.cpu import builds
wanted = next(build for build in builds.BUILDS if build.name == sys.argv[1])
builds.choose = lambda _: wanted
torch.set_num_threads(int(sys.argv[2]))
text = [(17 * i * i + 5 * i + 3) % 96 for i in range(600)]
for quantization, caches in ((None, ("float32", "bfloat16")), ("int8", ("float16",)), ("int4", ("int8",))):
    lm = load_model(EMBEDDED_TARGET, quantization=quantization, cpu_kernels="native")
    for cache in caches:
        pool = KVPool(lm.shapes, 700, lm.dtype, lm.device, cache_dtype=getattr(torch, cache))
        digest = hashlib.sha256()
        for begin, end in ((0, 400), (400, 599), (599, 600)):
            rows = RowGroup(range(700), begin, text[begin:end], range(end - begin))
            digest.update(lm.forward([rows], pool).logits.numpy().tobytes())
        print(lm.weight_type, cache, digest.hexdigest())
"""


def test_a_models_logits_have_the_same_bits() -> None:
    """A prompt of several partitions in two parts, then one row: weights as stored, int8 and int4, all caches.

    By the best build of this machine, and by those with shorter vectors, as they are compiled for users.
    """
    printed: dict[str, list[str]] = {}
    best, *slower = builds.runnable()
    shorter = [build for build in slower if build == AVX2]
    for number, build in enumerate([best, *shorter, GENERIC]):
        environment = os.environ | {"SLIPSTREAM_CACHE": str(cache_folder())}
        done = subprocess.run(
            [sys.executable, "-c", LOGITS, build.name, str(1 + number % 2)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        printed[build.name] = done.stdout.splitlines()
    expected = printed.pop(GENERIC.name)
    assert len(set(expected)) == len({line.split()[-1] for line in expected}) == 4
    assert printed
    for name, lines in printed.items():
        assert lines == expected, name
