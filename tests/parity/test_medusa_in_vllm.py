"""The Medusa files that are written here give the same logits in vLLM's own class; only where vLLM is installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from slipstream.draft.heads.medusa import MedusaConfig, MedusaHeads, save_medusa

pytest.importorskip("vllm")

HIDDEN, VOCAB = 32, 128


@pytest.mark.parametrize("shares", [False, True])
def test_vllm_computes_the_same_logits(shares: bool, tmp_path: Path) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models.medusa import Medusa
    from vllm.transformers_utils.configs.medusa import MedusaConfig as PeerConfig

    torch.manual_seed(0)
    lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    config = MedusaConfig(
        hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=3, num_layers=2, shares_lm_head=shares
    )
    heads = MedusaHeads(config, lm_head)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2
    save_medusa(heads, tmp_path, lm_head=lm_head.weight)

    hf_config = PeerConfig.from_pretrained(str(tmp_path))
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf_config))
    with set_current_vllm_config(VllmConfig()):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tmp_path}/rendezvous", 0, "gloo")
            initialize_model_parallel()
        peer = Medusa(vllm_config=SimpleNamespace(speculative_config=speculative))  # type: ignore[arg-type]
        peer.load_weights(load_file(tmp_path / "model.safetensors").items())
        rows = torch.randn(5, HIDDEN)
        with torch.no_grad():
            states = peer(rows)
            projections = list(peer.lm_heads)
            theirs = torch.stack(
                [state @ head.weight[:VOCAB].T for state, head in zip(states, projections, strict=True)]
            )
            torch.testing.assert_close(heads(rows), theirs)
