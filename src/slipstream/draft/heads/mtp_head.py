"""The layer for multi-token prediction that many checkpoints bring: DeepSeek-V3's form, and its relatives.

A row pairs the target's hidden state h of a token with the embedding e of the token after it, and predicts the token
after that: `head(norm(layer(projection([norm(e); norm(h)]))))`, with the target's own embedding and output layer
(DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2). The layer is an ordinary one of the target's family.

What differs between families raises no error when it is wrong, since a norm hides the scale of what it is given. It
costs acceptance only. `MtpForm` holds these differences.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.single_layer import SingleLayer


@dataclass(frozen=True)
class MtpForm:
    """How a family's layer is fed."""

    hidden_first: bool = False
    """Whether the hidden state comes before the embedding in the projection's input."""
    hidden_is_normed: bool = True
    """Whether it is the target's state behind its final norm, not before."""
    recycles_normed: bool = True
    """Whether the next step reads the layer's output behind its own final norm, not before."""
    masks_first: bool = True
    """Whether the embedding at position 0 is zero."""


class MtpHead(nn.Module):
    """One prediction layer, without the target's embedding and output layer."""

    target_scale: Tensor | None

    def __init__(self, layer: SingleLayer, form: MtpForm, target_scale: Tensor | None = None) -> None:
        """The layer's final norm is the head's own. `target_scale` [hidden] is what the target's final norm multiplies
        with; it is needed where the hidden state is the one before that norm."""
        super().__init__()
        self.form, self.shape = form, layer.shape
        self.called = {"projection", *(f"decoder.{name}" for name in layer.called)}
        """Names of the linear layers that a pass calls."""
        self.register_buffer("target_scale", target_scale)
        self.decoder = layer.model.get_decoder()
        hidden: int = layer.model.config.hidden_size
        self.norm: nn.Module = self.decoder.norm
        self.decoder.norm = nn.Identity()
        self.decoder.embed_tokens = None
        self.embedding_norm: nn.Module = copy.deepcopy(self.norm)
        self.hidden_norm: nn.Module = copy.deepcopy(self.norm)
        weight = self.norm.weight
        self.projection = nn.Linear(2 * hidden, hidden, bias=False, device=weight.device, dtype=weight.dtype)

    def encode(self, features: Tensor) -> Tensor:
        """The states for the target's features [N, hidden], which are those behind its final norm.

        Its norm hides the scale of a state, so that without the weights of the target's norm it is as before that norm.
        """
        return features if self.target_scale is None else features / self.target_scale

    def forward(
        self, embeds: Tensor, states: Tensor, positions: Tensor, arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """embeds and states [1, N, hidden], positions [1, N] -> the layer's output before and behind its final norm.

        `arguments` are those of an `AttentionPass`, or `attention_mask` where the layer has its own attention.
        """
        if self.form.masks_first:
            embeds = torch.where(positions[..., None] == 0, 0, embeds)
        parts = self.embedding_norm(embeds), self.hidden_norm(states)
        joined = torch.cat(parts[::-1] if self.form.hidden_first else parts, dim=-1)
        output = self.decoder(
            inputs_embeds=self.projection(joined), position_ids=positions, use_cache=False, **arguments
        ).last_hidden_state
        return output, self.norm(output)
