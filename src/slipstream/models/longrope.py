"""LongRoPE with one set of frequencies for all texts, so that no sequence changes another one's result."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.models.support import full_context_length, original_context_length, text_config, unsupported

log = logging.getLogger(__name__)

FIXED = "longrope for long texts"
"""A `rope_type` that Transformers does not know, so that it leaves the frequencies as they are."""


def resolve_frequencies(model: Any, context_length: int) -> None:
    """Fix the model's frequencies to those for texts of up to `context_length` tokens.

    Raises `UnsupportedModelError` for a model whose own code chooses frequencies in every pass.
    """
    original = original_context_length(model.config)
    if original is None:
        return
    if context_length <= original:
        log.warning(
            "%s: texts may have %s of the %s tokens of its context: beyond them its LongRoPE uses other frequencies. "
            "A larger max_model_len takes those, for short texts too, as vLLM does",
            model.config.model_type,
            f"{original:,}",
            f"{full_context_length(model.config):,}",
        )
        return
    rotaries = [part for part in model.modules() if getattr(part, "rope_type", None) == "longrope"]
    if not rotaries:
        raise unsupported(
            model.config, f"its LongRoPE is code of its own; set max_model_len to at most {original}"
        )
    for rotary in rotaries:
        rotary.inv_freq = fixed_frequencies(model.config, rotary.inv_freq.device)
        rotary.rope_type = FIXED
        _check(model, rotary, original)


def fixed_frequencies(config: Any, device: torch.device) -> torch.Tensor:
    """[rotary dim / 2]: those for texts longer than the original context."""
    original = original_context_length(config)
    assert original is not None
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](text_config(config), device, seq_len=original + 1)
    return frequencies.to(device)


def _check(model: Any, rotary: Any, original: int) -> None:
    """Raise `UnsupportedModelError` where a longer text in the same pass changes how a position is rotated."""
    rows = torch.zeros(1, 2, 1, dtype=model.dtype, device=rotary.inv_freq.device)
    alone, behind = (torch.tensor([[1, other]], device=rows.device) for other in (2, original + 1))
    with torch.inference_mode():
        pairs = zip(rotary(rows, alone), rotary(rows, behind), strict=True)
        if all(torch.equal(a[:, 0], b[:, 0]) for a, b in pairs):
            return
    raise unsupported(
        model.config,
        f"its rotary embedding depends on the longest text of a pass; set max_model_len to at most {original}",
    )
