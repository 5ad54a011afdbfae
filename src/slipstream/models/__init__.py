"""Hugging Face models behind one adapter: load, attend over our cache, tap hidden states.

`load_model` loads any Transformers language model whose attention goes through Transformers' attention interface, or
is led there; no model code is copied. The adapter, `CausalLM`, runs it on one packed row of tokens, and each attention
layer calls back with its queries, keys and values (`attention`). What cannot work is refused when it is loaded, with
the reason: recurrences that are not known (`mixers`), for one. What the configuration cannot tell is tried out
(`canary`).

Attention over latents, which the cache holds in the place of every head, is in `mixers.latent`.

A weight is held once. Layers are packed one after the other, and each one's unpacked weights are given back before the
next. Matrices of a 16-bit checkpoint stay in their type (`matrices`), except experts of families that the kernels do
not know, matrices of several types, and matrices that get an adapter, which are widened as they are read. An embedding
that is tied to the output layer is read out of the packed one, so drafters that need either call `CausalLM.embed` and
`CausalLM.project`.
"""

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
