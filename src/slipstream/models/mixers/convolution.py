"""Short causal convolutions, each channel by itself: all of LFM2's layers, and the first step of most others."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.activations import ACT2FN

from slipstream.kv.state import StateShape
from slipstream.models.mixers.base import CellPass, Recurrence
from slipstream.models.mixers.elementwise import silu


class Convolution(Recurrence):
    """Its state is the window of the last inputs."""

    def shape(self, hidden_states: Tensor, weight: Tensor, *_: Any, **__: Any) -> StateShape:
        """hidden_states [1, channels, N], weight [channels, taps]"""
        channels, taps = weight.shape
        return StateShape(((taps - 1, channels),), channels)

    def compute(
        self,
        cell: CellPass,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """-> [1, channels, N]"""
        inputs = cell.inputs(hidden_states[0].T)
        (window,) = cell.states()
        output = cell.rows(cell.convolve(window, inputs, weight, bias))
        if activation is not None:
            output = silu(output) if activation in ("silu", "swish") else ACT2FN[activation](output)
        return output.T[None].to(hidden_states.dtype)
