"""Captured passes on a GPU: kernels against float64, families against Transformers, bits, texts, passes outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET, sample_prompts
from slipstream.models import load_model
from slipstream.models.cuda.choice import choose
from slipstream.sampling.noise import Noise, choose_rows
from tests.cuda.attention_cases import CASES, TOLERANCES, Layer
from tests.gpu.captured_cases import (
    FAMILIES,
    NOT_CAPTURED,
    num_equal,
    options,
    outside,
    rows_with_other_bits,
    share_outside,
    tiny_folder,
    tree_error,
    without_fp8,
)
from tests.unit.models.test_fp8_folders import FP8, saved, tiny

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
CHAIN: dict[str, Any] = {**DRAFT, "num_speculative_tokens": 4}
TREE: dict[str, Any] = {**CHAIN, "tree_top_k": 3, "num_draft_nodes": 12}
CONVERSATIONS = [row["messages"] for row in sample_prompts()[:8]]
ALIKE = [family for family in FAMILIES if not family.endswith("-odd") and family not in NOT_CAPTURED]
"""One of each kind: the others differ in widths."""
TREES = {
    "chain": list(range(-1, 7)),
    "tree": [-1, -1, 0, 0, 1, 2, 2, 5, 7, 3, 9, 10],
}
"""Their rows, and one alone, are computed in the same bucket of 16 rows."""


@pytest.mark.parametrize("name", CASES)
def test_attention_against_float64(name: str) -> None:
    case = CASES[name]
    for seed in range(3):
        assert Layer.random(case, seed, device=CUDA).error() < 4 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", ["plain", "window", "chunk", "bfloat16", "int8", "sinks"])
def test_attention_of_a_drafted_row_has_the_bits_of_plain_decoding(name: str) -> None:
    layer = Layer.random(CASES[name], 1, device=CUDA)
    together = layer.by_kernels()
    for row in range(layer.batch.num_rows):
        assert torch.equal(layer.alone(row), together[row]), row


@pytest.mark.parametrize("vocab_size", [50, 4096, 128256])
def test_choices_are_the_hosts(vocab_size: int) -> None:
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    temperatures = torch.linspace(0.2, 1.5, 16)
    temperatures[::3] = 0.0
    noise = Noise(7, 100)
    keys = torch.tensor([noise.signed_key(row) for row in range(16)])
    ours = choose(*(tensor.to(CUDA) for tensor in (logits, keys, temperatures))).tolist()
    for row, temperature in enumerate(temperatures.tolist()):
        key = noise.key(row) if temperature else None
        assert ours[row] == int(choose_rows(logits[row : row + 1] / (temperature or 1.0), [key])), row


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("context", [100, 250])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_drafted_rows_have_the_bits_of_plain_decoding(dtype: str, context: int, shape: str) -> None:
    """Behind 250 entries a draft lies on both sides of the end of a split."""
    lm = load_model(EMBEDDED_TARGET, dtype=dtype, **options("cuda"))
    assert rows_with_other_bits(lm, TREES[shape], context) == 0
    assert not outside([lm])[1]


@pytest.mark.parametrize("spec", [None, CHAIN, TREE], ids=["off", "chain", "tree"])
def test_passes_are_captured(spec: dict[str, Any] | None) -> None:
    llm = LLM(speculative_config=spec, dtype="bfloat16", max_num_seqs=8, **options("cuda"))
    assert share_outside(llm, CONVERSATIONS) <= 0.01


@pytest.mark.parametrize("family", ALIKE)
def test_a_family_is_transformers_own(family: str, tmp_path: Path) -> None:
    error, lm = tree_error(tiny_folder(family, tmp_path / "model"), "cuda")
    assert error < 1e-4
    replayed, eager = outside([lm])
    assert replayed
    assert not eager


@pytest.mark.parametrize("family", NOT_CAPTURED)
def test_a_family_that_attends_by_itself(family: str, tmp_path: Path) -> None:
    assert tree_error(tiny_folder(family, tmp_path / "model"), "cuda", captured=False)[0] < 1e-4


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma3", "gpt-oss"])
def test_texts_of_a_family(family: str, tmp_path: Path) -> None:
    """Drafts by the model itself are all right, those of another one nearly none."""
    folder, other = (tiny_folder(family, tmp_path / str(seed), seed) for seed in range(2))
    chain = {"method": "draft_model", "model": folder, "num_speculative_tokens": 4}
    tree = {"method": "draft_model", "model": other, "tree_top_k": 2, "num_draft_nodes": 8}
    for spec in (chain, tree):
        equal, number = num_equal(folder, "cuda", spec, dtype="float32")
        assert equal == number


def test_an_fp8_checkpoint(tmp_path: Path) -> None:
    """It is the model of the numbers that the file stands for."""
    numbers = saved(tmp_path / "fp8", FP8, tiny())
    plain = without_fp8(tmp_path / "fp8", numbers, tmp_path / "plain")
    names = {"dtype": "bfloat16", **options("cuda")}
    ours, theirs = (load_model(str(folder), **names) for folder in (tmp_path / "fp8", plain))
    for name, weight in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], weight), name
    assert rows_with_other_bits(ours, TREES["chain"], 20) == 0
