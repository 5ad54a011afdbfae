"""The fused decoder on a GPU: its operators against float64, families against Transformers, bits, texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET, sample_prompts
from slipstream.models import load_model
from tests.cuda import layer_cases
from tests.gpu.captured_cases import options, outside, rows_with_other_bits, texts, tiny_folder, tree_error

pytestmark = pytest.mark.gpu

DECODED = (
    *("llama", "llama-gqa", "mistral", "qwen2", "qwen2-window", "qwen3", "gemma", "gemma2", "gemma3", "phi3"),
    *(
        "phi3-partial",
        "gpt-neox",
        "gpt-neox-serial",
        "olmo2",
        "smollm3",
        "starcoder2",
        "granite",
        "mixtral",
        "qwen3-moe",
        "gpt-oss",
    ),
)
TREE = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4, "tree_top_k": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_operators_against_float64(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_cases, "DEVICE", torch.device("cuda"))
    for width in (44, 2048, 8192):
        layer_cases.check_norm(dtype, width, width == 44)
        norms = [layer_cases.random_norm(width, is_centred, is_centred, 1) for is_centred in (False, True)]
        layer_cases.check_sums(dtype, width, *norms)
    for dim, half, norms_heads in ((64, 32, False), (128, 64, True), (22, 6, True), (80, 0, True)):
        layer_cases.check_rotation(dtype, dim, half, norms_heads)
    for kind in layer_cases.ACTIVATIONS:
        layer_cases.check_activation(dtype, kind, is_gated=kind != 1)
    layer_cases.check_bits(dtype)


@pytest.mark.parametrize("family", DECODED)
def test_a_family_in_the_decoder_is_transformers_own(family: str, tmp_path: Path) -> None:
    error, lm = tree_error(tiny_folder(family, tmp_path / "model"), "cuda", decodes=True)
    assert error < 1e-4
    replayed, eager = outside([lm])
    assert replayed
    assert not eager


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_drafted_rows_have_the_bits_of_plain_decoding(dtype: str) -> None:
    lm = load_model(EMBEDDED_TARGET, dtype=dtype, **options("cuda", decodes=True))
    for parents in ([*range(-1, 7)], [-1, -1, 0, 0, 1, 2, 2, 5, 7, 3, 9, 10]):
        assert rows_with_other_bits(lm, parents, 250) == 0


def test_drafts_change_no_text() -> None:
    conversations = [row["messages"] for row in sample_prompts()[:8]]
    off, on = (
        texts(LLM(speculative_config=spec, dtype="bfloat16", **options("cuda", decodes=True)), conversations)
        for spec in (None, TREE)
    )
    assert on == off


def test_it_is_what_auto_takes() -> None:
    assert load_model(EMBEDDED_TARGET, device="cuda", dtype="bfloat16").executor.name == "cuda_kernels"
