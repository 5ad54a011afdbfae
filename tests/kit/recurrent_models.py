"""Small models of kinds of their own, and drafts that are nearly the same model."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.kit.folders import kept_folder
from tests.kit.tokenizer_families import byte_level
from tests.parity.tiny_models import RECURRENT, SPARSE, randomise

WHOLE_VECTORS = {
    "qwen3.5": {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "head_dim": 64,
        "intermediate_size": 64,
    },
    "falcon-h1": {"intermediate_size": 64},
}
"""Sizes of families whose usual ones are too narrow: PyTorch computes sigmoids and gates of a tensor's last numbers,
those that fill no pair of vectors (32 numbers with AVX-512), in another way, and which these are depends on the number
of rows."""


@cache
def recurrent_model(family: str, noise: float = 0.0) -> str:
    """The folder of one of `RECURRENT` or `SPARSE` that speaks a tokenizer; `noise` is how far its weights are off."""
    tokenizer = byte_level(320)
    config: Any = (RECURRENT | SPARSE)[family]()
    config.vocab_size = len(tokenizer)
    for name, size in WHOLE_VECTORS.get(family, {}).items():
        setattr(config, name, size)
    model = AutoModelForCausalLM.from_config(config)
    randomise(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter += noise * spread * torch.randn(parameter.shape, generator=generator)
    folder = kept_folder()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
