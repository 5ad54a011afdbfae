"""Mamba 2's state spaces: Bamba, Nemotron-H, Granite 4, Falcon-H1, Zamba 2 (Dao and Gu, arXiv:2405.21060)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slipstream.kv.state import StateShape
from slipstream.models.mixers.base import CellPass, Recurrence
from slipstream.models.mixers.elementwise import softplus
from slipstream.models.mixers.outer_products import OuterProducts


class StateSpace(Recurrence):
    """Its state is a matrix for each head, [state_size, head_dim], which B writes to and C reads."""

    def shape(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: Any, **__: Any
    ) -> StateShape:
        """hidden_states [1, N, heads, head_dim], dt [1, N, heads], A [heads], B and C [1, N, groups, state_size]"""
        heads, head_dim = hidden_states.shape[-2:]
        return StateShape(((heads, B.shape[-1], head_dim),), heads * head_dim + heads + B[0, 0].numel())

    def compute(
        self,
        cell: CellPass,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *_: Any,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False,
        **__: Any,
    ) -> Tensor:
        """-> float32 [1, N, heads, head_dim]"""
        num_rows, heads, head_dim = hidden_states.shape[1:]
        own = hidden_states[0].float()
        step_sizes = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
        step_sizes = softplus(step_sizes) if dt_softplus else step_sizes
        step_sizes = step_sizes.clamp(*dt_limit).float()  # [N, heads]
        rows = (
            (own * step_sizes[..., None]).reshape(num_rows, -1),
            (A.float() * step_sizes).exp(),
            B[0].flatten(1),
        )
        steps = cell.inputs(torch.cat([each.float() for each in rows], dim=1))
        values, decays, keys = torch.split(steps, [each.shape[1] for each in rows], dim=1)
        products = OuterProducts(
            query=cell.steps(C[0].float()),
            key=keys.reshape(-1, *B.shape[2:]),
            value=values.reshape(-1, heads, head_dim),
            decay=decays[..., None, None],
        )
        (state,) = cell.states()
        output = cell.rows(cell.outer_products(products, state))
        if D is not None:
            output = output + D.float()[:, None] * own
        return output[None]
