"""The layers for multi-token prediction that many checkpoints bring: DeepSeek-V3's form, and its relatives.

A row pairs the target's hidden state h of a token with the embedding e of the token after it, and predicts the token
after that: `head(norm(layer(projection([norm(e); norm(h)]))))`, with the target's own embedding and output layer
(DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2). The layer is an ordinary one of the target's family.

Of several layers each predicts a token further. A row of the second one pairs the first one's output for the row
before with the embedding of the row's token, and so on: each layer's rows begin one token later than those of the layer
before. Draft token k comes from layer k mod n. Behind the last layer the first one goes on with what the last one put
out, as a single layer goes on with its own output.

What differs between families raises no error when it is wrong, since a norm hides the scale of what it is given. It
costs acceptance only. `MtpForm` holds these differences.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from slipstream.models.single_layer import SingleLayer, ends_of


@dataclass(frozen=True)
class MtpForm:
    """How a family's layers are fed."""

    hidden_first: bool = False
    """Whether the hidden state comes before the embedding in the projection's input."""
    hidden_is_normed: bool = True
    """Whether it is the target's state behind its final norm, not before."""
    recycles_normed: bool = True
    """Whether the next step reads a layer's output behind its own final norm, not before."""
    masks_first: bool = True
    """Whether the embedding at position 0 is zero."""


class MtpLayer(nn.Module):
    """One prediction layer, without the target's embedding and output layer."""

    def __init__(self, layer: SingleLayer) -> None:
        """The layer's final norm is the head's own."""
        super().__init__()
        self.shape = layer.shape
        self.called = {"projection", *(f"decoder.{name}" for name in layer.called)}
        """Names of the linear layers that a pass calls."""
        self.decoder = layer.model.get_decoder()
        hidden: int = layer.model.config.hidden_size
        own = ends_of(layer.model)
        self.norm: nn.Module = getattr(self.decoder, own.final_norm)
        setattr(self.decoder, own.final_norm, nn.Identity())
        setattr(self.decoder, own.embedding, None)
        self.embedding_norm: nn.Module = copy.deepcopy(self.norm)
        self.hidden_norm: nn.Module = copy.deepcopy(self.norm)
        weight = self.norm.weight
        self.projection = nn.Linear(2 * hidden, hidden, bias=False, device=weight.device, dtype=weight.dtype)


class MtpHead(nn.Module):
    """The prediction layers of a checkpoint, in the order in which they draft."""

    target_scale: Tensor | None

    def __init__(
        self,
        layers: Seq[SingleLayer],
        form: MtpForm,
        target_scale: Tensor | None = None,
        depth: int | None = None,
    ) -> None:
        """`target_scale` [hidden] is what the target's final norm multiplies with; it is needed where the hidden state
        is the one before that norm. `depth` is the most draft tokens one behind the other; None: one a layer."""
        super().__init__()
        self.form, self.depth = form, len(layers) if depth is None else depth
        self.register_buffer("target_scale", target_scale)
        self.layers = nn.ModuleList(MtpLayer(layer) for layer in layers)
        self.shapes = [layer.shape for layer in layers]
        self.kept_width: int = (len(layers) - 1) * layers[0].model.config.hidden_size
        """Numbers that are kept of a token beside keys and values: the outputs of all layers but the last."""

    def layer(self, number: int) -> MtpLayer:
        """The layer of this number."""
        return cast(MtpLayer, self.layers[number])

    def needed(self, level: int) -> set[int]:
        """The layers that read a draft token of this level: those that draft a token behind it. 0 is the text, which
        all layers read."""
        number = len(self.layers)
        end = min(self.depth, level + number) if level else number
        return {later % number for later in range(level, end)}

    def encode(self, features: Tensor) -> Tensor:
        """The states for the target's features [N, hidden], which are those behind its final norm.

        Its norm hides the scale of a state, so that without the weights of the target's norm it is as before that norm.
        """
        return features if self.target_scale is None else features / self.target_scale

    def forward(
        self, number: int, embeds: Tensor, states: Tensor, positions: Tensor, arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """embeds and states [1, N, hidden], positions [1, N] -> a layer's output before and behind its final norm.

        `arguments` are those of an `AttentionPass`, or `attention_mask` where the layer has its own attention.
        """
        layer = self.layer(number)
        if self.form.masks_first:
            embeds = torch.where(positions[..., None] == 0, 0, embeds)
        parts = layer.embedding_norm(embeds), layer.hidden_norm(states)
        joined = torch.cat(parts[::-1] if self.form.hidden_first else parts, dim=-1)
        output = layer.decoder(
            inputs_embeds=layer.projection(joined), position_ids=positions, use_cache=False, **arguments
        ).last_hidden_state
        return output, layer.norm(output)
