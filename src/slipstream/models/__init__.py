"""Hugging Face models behind one adapter: load, attend over our cache, tap hidden states."""

import slipstream.models.huggingface  # noqa: F401  (before any other module of Transformers)
from slipstream.models.causal_lm import CausalLM, ForwardOutput
from slipstream.models.configuration import load_config
from slipstream.models.loading import adapt, load_model, load_plain
from slipstream.models.rows import RowGroup
from slipstream.models.tokenizer import load_draft_tokenizer, load_tokenizer

__all__ = [
    "CausalLM",
    "ForwardOutput",
    "RowGroup",
    "adapt",
    "load_config",
    "load_draft_tokenizer",
    "load_model",
    "load_plain",
    "load_tokenizer",
]
