"""The sizes of a Llama-like model as GGUF keys, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.models.files.gguf_rope import llama3_factors
from slipstream.tools.export.checkpoints.gguf_tensors import gguf_package
from slipstream.tools.export.refusals import ExportError

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""GGUF's key after the architecture's name to Transformers' key."""


def add_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    """Write a Transformers configuration's sizes; `writer` is a `gguf.GGUFWriter` of the architecture."""
    for key, name in SIZES.items():
        value = config[name]
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{writer.arch}.{key}", value)
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])


def read_sizes(fields: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Transformers' keys of a file's sizes; its float32 numbers as they are usually written."""
    found = {name: fields[f"{arch}.{key}"] for key, name in SIZES.items() if f"{arch}.{key}" in fields}
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()
    }


def add_rope(writer: Any, rope: Mapping[str, Any], head_dim: int, name: str) -> Tensor | None:
    """Write the rotary settings; returns the factors that a Llama 3 file holds as the tensor `rope_freqs.weight`.

    Raises `ExportError` for a kind that is not written.
    """
    kind = rope.get("rope_type", "default")
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if kind == "default":
        return None
    if kind == "linear":
        writer.add_rope_scaling_type(gguf_package().RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        return None
    if kind == "llama3":
        return llama3_factors(rope, head_dim)
    raise ExportError(
        f"{name!r} has rotary positions of kind {kind!r}; only default, linear and llama3 are written: use "
        "llama.cpp's own convert_hf_to_gguf.py for this model"
    )
