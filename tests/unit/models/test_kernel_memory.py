"""What the CPU kernels compute with: as much as is planned, bounded for long texts, and told where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.cpu import native, rounded_head
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.outline import outline_model
from slipstream.plan.passes import ROW_ARRAYS_BYTES, PassSizes
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import gptq_folder

pytestmark = needs_kernels
KEPT = 4 * 2**20
"""Bytes that attention may keep of partitions, for each thread."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of eight heads over two, of 128."""
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    path = tmp_path_factory.mktemp("wide-heads")
    LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=32_768)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def stored(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same layer, saved in 4 bits as GPTQ does."""
    return gptq_folder(tmp_path_factory.mktemp("stored") / "gptq", str(folder), 32)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same layer, with experts."""
    torch.manual_seed(0)
    shape = {"vocab_size": 96, "hidden_size": 96, "moe_intermediate_size": 40, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    config = Qwen3MoeConfig(
        **shape, **heads, num_experts=9, num_experts_per_tok=3, max_position_embeddings=32_768
    )
    path = tmp_path_factory.mktemp("experts")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def loaded(folder: Path, threads: int, quantization: str | None = None) -> CausalLM:
    """With nothing computed yet."""
    lm = load_model(
        str(folder), quantization=quantization, cpu_kernels="native", kv_cache_dtype="float32", canary=False
    )
    assert isinstance(lm.executor, CpuKernels)
    lm.executor.num_threads = threads
    return lm


def logits(lm: CausalLM, num_past: int, num_rows: int) -> torch.Tensor:
    """Return the logits of rows behind random entries."""
    torch.manual_seed(1)
    pool = KVPool(lm.shapes, num_past + num_rows, lm.dtype, lm.device)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    text = [(5 * i + 3) % 96 for i in range(num_rows)]
    wanted = sorted({0, num_rows - 1})
    return lm.forward([RowGroup(range(pool.num_slots), num_past, text, wanted)], pool).logits


@pytest.mark.parametrize("quantization", ["float32", "int8", "int4", "gptq"])
@pytest.mark.parametrize(
    ("threads", "num_past", "num_rows"),
    [(1, 0, 1), (1, 1500, 9), (2, 100, 40), (2, 1500, 1), (2, 1500, 40), (2, 700, 300), (5, 1500, 70)],
)
def test_passes_take_what_is_planned(
    folder: Path, stored: Path, quantization: str, threads: int, num_past: int, num_rows: int
) -> None:
    lm = loaded(stored, threads) if quantization == "gptq" else loaded(folder, threads, quantization)
    assert isinstance(lm.executor, CpuKernels)
    logits(lm, num_past, num_rows)
    sizes = PassSizes.of(lm)
    rows = num_rows * (sizes.row_bytes() - ROW_ARRAYS_BYTES)
    rows += sizes.copied_bytes(threads) if num_rows == 1 else 0
    planned = rows + sizes.score_bytes(num_rows, num_past + num_rows, threads)
    if num_rows < 300:
        assert lm.executor.scratch_bytes == planned
    else:  # nothing is shared in this pass, and in one of fewer rows it would be
        assert lm.executor.scratch_bytes < planned
    outline = outline_model(lm.path, quantization=None if quantization == "gptq" else quantization)
    assert outline.rounds_rows == lm.rounds_rows


@pytest.mark.parametrize("quantization", ["float32", "int8"])
@pytest.mark.parametrize(("threads", "num_rows"), [(1, 1), (2, 1), (2, 40)])
def test_best_tokens_take_what_is_planned(
    folder: Path, quantization: str, threads: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_head, "LEAST_WEIGHTS", 1)
    options: dict[str, Any] = {"quantization": quantization, "rounds_head": True}
    lm, outline = load_model(str(folder), canary=False, **options), outline_model(str(folder), **options)
    assert lm.executor.footprint() == outline.held.total_bytes
    assert isinstance(lm.executor, CpuKernels)
    lm.executor.num_threads = threads
    group = RowGroup(range(num_rows), 0, [(5 * i + 3) % 96 for i in range(num_rows)], range(num_rows))
    pool = KVPool(lm.shapes, num_rows, lm.dtype, lm.device)
    lm.forward([group], pool)
    before = lm.executor.scratch_bytes
    lm.forward([group], pool, best=True)
    taken, planned = lm.executor.scratch_bytes - before, PassSizes.of(outline).best_bytes(num_rows, threads)
    assert 0 < taken <= planned < 2 * taken + 16 * 1024


@pytest.mark.parametrize("quantization", ["float32", "int8"])
@pytest.mark.parametrize(("threads", "num_past", "num_rows"), [(1, 0, 1), (2, 1500, 40)])
def test_passes_over_experts_take_what_is_planned(
    mixture: Path, quantization: str, threads: int, num_past: int, num_rows: int
) -> None:
    lm = loaded(mixture, threads, quantization)
    assert isinstance(lm.executor, CpuKernels)
    logits(lm, num_past, num_rows)
    sizes = PassSizes.of(lm)
    rows = num_rows * (sizes.row_bytes() - ROW_ARRAYS_BYTES)
    rows += sizes.copied_bytes(threads) if num_rows == 1 else 0
    assert lm.executor.scratch_bytes == rows + sizes.score_bytes(num_rows, num_past + num_rows, threads)


_GEMMA4 = {
    **{"vocab_size": 96, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "global_head_dim": 128},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 500},
    **{"max_position_embeddings": 32_768, "pad_token_id": 0, "vocab_size_per_layer_input": 96},
}
_FEW_KEYS = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
GEMMA4: dict[str, dict[str, Any]] = {
    "dense": {"hidden_size_per_layer_input": 0, **_FEW_KEYS},
    "inputs": {"hidden_size_per_layer_input": 24, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "experts": {
        **{"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 9, "top_k_experts": 3},
        **{"moe_intermediate_size": 40, **_FEW_KEYS},
    },
}


@pytest.mark.parametrize("form", GEMMA4)
@pytest.mark.parametrize("quantization", ["float32", "int8"])
@pytest.mark.parametrize(("threads", "num_past", "num_rows"), [(1, 0, 1), (2, 1500, 20)])
def test_passes_over_layers_that_differ_take_what_is_planned(
    form: str, quantization: str, threads: int, num_past: int, num_rows: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    Gemma4ForCausalLM(Gemma4TextConfig(**_GEMMA4, **GEMMA4[form])).save_pretrained(tmp_path)
    lm = loaded(tmp_path, threads, quantization)
    assert isinstance(lm.executor, CpuKernels)
    logits(lm, num_past, num_rows)
    for sizes in (PassSizes.of(lm), PassSizes.of(outline_model(str(tmp_path), quantization=quantization))):
        rows = num_rows * (sizes.row_bytes() - ROW_ARRAYS_BYTES)
        rows += sizes.copied_bytes(threads) if num_rows == 1 else 0
        planned = rows + sizes.score_bytes(num_rows, num_past + num_rows, threads)
        assert lm.executor.scratch_bytes == planned


def test_fast_prompts_take_no_more_than_is_planned(folder: Path) -> None:
    """As much, where vectors are the widest; what is arranged for each thread is half of it elsewhere."""
    num_rows, bytes_of = 40, []
    for fast in (False, True):
        lm = loaded(folder, 2, "bfloat16")
        assert isinstance(lm.executor, CpuKernels)
        lm.fast_prompts = fast
        pool = KVPool(lm.shapes, num_rows, lm.dtype, lm.device)
        text = [(5 * i + 3) % 96 for i in range(num_rows)]
        lm.forward([RowGroup(range(num_rows), 0, text, [num_rows - 1], num_fast=num_rows * fast)], pool)
        sizes = PassSizes.of(lm)
        planned = num_rows * (sizes.row_bytes() - ROW_ARRAYS_BYTES) + sizes.score_bytes(num_rows, num_rows, 2)
        bytes_of.append((lm.executor.scratch_bytes, planned))
    (held, planned), (held_fast, planned_fast) = bytes_of
    assert held == planned
    rounded = num_rows * 33 * 64  # 1024 inputs, and a line that keeps rows apart
    arranged = 2 * 2 * native.library().slipstream_padded_out(1) * 1024
    assert held_fast - held == rounded + arranged
    assert rounded + arranged <= planned_fast - planned <= rounded + 2 * 2 * 64 * 1024


def test_long_texts_are_taken_in_waves(folder: Path) -> None:
    """What is kept of partitions stays bounded, and the bits are those of one thread, which keeps nothing."""
    num_past, num_rows = 20_000, 40
    alone = logits(loaded(folder, 1), num_past, num_rows)
    for threads in (2, 3):
        lm = loaded(folder, threads)
        assert isinstance(lm.executor, CpuKernels)
        assert torch.equal(logits(lm, num_past, num_rows), alone)
        long = lm.executor.scratch_bytes
        planned = PassSizes.of(lm).score_bytes(num_rows, num_past + num_rows, threads)
        assert planned == PassSizes.of(lm).score_bytes(num_rows, 2 * num_past, threads), "it is bounded"
        short = loaded(folder, threads)
        assert isinstance(short.executor, CpuKernels)
        logits(short, 0, num_rows)
        assert KEPT * threads / 2 < long - short.executor.scratch_bytes <= KEPT * threads


WITHOUT_MEMORY = """
import os, resource, sys
from pathlib import Path
import torch
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup
from tests.unit.models.test_kernel_memory import loaded, logits

lm = loaded(Path(sys.argv[1]), 2)
few = logits(lm, 10, 3)
pool = KVPool(lm.shapes, 30_000, lm.dtype, lm.device)
rows = RowGroup(range(30_000), 0, [7] * 30_000, [0])
taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (taken + 40 * 2**20, before[1]))
try:
    lm.forward([rows], pool)
except MemoryError as error:
    print(error)
finally:
    resource.setrlimit(resource.RLIMIT_AS, before)
print("the same" if torch.equal(logits(lm, 10, 3), few) else "other bits")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux counts it")
def test_a_pass_without_memory_is_told_and_the_next_one_is_whole(folder: Path) -> None:
    """In a process of its own: what other tests freed is memory, and this process may be given it."""
    program = [sys.executable, "-c", WITHOUT_MEMORY, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    said, after = done.stdout.splitlines()
    assert "no memory for what the CPU kernels compute with; lower" in said, done.stderr
    assert after == "the same"
