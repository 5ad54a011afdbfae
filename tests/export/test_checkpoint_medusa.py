"""Medusa heads for vLLM up to 0.32, and what no engine runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.draft.heads.checkpoints import read_checkpoint
from slipstream.draft.heads.medusa import MedusaConfig, MedusaHeads, save_medusa
from slipstream.tools.export.checkpoints import convert
from slipstream.tools.export.refusals import ExportError
from tests.export.test_checkpoint_eagle import equal, record


@pytest.mark.parametrize("shares", [False, True])
def test_heads_are_written_for_vllm_032_only(shares: bool, tmp_path: Path) -> None:
    config = MedusaConfig(hidden_size=320, vocab_size=4096, num_heads=2, shares_lm_head=shares)
    heads = MedusaHeads(config, torch.nn.Identity()).half()
    save_medusa(heads, tmp_path / "ours")
    ours = record(tmp_path / "ours", method="medusa")
    made = convert(ours, "vllm", tmp_path / "vllm", version="0.32")
    if shares:
        embedding = read_checkpoint(EMBEDDED_TARGET)[1]["model.embed_tokens.weight"]
        assert torch.equal(read_checkpoint(str(made.draft))[1]["0.1.weight"], embedding)
    else:
        assert equal(tmp_path / "ours", str(made.draft))
    for engine, version in (("vllm", "0.33"), ("vllm", None), ("sglang", None), ("llama_cpp", None)):
        with pytest.raises(ExportError, match="draft model"):
            convert(ours, engine, tmp_path / "no", version=version)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm", "transformers"])
def test_draft_models_are_loaded_as_they_are(engine: str, tmp_path: Path) -> None:
    made = convert(record(EMBEDDED_DRAFT, method="draft_model"), engine, tmp_path)
    assert (made.target, made.draft, made.files) == (None, None, ())
