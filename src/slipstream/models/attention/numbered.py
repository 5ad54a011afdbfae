"""Attention layers that do not say which layer of a model they are in: they get the number that their name has.

Zamba's blocks of attention share their weights, and get the number of their layer with every call.
"""

from __future__ import annotations

from typing import Any

from slipstream.models.support import is_encoder_decoder


def number_layers(model: Any) -> None:
    """Number the modules of a decoder that have a place for a number, `layer_idx`, and none in it."""
    if is_encoder_decoder(model.config):
        return  # layers of the encoder have names of the same numbers
    for name, module in model.named_modules():
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        if numbers and getattr(module, "layer_idx", 0) in (None, -1):
            module.layer_idx = numbers[0]
