"""Activations of MLPs that the CPU kernels have, by Transformers' names, classes and functions."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.activations import ACT2CLS

ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), 0),
    **dict.fromkeys(("gelu", "gelu_python"), 1),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), 2),
    "relu2": 4,
}
"""Transformers' names to the kernels' `Activation`."""

CLAMPED_SILU = 3
"""The kernels' `Activation` that is of gate and up together."""

_CALLED: dict[Any, int] = {
    nn.SiLU: ACTIVATIONS["silu"],
    nn.functional.silu: ACTIVATIONS["silu"],
    nn.functional.gelu: ACTIVATIONS["gelu"],
    **{
        made[0] if isinstance(made, tuple) else made: ACTIVATIONS[name]
        for name, made in ACT2CLS.items()
        if name in ACTIVATIONS
    },
}
"""Modules' classes and functions to the same."""


def number_of(activation: Any) -> int | None:
    """The kernels' `Activation` of what a model calls, a module or a function; None where it is none of them."""
    if isinstance(activation, nn.GELU):
        return ACTIVATIONS["gelu_pytorch_tanh" if activation.approximate == "tanh" else "gelu"]
    return _CALLED.get(type(activation) if isinstance(activation, nn.Module) else activation)
