"""The target in training: hidden states of packed rows, and what it makes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import UnsupportedModelError
from slipstream.models import load_plain
from slipstream.models.support import text_config
from slipstream.train.attention import ATTENTION, block_diagonal_mask

_SAMPLED_WEIGHTS = 1024
"""Weights of each tensor that a fingerprint reads."""


def load_model(path: str, device: torch.device) -> Any:
    """The float32 model of a checkpoint, set up for packed rows; raises `ModelError`."""
    return load_plain(path, dtype=torch.float32, attention=ATTENTION).to(device)


class FrozenTarget:
    """The frozen target. `dtype` is the type of its matrix products; results are float32."""

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype) -> None:
        self.path = path
        self.model = load_model(path, device).eval().requires_grad_(False)
        self.device, self.dtype = device, dtype
        config = text_config(self.model.config)
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self.context_length = int(self.model.config.max_position_embeddings)
        check_plain_head(self.model, device)

    @torch.no_grad()
    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention_mask: Tensor,
        layers: Seq[int],
    ) -> dict[int, Tensor]:
        """Layer to float32 [B, T, hidden]."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            output = self.model.base_model(
                input_ids=token_ids,
                position_ids=positions,
                attention_mask=attention_mask,
                use_cache=False,
                output_hidden_states=any(layer < self.num_layers for layer in layers),
            )
        states = output.hidden_states
        return {
            layer: (output.last_hidden_state if layer == self.num_layers else states[layer]).float()
            for layer in sorted(set(layers))
        }

    @torch.no_grad()
    def project(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """float32 [..., hidden] after the final norm -> float32 logits [..., vocab], or of `token_ids` [k] alone."""
        layer = self.model.get_output_embeddings()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            if token_ids is None:
                logits: Tensor = layer(hidden)
            else:
                bias = None if layer.bias is None else layer.bias[token_ids]
                logits = F.linear(hidden, layer.weight[token_ids], bias)
        return logits.float()

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> float32 [..., hidden]"""
        embedded: Tensor = self.model.get_input_embeddings()(token_ids.to(self.device))
        return embedded

    def fingerprint(self) -> str:
        """A hash of the weights' shapes and of some of each one's numbers: the same for the same checkpoint."""
        found = hashlib.sha256()
        for name, weight in sorted(self.model.state_dict().items()):
            flat = weight.detach().flatten()
            some = flat[:: max(1, len(flat) // _SAMPLED_WEIGHTS)].float().cpu().numpy()
            found.update(f"{name} {tuple(weight.shape)}".encode() + some.tobytes())
        return found.hexdigest()


@torch.no_grad()
def check_plain_head(model: Any, device: torch.device) -> None:
    """Raise `UnsupportedModelError` unless the logits are the output layer's alone."""
    probe = torch.arange(min(8, text_config(model.config).vocab_size), device=device)[None]
    mask = block_diagonal_mask(torch.zeros_like(probe), torch.float32)
    positions = torch.arange(probe.shape[1], device=device)[None]
    given = {"input_ids": probe, "position_ids": positions, "attention_mask": mask, "use_cache": False}
    hidden = model.base_model(**given).last_hidden_state
    if not torch.allclose(model.get_output_embeddings()(hidden), model(**given).logits, rtol=1e-3, atol=1e-3):
        raise UnsupportedModelError(
            f"{model.config.model_type} changes its logits after the output layer; such models cannot be trained with"
        )
