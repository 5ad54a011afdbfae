"""Records what the speculators library computes with small random P-EAGLE heads, for `tests/unit/draft/test_peagle.py`.

Run in an environment with speculators 0.9 (it is not among the tests' requirements):

    python tests/parity/record_peagle.py tests/parity/recorded
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.peagle import core
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

HIDDEN, VOCAB, LENGTH, DEPTHS, MASK = 16, 30, 9, 4, 7
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
HEADS: dict[str, tuple[type, int, dict[str, Any]]] = {
    "llama": (LlamaConfig, 2, {}),
    "qwen3": (Qwen3Config, 3, {"norm_before_residual": True, "draft_vocab_size": 12}),
}


def record(name: str, folder: Path) -> None:
    """Write the head's configuration and tensors, its input, and the logits of every anchor and depth."""
    family, layers, options = HEADS[name]
    torch.manual_seed(0)
    layer = family(**SIZES, num_hidden_layers=layers)
    layer._attn_implementation = "eager"
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer,
        mask_token_id=MASK,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **{"draft_vocab_size": VOCAB, **options},
    )
    model = core.PEagleDraftModel(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if config.draft_vocab_size < VOCAB:
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[torch.randperm(VOCAB)[: config.draft_vocab_size]] = True
        ids = known.nonzero()[:, 0]
        model.load_vocab_mappings(known, ids - torch.arange(len(ids)))
    seen: dict[str, torch.Tensor] = {}

    def noted(**given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.update({key: given[key] for key in ("logits", "anchor_pos", "depth")})
        return torch.zeros(()), {}

    core.compute_metrics = noted
    tokens, features = torch.randint(VOCAB, (1, LENGTH)), torch.randn(1, LENGTH, 3 * HIDDEN)
    with torch.no_grad():
        model(
            hidden_states=features,
            input_ids=tokens,
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            loss_mask=torch.ones(1, LENGTH),
            verifier_last_hidden_states=torch.zeros(1, LENGTH, HIDDEN),
            num_depths=DEPTHS,
            down_sample_ratio=1.0,
            down_sample_ratio_min=1.0,
        )
    state = {key: value for key, value in model.state_dict().items() if not key.startswith("verifier_")}
    recorded = {f"head.{key}": value for key, value in state.items()}
    recorded |= {"tokens": tokens[0], "features": features[0], "logits": seen["logits"][0]}
    recorded |= {"anchor": seen["anchor_pos"], "depth": seen["depth"]}
    save_file(
        {key: value.contiguous() for key, value in recorded.items()}, folder / f"peagle_{name}.safetensors"
    )
    written = config.to_dict()
    written["transformer_layer_config"] = layer.to_diff_dict()
    (folder / f"peagle_{name}.json").write_text(
        json.dumps(written, indent=1, sort_keys=True, default=str) + "\n"
    )


if __name__ == "__main__":
    for head in HEADS:
        record(head, Path(sys.argv[1]))
