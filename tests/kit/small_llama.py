"""A Llama of three layers with random weights, and its logits over one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.models import CausalLM, RowGroup, adapt
from slipstream.models.attention.base import ATTENTION_NAME

VOCAB = 61
TEXT = [(7 * i + 3) % VOCAB for i in range(12)]


SHORT = {
    "inner": "intermediate_size", "vocab": "vocab_size", "context": "max_position_embeddings",
    "bos": "bos_token_id", "eos": "eos_token_id", "pad": "pad_token_id", "spread": "initializer_range",
    "tied": "tie_word_embeddings",
}  # fmt: skip
"""Transformers' names by those that `sizes` takes beside them."""


def sizes(
    hidden: int, layers: int, heads: int, key_heads: int | None = None, **others: Any
) -> dict[str, Any]:
    """Options of a small model's configuration. Without `key_heads`, its family's default."""
    keys = {} if key_heads is None else {"num_key_value_heads": key_heads}
    heads_and_layers = {"num_hidden_layers": layers, "num_attention_heads": heads, **keys}
    return {"hidden_size": hidden, **heads_and_layers, **{SHORT.get(k, k): v for k, v in others.items()}}


def llama(**options: Any) -> CausalLM:
    torch.manual_seed(0)
    shape = sizes(32, 3, 4, 2, inner=48, vocab=VOCAB, spread=0.3)
    config = LlamaConfig(**shape, attn_implementation=ATTENTION_NAME)
    return adapt(LlamaForCausalLM(config).eval(), **options)


def logits(lm: CausalLM, layers: Sequence[int] | None = None, token_ids: Sequence[int] = TEXT) -> Tensor:
    """[tokens, vocab]: one pass over the text, by all layers or some."""
    pool, slots = lm.trial_cache(len(token_ids))
    return lm.forward([RowGroup(slots, 0, token_ids, range(len(token_ids)))], pool, layers=layers).logits
