"""Gemma 4's assistant: a small decoder that has queries only, and reads its target's keys and values.

A row joins the target's embedding of a token with a state in the target's width, narrows both to the assistant's own,
and goes through a few of Gemma 4's layers. Each attends over what the target's last layer of the same type, sliding or
full, keeps of the text before the token. What comes out gives logits by an output layer of the assistant's own and,
widened again, the state of the next row.

All rows of a proposal have the position of the text's last token and see the same entries, so there is nothing to store
and nothing to roll back. The first row's state is what the target's final norm put out for the token before that one.
Positions and windows are as in Transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, apply_rotary_pos_emb

from slipstream.draft.heads.assistant_config import output_table
from slipstream.draft.heads.checkpoints import WEIGHT_FILES, HeadCheckpoint
from slipstream.errors import ModelError
from slipstream.kv.pool import LayerShape

AttendTo = Callable[[str, Tensor], Tensor]
"""type of the layer, query [N, heads, key_dim] -> [N, heads, value_dim]"""
Rotary = Mapping[str, tuple[Tensor, Tensor]]
"""Type of a layer to cosines and sines, [N, key_dim] each."""


class AssistantLayer(nn.Module):
    """One of Gemma 4's layers, without keys and values of its own. Parts are named as in checkpoints."""

    def __init__(self, text: Any, shape: LayerShape) -> None:
        """`text` is the configuration of the assistant's decoder, `shape` what the target's layer keeps of a token."""
        super().__init__()
        hidden, inner, heads = text.hidden_size, text.intermediate_size, text.num_attention_heads
        eps, bias = text.rms_norm_eps, bool(text.attention_bias)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, heads * shape.key_dim, bias=bias),
                "q_norm": Gemma4RMSNorm(shape.key_dim, eps),
                "o_proj": nn.Linear(heads * shape.value_dim, hidden, bias=bias),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.activation: Callable[[Tensor], Tensor] = ACT2FN[text.hidden_activation]
        self.key_dim = shape.key_dim
        self.input_layernorm: nn.Module = Gemma4RMSNorm(hidden, eps)
        self.post_attention_layernorm: nn.Module = Gemma4RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm: nn.Module = Gemma4RMSNorm(hidden, eps)
        self.post_feedforward_layernorm: nn.Module = Gemma4RMSNorm(hidden, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self, state: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """state [N, hidden] -> [N, hidden]"""
        attention, mlp = self.self_attn, self.mlp
        query = attention["q_proj"](self.input_layernorm(state)).unflatten(-1, (-1, self.key_dim))
        query = apply_rotary_pos_emb(attention["q_norm"](query), *rotary, unsqueeze_dim=1)
        attended = attention["o_proj"](attend(query).flatten(1))
        state = state + self.post_attention_layernorm(attended)
        inputs = self.pre_feedforward_layernorm(state)
        inner = mlp["down_proj"](self.activation(mlp["gate_proj"](inputs)) * mlp["up_proj"](inputs))
        return (state + self.post_feedforward_layernorm(inner)) * self.layer_scalar  # type: ignore[no-any-return]


class CentroidLogits(nn.Module):
    """An output layer that scores only the tokens of the centroids that come nearest to a state."""

    token_ordering: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        text = config.text_config
        self.num_chosen: int = config.centroid_intermediate_top_k
        self.centroids = nn.Linear(text.hidden_size, config.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.zeros(text.vocab_size, dtype=torch.int64))
        """[vocab]: the tokens of the first centroid, then those of the second, and so on."""
        self.weight = nn.Parameter(torch.empty(text.vocab_size, text.hidden_size))

    def scores(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """state [N, hidden] -> the tokens that are scored and their logits, [N, scored] each."""
        chosen = self.centroids(state).topk(self.num_chosen, dim=-1).indices
        tokens = self.token_ordering.view(self.centroids.out_features, -1)[chosen].flatten(1)
        return tokens, (self.weight[tokens] @ state[..., None])[..., 0]


class AssistantHead(nn.Module):
    """An assistant without the target's embedding, and without its rotary embedding, which is not rounded."""

    def __init__(self, config: Any, shapes: Mapping[str, LayerShape]) -> None:
        """`config` is Transformers' configuration, `shapes` says by type what the target's layer keeps of a token."""
        super().__init__()
        text, wide = config.text_config, config.backbone_hidden_size
        self.kinds: list[str] = list(text.layer_types)
        self.pre_projection = nn.Linear(2 * wide, text.hidden_size, bias=False)
        self.layers = nn.ModuleList(AssistantLayer(text, shapes[kind]) for kind in self.kinds)
        self.norm: nn.Module = Gemma4RMSNorm(text.hidden_size, text.rms_norm_eps)
        self.post_projection = nn.Linear(text.hidden_size, wide, bias=False)
        self.ordered = CentroidLogits(config) if config.use_ordered_embeddings else None
        self.lm_head: nn.Module | None = None
        if self.ordered is None:
            self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.softcap: float | None = text.final_logit_softcapping
        self.vocab_size: int = text.vocab_size

    def forward(
        self, embeds: Tensor, states: Tensor, rotary: Rotary, attend: AttendTo
    ) -> tuple[Tensor, Tensor]:
        """embeds and states [N, target hidden] -> the next states [N, target hidden], and logits [N, vocab].

        A token that is not scored has the logit minus infinity.
        """
        inner = self.pre_projection(torch.cat([embeds, states], dim=-1))
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            inner = layer(inner, rotary[kind], lambda query, kind=kind: attend(kind, query))
        inner = self.norm(inner)
        return self.post_projection(inner), self._logits(inner)

    def _logits(self, state: Tensor) -> Tensor:
        if self.ordered is None:
            assert self.lm_head is not None
            return self._capped(self.lm_head(state))
        tokens, scores = self.ordered.scores(state)
        logits = scores.new_full((len(state), self.vocab_size), float("-inf"))
        return logits.scatter_(1, tokens, self._capped(scores))

    def _capped(self, logits: Tensor) -> Tensor:
        # Transformers leaves the cap out here and vLLM has it. Their most probable tokens are the same.
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def load_assistant(
    path: str, config: Any, shapes: Mapping[str, LayerShape], revision: str | None
) -> AssistantHead:
    """The assistant with its weights, in float32; raises `ModelError` for tensors that are missing, unknown or of
    another shape."""
    heads: int = config.text_config.num_attention_heads
    for kind, shape in shapes.items():
        if heads % shape.num_kv_heads:
            raise ModelError(
                f"{path!r} has {heads} heads, among which the {shape.num_kv_heads} key heads of the target's {kind} "
                "cannot be shared out; use an assistant that was made for this target"
            )
    head = AssistantHead(config, shapes)
    checkpoint = HeadCheckpoint(path, WEIGHT_FILES, revision)
    table = output_table(config)
    for unused in {"model.embed_tokens.weight", "lm_head.weight"} - {table}:
        checkpoint.tensors.pop(unused, None)
    names = {name: _name_in_file(name, table) for name in head.state_dict()}
    checkpoint.load_into(head, names)
    if head.ordered is not None:
        ordering = head.ordered.token_ordering
        if not torch.equal(ordering.sort().values, torch.arange(len(ordering))):
            checkpoint.refuse("has a masked_embedding.token_ordering that does not hold each token once")
    return head


def _name_in_file(name: str, table: str) -> str:
    """The name in a checkpoint of an entry of the module's state; `table` is that of the output layer's weight."""
    if name in ("lm_head.weight", "ordered.weight"):
        return table
    if name.startswith(("layers.", "norm.")):
        return f"model.{name}"
    return name.replace("ordered.", "masked_embedding.", 1)
