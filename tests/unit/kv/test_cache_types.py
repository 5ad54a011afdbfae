"""Keys and values in every type: rounded once and alike by both sides, read by every path, and few bytes."""

from __future__ import annotations

import logging
import math
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kv.pool import KVPool, LayerShape, bytes_per_token, quantise
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.cpu import builds, native
from slipstream.models.loading import _warn_of_copies
from slipstream.models.outline import outline_model
from slipstream.models.resolve import resolve_cache_dtype
from slipstream.vllm_names import own_engine_keys
from tests.kit.marks import needs_kernels

CPU = torch.device("cpu")
TYPES = ("float32", "bfloat16", "float16", "int8")
TEXT = [(17 * i * i + 5 * i + 3) % 96 for i in range(320)]
"""More than one partition of the kernels' attention."""
ERROR = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2, "int8": 0.1}
"""Largest error of a row's logits that a type may make, relative to their spread; some three times the measured."""


@pytest.fixture(scope="module", params=["native", "torch"])
def lm(request: pytest.FixtureRequest) -> CausalLM:
    if request.param == "native" and native.unavailable() is not None:
        pytest.skip("there are no native kernels")
    return load_model(EMBEDDED_TARGET, cpu_kernels=request.param)


def run(lm: CausalLM, cache: str) -> tuple[Tensor, KVPool]:
    """The logits of every row of the text, and the pool that it is in afterwards."""
    pool = KVPool(lm.shapes, len(TEXT) + 5, lm.dtype, lm.device, cache_dtype=getattr(torch, cache))
    pool.fill(math.nan)
    cuts = [0, 40, 41, 200, len(TEXT)]
    slots = pool.slots[5:]
    passes = [
        lm.forward([RowGroup(slots, begin, TEXT[begin:end], range(end - begin))], pool).logits
        for begin, end in pairwise(cuts)
    ]
    return torch.cat(passes), pool


def relative_error(ours: Tensor, expected: Tensor) -> float:
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return float(((ours - expected).norm(dim=-1) / spread).max())


@pytest.fixture(scope="module")
def stock() -> Tensor:
    """[rows, vocab]: Transformers' own, without a cache of ours."""
    model = load_model(EMBEDDED_TARGET, cpu_kernels="torch", pack=False).model
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("cache", TYPES)
def test_logits_are_transformers_within_the_types_error(lm: CausalLM, stock: Tensor, cache: str) -> None:
    error = relative_error(run(lm, cache)[0], stock)
    assert error <= ERROR[cache]
    if cache != "float32":
        assert error > 1e-5, "the entries are not rounded"


@needs_kernels
@pytest.mark.parametrize("cache", TYPES)
def test_both_sides_round_alike(cache: str) -> None:
    """Layer 0 stores the same numbers with every type, so what the kernels made of them is known."""
    lm = load_model(EMBEDDED_TARGET, cpu_kernels="native")
    exact, rounded = run(lm, "float32")[1], run(lm, cache)[1]
    twin = KVPool(lm.shapes, exact.num_slots, lm.dtype, lm.device, cache_dtype=getattr(torch, cache))
    everything = slice(5, None)
    twin.write(0, everything, *exact.read(0, everything))
    for ours, theirs in zip(
        (rounded.keys, rounded.values, rounded.key_scales, rounded.value_scales),
        (twin.keys, twin.values, twin.key_scales, twin.value_scales),
        strict=True,
    ):
        if ours:
            assert torch.equal(ours[0][:, everything], theirs[0][:, everything])


def test_int8_is_the_nearest_and_shows_what_is_no_number() -> None:
    usual = [[127.0, 0.49, 1.5, 2.5, -0.51], [0.0] * 5]
    entries = torch.tensor([*usual, [1.0, math.nan, 0, 0, 0], [math.inf, 1, 2, 3, 4]])
    integers, scales = quantise(entries)
    assert integers[:2].tolist() == [[127, 0, 2, 2, -1], [0] * 5]
    assert scales[:2].tolist() == [1.0, 0.0]
    assert scales[2:].isnan().all()
    random = torch.randn(64, 80)
    integers, scales = quantise(random)
    assert ((integers * scales[:, None] - random).abs() <= scales[:, None] * 0.5001).all()


NARROW = """
#include <cstdio>
#include "entries.h"
int main(int, char** arguments) {
  const int dim = std::atoi(arguments[1]);
  std::vector<float> entry(dim);
  std::vector<int8_t> integers(dim);
  while (std::fread(entry.data(), sizeof(float), dim, stdin) == size_t(dim)) {
    const float scale = narrow(entry.data(), dim, integers.data());
    std::fwrite(&scale, sizeof scale, 1, stdout);
    std::fwrite(integers.data(), 1, dim, stdout);
  }
}
"""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that writes int8 entries as the kernels do."""
    if shutil.which("c++") is None or native.unavailable() is not None:
        pytest.skip("there is no C++ compiler, or there are no native kernels")
    folder = tmp_path_factory.mktemp("narrow")
    (folder / "narrow.cpp").write_text("#include <vector>\n" + NARROW)
    flags = [flag for flag in builds.FLAGS if flag not in ("-shared", "-fPIC")]
    command = ["c++", *flags, *native.build().flags, f"-I{builds.SOURCES}", str(folder / "narrow.cpp")]
    subprocess.run([*command, "-o", str(folder / "narrow")], check=True)
    return folder / "narrow"


@pytest.mark.parametrize("dim", [1, 5, 64, 80])
def test_python_and_the_kernels_quantise_to_the_same_bits(dim: int, narrow: Path) -> None:
    generator = torch.Generator().manual_seed(dim)
    sizes = [1e-38, 1e-30, 3e-30, 1e-3, 1.0, 60_000.0, 1e30, 3e38 / 8]
    entries = torch.cat([torch.randn(300, dim, generator=generator) * size for size in sizes])
    halves = torch.randint(-254, 255, (300, dim), generator=generator) / 2.0
    halves[:, 0] = 127.0  # the scale is 1: every other number lies halfway between two integers
    odd = torch.zeros(8, dim)
    odd[:7, -1] = torch.tensor([0.0, -0.0, 1e-42, 1e-30, math.nan, math.inf, -math.inf])
    odd[7] = torch.finfo(torch.float32).max
    entries = torch.cat([entries, halves, odd])
    done = subprocess.run(
        [str(narrow), str(dim)], input=entries.numpy().tobytes(), capture_output=True, check=True
    )
    written = np.frombuffer(done.stdout, dtype=[("scale", "<f4"), ("integers", "i1", (dim,))])
    integers, scales = quantise(entries)
    is_number = ~scales.isnan().numpy()
    assert (np.isnan(written["scale"]) == ~is_number).all()
    assert (written["scale"] == scales.numpy())[is_number].all()
    assert (written["integers"] == integers.numpy())[is_number].all()
    assert 3 <= int((~is_number).sum()) < 10


@pytest.mark.parametrize("cache", TYPES)
def test_entries_move_with_their_scales(cache: str) -> None:
    pool = KVPool([LayerShape(2, 8, 4)], 20, torch.float32, CPU, 3, getattr(torch, cache))
    pool.fill(math.nan)
    pool.features.zero_()
    pool.write(0, slice(0, 6), torch.randn(2, 6, 8), torch.randn(2, 6, 4))
    before = [part.clone() for part in pool.read(0, slice(0, 6))]
    pool.move(0, 3, 6)
    for part, expected in zip(pool.read(0, slice(3, 9)), before, strict=True):
        assert torch.equal(part, expected)
    pool.gather(pool.slots[3:], 1, [1, 3])
    for part, expected in zip(pool.read(0, slice(4, 6)), before, strict=True):
        assert torch.equal(part, expected[:, [2, 4]])


def test_bytes() -> None:
    shapes = [LayerShape(2, 8, 4), LayerShape(1, 8, 8)]
    assert [bytes_per_token(shapes, getattr(torch, cache)) for cache in TYPES] == [160, 80, 80, 40 + 6 * 4]
    pool = KVPool(shapes, 10, torch.float32, CPU, cache_dtype=torch.int8)
    assert pool.memory_bytes() == 10 * bytes_per_token(shapes, torch.int8)


@pytest.mark.parametrize(
    ("name", "dtype", "stored", "fused", "expected"),
    [
        ("auto", "auto", torch.bfloat16, True, torch.bfloat16),
        ("auto", "auto", torch.float16, True, torch.float16),
        ("auto", "auto", torch.float32, True, torch.float32),
        ("auto", "auto", None, True, torch.float32),
        ("auto", "float32", torch.bfloat16, True, torch.float32),
        ("auto", "auto", torch.bfloat16, False, torch.float32),
        ("int8", "auto", torch.bfloat16, True, torch.int8),
        ("int8", "float32", torch.bfloat16, False, torch.int8),
    ],
)
def test_auto(name: str, dtype: str, stored: torch.dtype | None, fused: bool, expected: torch.dtype) -> None:
    assert resolve_cache_dtype(name, dtype, stored, torch.float32, fused) == expected


@needs_kernels
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_a_plan_knows_the_type(cache: str) -> None:
    loaded = load_model(EMBEDDED_TARGET, kv_cache_dtype=cache)
    outline = outline_model(EMBEDDED_TARGET, kv_cache_dtype=cache)
    assert outline.cache_dtype == loaded.cache_dtype == (torch.int8 if cache == "int8" else torch.float16)
    assert outline.kv_bytes_per_token == loaded.kv_bytes_per_token
    cache_of = loaded.new_cache(64)
    assert cache_of.memory_bytes() == 64 * loaded.kv_bytes_per_token


def test_what_is_no_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kv_cache_dtype 'int4'; did you mean 'int8'"):
        EngineConfig("m", kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match="'fp8_e5m2' is not supported; int8 is as small"):
        own_engine_keys({"kv_cache_dtype": "fp8_e5m2"})
    assert own_engine_keys({"kv_cache_dtype": torch.bfloat16}) == {"kv_cache_dtype": "bfloat16"}
    assert own_engine_keys({"kv_cache_dtype": "half"}) == {"kv_cache_dtype": "float16"}


@needs_kernels
def test_a_float32_cache_gives_the_bits_of_float32(caplog: pytest.LogCaptureFixture) -> None:
    """Weights as stored are exact; what `auto` changes is the cache, and loading says so."""
    with caplog.at_level(logging.INFO, "slipstream"):
        stored = load_model(EMBEDDED_TARGET, kv_cache_dtype="float32")
        wide = load_model(EMBEDDED_TARGET, dtype="float32")
        auto = load_model(EMBEDDED_TARGET)
    logits = [run(lm, str(lm.cache_dtype).removeprefix("torch."))[0] for lm in (stored, wide, auto)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert "kept in float32\n" in caplog.text
    assert "kept in float16 (kv_cache_dtype auto, with the fused decoder)" in caplog.text


def test_a_narrow_cache_without_the_decoder_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_copies.cache_clear()
    with caplog.at_level(logging.INFO, "slipstream"):
        load_model(EMBEDDED_TARGET, cpu_kernels="torch")
        assert "kept in float32 (kv_cache_dtype auto, without the fused decoder)" in caplog.text
        assert "every pass copies" not in caplog.text
        for _ in range(2):
            load_model(EMBEDDED_TARGET, cpu_kernels="torch", kv_cache_dtype="int8")
    assert (
        caplog.text.count("kv_cache_dtype is int8 where the fused decoder does not run: every pass copies")
        == 1
    )
