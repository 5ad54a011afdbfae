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


def llama(**options: Any) -> CausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        attn_implementation=ATTENTION_NAME,
    )
    return adapt(LlamaForCausalLM(config).eval(), **options)


def logits(lm: CausalLM, layers: Sequence[int] | None = None, token_ids: Sequence[int] = TEXT) -> Tensor:
    """[tokens, vocab]: one pass over the text, by all layers or some."""
    pool, slots = lm.trial_cache(len(token_ids))
    return lm.forward([RowGroup(slots, 0, token_ids, range(len(token_ids)))], pool, layers=layers).logits
