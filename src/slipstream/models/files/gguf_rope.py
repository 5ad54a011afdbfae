"""How positions are rotated in a GGUF file's model, in Transformers' terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.gguf import Gguf

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every Llama 3 that scales its frequencies; a file holds only what they come to."""


def rope_parameters(file: Gguf, head_dim: int) -> dict[str, Any]:
    """Transformers' `rope_parameters`; raises `ModelError` for a kind that a file does not tell whole."""

    def key(name: str, default: Any = None) -> Any:
        return file.fields.get(f"{file.architecture}.rope.{name}", default)

    theta = float(key("freq_base", 10000.0))
    kind, factor = key("scaling.type", "none"), key("scaling.factor")
    original = key("scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "long_factor": _factors(file, "rope_factors_long"),
            "short_factor": _factors(file, "rope_factors_short"),
            "original_max_position_embeddings": original,
            **(
                {} if key("scaling.attn_factor") is None else {"attention_factor": key("scaling.attn_factor")}
            ),
        }
    if "rope_freqs.weight" in file.tensors:
        return {"rope_theta": theta, **_llama3(file, theta, head_dim)}
    if kind == "linear" and factor:
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(factor)}
    if kind == "yarn" and factor and original:
        betas = {
            name: float(key(f"scaling.yarn_{name}"))
            for name in ("beta_fast", "beta_slow")
            if key(f"scaling.yarn_{name}")
        }
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": float(factor),
            "original_max_position_embeddings": int(original),
            **betas,
        }
    if kind != "none":
        raise ModelError(
            f"{file.path!r} has rotary positions of kind {kind!r}, which the file does not tell in Transformers' terms"
        )
    return {"rope_type": "default", "rope_theta": theta}


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: by how much each frequency of Llama 3.1's rotary positions is divided."""
    inverse = 1.0 / float(rope.get("rope_theta", 10000.0)) ** (
        torch.arange(0, head_dim, 2).double() / head_dim
    )
    wavelengths = 2 * math.pi / inverse
    original = float(rope["original_max_position_embeddings"])
    low, high, factor = (float(rope[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 / ((1 - smooth) / factor + smooth)).float()


def _llama3(file: Gguf, theta: float, head_dim: int) -> dict[str, Any]:
    """The settings that come to a file's factors."""
    factors = torch.tensor(_factors(file, "rope_freqs"))
    rope = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    expected = llama3_factors({**rope, "rope_theta": theta}, head_dim)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-4):
        if factors.numel() == head_dim // 2 and bool((factors == 1).all()):
            return {"rope_type": "default"}
        raise ModelError(
            f"{file.path!r} has factors of its rotary positions (rope_freqs) that are not those of a Llama 3"
        )
    return rope


def _factors(file: Gguf, name: str) -> list[float]:
    tensor = file.tensors.get(f"{name}.weight")
    if tensor is None or tensor.format.dtype != torch.float32 or len(tensor.shape) != 1:
        raise ModelError(f"{file.path!r} lacks {name}.weight, or it is no list of float32")
    return [float(f"{number:.7g}") for number in tensor.numbers().tolist()]
