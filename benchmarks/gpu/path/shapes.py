"""Llamas of the sizes that are measured, with random weights that are made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.models import CausalLM
from slipstream.models.attention.base import ATTENTION_NAME
from slipstream.models.loading import adapt

SHAPES: dict[str, dict[str, int]] = {
    "1G": {
        **{"vocab_size": 4096, "hidden_size": 1792, "intermediate_size": 4928, "num_hidden_layers": 25},
        **{"num_attention_heads": 28, "num_key_value_heads": 28, "head_dim": 64},
    },
    "8B": {
        **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    },
}
"""The embedded target that is cost-expanded to 1 G, and Llama 3.1 8B."""
TINY = {
    **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
}
POSITIONS = 16384
RECORDED = "slipstream.testing.recorded_graph"


@dataclass(frozen=True)
class Way:
    """How passes are computed."""

    attention: str
    executor: str
    reproducible: bool = True
    """See `EngineConfig.reproducible`."""

    def on(self, device: torch.device) -> Way:
        """The same on a CPU: graphs are recorded by the stand-in."""
        if device.type == "cuda" or self.executor == "eager":
            return self
        recorded = "RecordedKernels" if self.executor == "cuda_kernels" else "RecordedExecutor"
        return Way(f"{RECORDED}:TritonOnCpu", f"{RECORDED}:{recorded}", self.reproducible)


WAYS = {
    "fused": Way("triton", "cuda_kernels"),
    "fused, cuBLAS": Way("triton", "cuda_kernels", reproducible=False),
    "captured": Way("triton", "cuda_graph"),
    "eager": Way("packed", "eager"),
    "compiled": Way("triton", "compiled_graph"),
}


def products(shape: dict[str, int]) -> list[tuple[int, int]]:
    """[outputs, inputs] of the different linear layers."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = (
        shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    sizes = [(queries, hidden), (keys, hidden), (hidden, queries), (inner, hidden), (hidden, inner)]
    return list(dict.fromkeys([*sizes, (shape["vocab_size"], hidden)]))


def llama(
    shape: dict[str, int], device: torch.device, attention: str, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """The Transformers model."""
    sizes: dict[str, Any] = {**shape, "max_position_embeddings": POSITIONS}
    config = LlamaConfig(**sizes, tie_word_embeddings=False, eos_token_id=None)
    make: Any = LlamaForCausalLM
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return make._from_config(config, dtype=dtype, attn_implementation=attention).eval()


def causal_lm(shape: dict[str, int], device: torch.device, way: Way) -> CausalLM:
    """The model as the engine runs it."""
    own = way.on(device)
    model = llama(shape, device, ATTENTION_NAME)
    names: dict[str, Any] = {
        "attention_backend": own.attention,
        "executor": own.executor,
        "reproducible": own.reproducible,
    }
    return adapt(model, "random weights", canary=False, native=False, **names)


def bytes_of(model: Any) -> int:
    """What a pass reads of the weights: all but the embedding."""
    whole = sum(int(parameter.nbytes) for parameter in model.parameters())
    return whole - int(model.get_input_embeddings().weight.nbytes)
