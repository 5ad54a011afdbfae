"""LongRoPE with one set of frequencies for good, so that no text changes another's."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.models.support import full_context_length, original_context_length, text_config, unsupported

log = logging.getLogger(__name__)

FIXED = "longrope for long texts"
"""A `rope_type` for which Transformers computes no frequencies anew."""


def settle_frequencies(model: Any, context_length: int) -> None:
    """Take the frequencies for texts of up to `context_length` tokens.

    Raises `UnsupportedModelError` where a model's own code decides that anew in every pass.
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
    config = text_config(model.config)
    rotaries = [part for part in model.modules() if getattr(part, "rope_type", None) == "longrope"]
    if not rotaries:
        raise unsupported(
            model.config, f"its LongRoPE is code of its own; set max_model_len to at most {original}"
        )
    for rotary in rotaries:
        device = rotary.inv_freq.device
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=original + 1)
        rotary.inv_freq = frequencies.to(device)
        rotary.rope_type = FIXED
        _check(model, rotary, original)


def _check(model: Any, rotary: Any, original: int) -> None:
    """A position must be rotated alike in a pass of short texts and beside a long one."""
    rows = torch.zeros(1, 2, 1, dtype=model.dtype, device=rotary.inv_freq.device)
    alone, beside = (torch.tensor([[1, other]], device=rows.device) for other in (2, original + 1))
    with torch.inference_mode():
        pairs = zip(rotary(rows, alone), rotary(rows, beside), strict=True)
        if all(torch.equal(a[:, 0], b[:, 0]) for a, b in pairs):
            return
    raise unsupported(
        model.config,
        f"its rotary embedding depends on the longest text of a pass; set max_model_len to at most {original}",
    )
