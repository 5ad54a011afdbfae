"""The gated delta rule: Qwen3-Next, Qwen 3.5, OLMo hybrid (Yang et al., arXiv:2412.06464)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kv.state import StateShape
from slipstream.models.mixers.base import CellPass, Recurrence
from slipstream.models.mixers.outer_products import OuterProducts


class GatedDelta(Recurrence):
    """Its state is a matrix for each value head; the decay is one number a head."""

    def shape(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, *_: Any, **__: Any) -> StateShape:
        """query/key [1, N, key_heads, key_dim], value [1, N, heads, value_dim], g [1, N, heads] or [.., key_dim]"""
        heads, value_dim = value.shape[-2:]
        state = (heads, key.shape[-1], value_dim)
        return StateShape((state,), key[0, 0].numel() + value[0, 0].numel() + g[0, 0].numel() + heads)

    def compute(
        self,
        cell: CellPass,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *_: Any,
        use_qk_l2norm_in_kernel: bool = False,
        **__: Any,
    ) -> tuple[Tensor, None]:
        """`g` is the logarithm of the decay -> [1, N, heads, value_dim]"""
        num_rows, key_heads, key_dim = key.shape[1:]
        heads, value_dim = value.shape[-2:]
        rows = (key, value, g, beta)
        steps = cell.inputs(torch.cat([each[0].reshape(num_rows, -1).float() for each in rows], dim=1))
        keys, values, decays, betas = torch.split(steps, [each[0, 0].numel() for each in rows], dim=1)
        queries, keys = cell.steps(query[0].float()), keys.reshape(-1, key_heads, key_dim)
        if use_qk_l2norm_in_kernel:
            queries, keys = _normed(queries), _normed(keys)
        products = OuterProducts(
            query=queries * key_dim**-0.5,
            key=keys,
            value=values.reshape(-1, heads, value_dim),
            decay=decays.exp().reshape(len(decays), heads, -1, 1),
            beta=betas,
        )
        (state,) = cell.states()
        output = cell.rows(cell.outer_products(products, state))
        return output[None].to(query.dtype), None


def _normed(vectors: Tensor) -> Tensor:
    """[..., dim], each of length 1."""
    return vectors * torch.rsqrt((vectors * vectors).sum(dim=-1, keepdim=True) + 1e-6)
