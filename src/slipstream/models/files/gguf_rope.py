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
"""Settings of every Llama 3 that scales its frequencies; a file holds only what they come to."""
_LLAMA4 = {**_LLAMA3, "high_freq_factor": 1.0}
"""Llama 4 divides long waves and no others: none in part."""


_MAX_FACTORS = 4096
"""Half the width of a head that is wider than any."""


def rope_parameters(file: Gguf, head_dim: int) -> dict[str, Any]:
    """Transformers' `rope_parameters`; raises `ModelError` for a kind that a file does not tell whole.

    As in llama.cpp, a factor without a kind is linear, also under the key of the first files, no factor is a factor of
    1, and the kind `none` does not scale.
    """
    theta = _number(file, "freq_base") or 10000.0
    kind = file.fields.get(f"{file.architecture}.rope.scaling.type", "linear")
    factor = _number(file, "scaling.factor") or _number(file, "scale_linear") or 1.0
    of_tensors = _of_tensors(file, theta, head_dim)
    if of_tensors is not None:
        is_longrope = kind == "longrope" and of_tensors["rope_type"] == "longrope"
        if factor != 1 and kind != "none" and not is_longrope:
            raise ModelError(
                f"{file.path!r} has factors of its rotary positions and a scaling of them of kind {kind!r:.40} as "
                "well, which Transformers does not have together"
            )
        return of_tensors
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{file.path!r} has rotary positions of kind {kind!r:.40}, which the file does not tell in Transformers' "
            "terms"
        )
    times = _number(file, "scaling.attn_factor") or 1.0
    if times != 1 and kind != "yarn":
        raise ModelError(
            f"{file.path!r} multiplies attention by {times:g} (rope.scaling.attn_factor), which Transformers does with "
            f"positions of the kind 'yarn' alone, and these are of kind {kind!r}"
        )
    if kind == "none" or factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    original = _original(file) or file.fields.get(f"{file.architecture}.context_length")
    betas = {name: _number(file, f"scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    if times != 1:
        betas["attention_factor"] = times * (1 + 0.1 * math.log(factor))
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        **{name: beta for name, beta in betas.items() if beta},
    }


def _of_tensors(file: Gguf, theta: float, head_dim: int) -> dict[str, Any] | None:
    """What tensors of the file say of its positions; None where it has none that do."""
    if "rope_factors_long.weight" in file.tensors:
        factor = _number(file, "scaling.attn_factor")
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "long_factor": _factors(file, "rope_factors_long"),
            "short_factor": _factors(file, "rope_factors_short"),
            "original_max_position_embeddings": _original(file),
            **({} if factor is None else {"attention_factor": factor}),
        }
    if "rope_freqs.weight" in file.tensors:
        return {"rope_theta": theta, **_llama3(file, theta, head_dim)}
    return None


def _number(file: Gguf, name: str) -> float | None:
    """The value of a key of the rotary positions; None where the file has none. Raises `ModelError` for no number."""
    value = file.fields.get(f"{file.architecture}.rope.{name}")
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ModelError(
            f"{file.path!r}: {file.architecture}.rope.{name} is {value!r:.40}; it must be a number from 0 on"
        )
    return float(f"{value:.7g}")  # a float32 as it is usually written


def _original(file: Gguf) -> int | None:
    """The length of the texts that the model was first trained on; None where the file does not say it."""
    length = _number(file, "scaling.original_context_length")
    return None if length is None else int(length)


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: by how much each frequency of Llama 3.1's rotary positions is divided."""
    inverse = 1.0 / float(rope.get("rope_theta", 10000.0)) ** (
        torch.arange(0, head_dim, 2).double() / head_dim
    )
    wavelengths = 2 * math.pi / inverse
    original = float(rope["original_max_position_embeddings"])
    low, high, factor = (float(rope[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    waves = original / wavelengths
    smooth = ((waves - low) / (high - low)).clamp(0.0, 1.0) if high > low else (waves > low).double()
    return (1.0 / ((1 - smooth) / factor + smooth)).float()


def _llama3(file: Gguf, theta: float, head_dim: int) -> dict[str, Any]:
    """The settings that come to a file's factors."""
    factors = torch.tensor(_factors(file, "rope_freqs"))
    for settings in (_LLAMA3, _LLAMA4):
        rope = {"rope_type": "llama3", "factor": float(factors.max()), **settings}
        expected = llama3_factors({**rope, "rope_theta": theta}, head_dim)
        if factors.shape == expected.shape and torch.allclose(factors, expected, rtol=1e-4):
            return rope
    if factors.numel() == head_dim // 2 and bool((factors == 1).all()):
        return {"rope_type": "default"}
    raise ModelError(
        f"{file.path!r} has factors of its rotary positions (rope_freqs) that are not those of a Llama 3 or 4"
    )


def _factors(file: Gguf, name: str) -> list[float]:
    tensor = file.tensors.get(f"{name}.weight")
    is_list = tensor is not None and tensor.format.dtype == torch.float32 and len(tensor.shape) == 1
    if tensor is None or not is_list or tensor.shape[0] > _MAX_FACTORS:
        raise ModelError(f"{file.path!r} lacks {name}.weight, or it is no list of float32")
    return [float(f"{number:.7g}") for number in tensor.numbers().tolist()]
