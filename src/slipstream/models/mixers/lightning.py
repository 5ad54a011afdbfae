"""Lightning attention: MiniMax (Qin et al., arXiv:2401.04658)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kv.state import StateShape
from slipstream.models.mixers.base import CellPass, Recurrence
from slipstream.models.mixers.outer_products import OuterProducts


class Lightning(Recurrence):
    """Its state is a matrix for each head; the decay is one number a head, the same for all tokens.

    The layer goes block by block between its projections, so its whole forward is replaced.
    """

    def shape(self, module: Any, *_: Any, **__: Any) -> StateShape:
        heads, dim = module.num_attention_heads, module.head_dim
        return StateShape(((heads, dim, dim),), 2 * heads * dim)

    def compute(
        self, cell: CellPass, module: Any, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, N, hidden] -> [1, N, hidden]"""
        heads, dim = module.num_attention_heads, module.head_dim
        projected = module.act_fn(module.qkv_proj(hidden_states))[0].view(-1, heads, 3 * dim)
        queries, keys_and_values = torch.split(projected.float(), [dim, 2 * dim], dim=-1)
        steps = cell.inputs(keys_and_values.flatten(1)).view(-1, heads, 2 * dim)
        products = OuterProducts(
            query=cell.steps(queries),
            key=steps[..., :dim],
            value=steps[..., dim:],
            decay=torch.exp(-module.slope_rate.float()).expand(len(steps), -1, -1, -1),
        )
        (state,) = cell.states()
        attended = cell.rows(cell.outer_products(products, state)).flatten(1)[None]
        normed = module.norm(attended.to(hidden_states.dtype))
        output: Tensor = module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * normed)
        return output, None
