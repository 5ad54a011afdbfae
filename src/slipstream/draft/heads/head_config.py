"""What the configurations of all heads with layers of their own have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig

from slipstream.errors import ModelError

if TYPE_CHECKING:
    from slipstream.draft.heads.checkpoints import TargetSizes

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""layer, query [B, heads, N, dim], key and value of the same rows [B, kv_heads, N, dim] -> [B, N, heads, dim]"""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes of a head and of its target. Feature layer 0 is the embedding, i the output of layer i, and the target's
    number of layers the output of its final norm."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    """Tokens that the head can draft."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    feature_layers: tuple[int, ...]
    num_layers: int = 1
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    hidden_act: str = "silu"

    def llama(self) -> LlamaConfig:
        """The same for Transformers' Llama modules."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            num_hidden_layers=self.num_layers,
            vocab_size=self.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
            hidden_act=self.hidden_act,
            attention_bias=self.attention_bias,
        )

    def check_sizes(self, target: TargetSizes, path: str) -> None:
        """Raise `ModelError` where the head in `path` was trained for a target of other sizes."""
        for what, mine, its in (
            ("hidden size", target.hidden_size, self.target_hidden_size),
            ("vocabulary", target.vocab_size, self.vocab_size),
        ):
            if mine != its:
                raise ModelError(
                    f"{path!r} is for a target with a {what} of {its}, this target has {mine}; use a head trained for "
                    "it"
                )
