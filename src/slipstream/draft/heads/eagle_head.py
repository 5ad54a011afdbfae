"""EAGLE's draft head: one layer that predicts the target's next features, and from them its next tokens.

A row combines the feature of a token with the embedding of the token after it. EAGLE-1 and EAGLE-2 (Li et al., ICML
2024 and EMNLP 2024; they differ in their trees only) read the target's last hidden state and use its output layer.
EAGLE-3 (Li et al., NeurIPS 2025) fuses a low, a middle and a high hidden state, feeds its own output back, and has an
output layer of its own, optionally over a pruned vocabulary. P-EAGLE (Hui et al., 2026) is an EAGLE-3 head, mostly of
several layers, that reads a mask token and a learned feature in place of a token and a feature that are not there yet.

The module serves both drafting, over cached entries, and training, over whole texts; only `attend` differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from slipstream.draft.heads.head_config import Attend, HeadConfig


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """Sizes and options of a head. A head of version 1 drafts all tokens; of version 3, layers after the first are
    ordinary ones, which read the state alone."""

    version: int
    """1 or 3."""
    mask_token_id: int | None = None
    """The token that stands for one that is not there yet, of a P-EAGLE head; None of any other."""
    norm_queries: bool = False
    """Whether queries and keys are normed, as in Qwen3's layers."""
    norm_before_residual: bool = False
    """Whether the residual starts after the norm of the fused features (speculators) or before it (EAGLE's own)."""
    fc_bias: bool = False


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high hidden state: EAGLE-3's own choice where the target is deep enough for it."""
    if num_layers >= 10:
        return (2, num_layers // 2, num_layers - 3)
    return (1, num_layers // 2, num_layers - 1)


class EagleAttention(nn.Module):
    """Grouped-query attention with rotary positions over inputs of any width."""

    def __init__(self, config: EagleConfig, width: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.norm_queries:
            self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        inputs: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """inputs [B, N, width] -> [B, N, hidden]"""
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        return self.o_proj(attend(query, key, value).flatten(2))  # type: ignore[no-any-return]


class EagleLayer(nn.Module):
    """A Llama layer. The attention of EAGLE-3's first one reads the normed embedding beside the normed state.

    EAGLE-1's only layer reads a state that the embedding is part of already, without a norm.
    """

    def __init__(self, config: EagleConfig, is_first: bool = True) -> None:
        super().__init__()
        self.fuses = is_first and config.version == 3
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = EagleAttention(config, config.hidden_size * (2 if self.fuses else 1))
        self.mlp: nn.Module = LlamaMLP(config.llama())  # type: ignore[no-untyped-call]
        self.post_attention_layernorm: nn.Module = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm: nn.Module | None = None
        self.input_layernorm: nn.Module | None = None
        if self.fuses:
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.version == 3:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        embeds: Tensor,
        state: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """embeds and state [B, N, hidden] -> [B, N, hidden]; a layer that does not fuse them reads the state alone."""
        inputs = residual = state
        if self.hidden_norm is not None and self.input_layernorm is not None:
            normed = self.hidden_norm(state)
            residual = normed if self.norm_before_residual else state
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        elif self.input_layernorm is not None:
            inputs = self.input_layernorm(state)
        state = residual + self.self_attn(inputs, rotary, attend)
        return state + self.mlp(self.post_attention_layernorm(state))  # type: ignore[no-any-return]


class EagleHead(nn.Module):
    """An EAGLE draft head without the target's embedding and output layer."""

    draft_token_ids: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        width = len(config.feature_layers) * config.target_hidden_size
        if config.version == 1:
            width = config.target_hidden_size + config.hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=config.fc_bias)
        self.layer = EagleLayer(config)
        self.upper = nn.ModuleList(EagleLayer(config, is_first=False) for _ in range(1, config.num_layers))
        """The layers after the first."""
        self.mask_hidden: nn.Parameter | None = None
        """[1, 1, feature layers * target hidden]: what a mask reads in place of the target's features."""
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, width))
        self.rotary = LlamaRotaryEmbedding(config.llama())
        if config.version == 3:
            self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        """[draft vocab]: the target's id of each draft token."""
        self.embedding: Tensor | None = None
        """[vocab, hidden]: a table of its own; None reads the target's."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def encode(self, features: Tensor) -> Tensor:
        """The input state for true features: [..., feature layers * target hidden] -> [..., hidden]."""
        return self.fc(features) if self.config.version == 3 else features

    def forward(self, embeds: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One step: embeds and state [B, N, hidden], positions [B, N] -> the next state [B, N, hidden]."""
        if self.config.version == 1:
            state = self.fc(torch.cat([embeds, state], dim=-1))
        rotary = self.rotary(state, positions)
        for index, layer in enumerate((self.layer, *self.upper)):
            state = layer(embeds, state, rotary, partial(attend, index))
        return state

    def logits(self, state: Tensor) -> Tensor:
        """EAGLE-3 only: [..., hidden] -> [..., draft vocab]. EAGLE-1 uses the target's output layer."""
        return self.lm_head(self.norm(state))  # type: ignore[no-any-return]

    def num_parameters(self) -> int:
        """Number of the head's own weights."""
        return sum(parameter.numel() for parameter in self.parameters())
