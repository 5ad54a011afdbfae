"""RG-LRU, a gated linear recurrent unit: RecurrentGemma (De et al., arXiv:2402.19427)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kv.state import StateShape
from slipstream.models.mixers.base import CellPass, Recurrence
from slipstream.models.mixers.convolution import Convolution
from slipstream.models.mixers.outer_products import OuterProducts


class GatedUnit(Recurrence):
    """Its state is one number a channel, of which each has a decay of its own: a matrix of one row."""

    def shape(self, module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> StateShape:
        """hidden_states [1, N, width]"""
        width = hidden_states.shape[-1]
        return StateShape(((1, 1, width),), 2 * width)

    def compute(
        self,
        cell: CellPass,
        module: Any,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[Tensor, None]:
        """`recurrent_gate` is the decay, and `reset` [1, N, 1] says where a text begins -> [1, N, width]"""
        rows = torch.cat([recurrent_gate[0] * ~reset[0], hidden_states[0]], dim=1)
        decays, values = cell.inputs(rows).chunk(2, dim=1)
        ones = values.new_ones(len(values), 1, 1)
        products = OuterProducts(query=ones, key=ones, value=values[:, None], decay=decays[:, None, None])
        (state,) = cell.states()
        output = cell.rows(cell.outer_products(products, state))
        return output.transpose(0, 1).to(hidden_states.dtype), None


class GatedUnitConvolution(Recurrence):
    """The convolution before it, a module whose padding the layer cuts off."""

    def shape(self, module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> StateShape:
        return Convolution().shape(hidden_states, module.weight[:, 0])

    def compute(self, cell: CellPass, module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return Convolution().compute(cell, hidden_states, module.weight[:, 0], module.bias)
