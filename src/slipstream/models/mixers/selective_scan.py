"""Mamba's selective scan: Mamba, Falcon Mamba, Jamba, Zamba (Gu and Dao, arXiv:2312.00752)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kv.state import StateShape
from slipstream.models.mixers.base import CellPass, Recurrence
from slipstream.models.mixers.elementwise import silu, softplus
from slipstream.models.mixers.outer_products import OuterProducts


class SelectiveScan(Recurrence):
    """Its state is [state_size, channels], of which each number has a decay of its own."""

    def shape(self, hidden_states: Tensor, dt: Tensor, A: Tensor, *_: Any, **__: Any) -> StateShape:
        """hidden_states and dt [1, channels, N], A [channels, state_size], B and C [1, state_size, N]"""
        channels, size = A.shape
        return StateShape(((1, size, channels),), 2 * channels + size)

    def compute(
        self,
        cell: CellPass,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        *_: Any,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **__: Any,
    ) -> Tensor:
        """-> [1, channels, N]"""
        own, step_sizes = hidden_states[0].T, dt[0].T  # [N, channels]
        step_sizes = step_sizes if delta_bias is None else step_sizes + delta_bias.to(dt.dtype)
        step_sizes = softplus(step_sizes) if delta_softplus else step_sizes
        channels, size = A.shape
        rows = (step_sizes, step_sizes.float() * own.float(), B[0].T)
        steps = cell.inputs(torch.cat([each.float() for each in rows], dim=1))
        sizes, values, keys = torch.split(steps, [channels, channels, size], dim=1)
        products = OuterProducts(
            query=cell.steps(C[0].T.float())[:, None],
            key=keys[:, None],
            value=values[:, None],
            decay=sizes[:, None, None],
            rates=A.T.float()[None],
        )
        (state,) = cell.states()
        output = cell.rows(cell.outer_products(products, state))[:, 0].to(hidden_states.dtype)
        if D is not None:
            output = output + own * D
        if z is not None:
            output = output * silu(z[0].T)
        return output.T[None]
