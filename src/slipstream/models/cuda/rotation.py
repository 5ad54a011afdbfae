"""Rotary embeddings of queries and keys as one operator, with the norms of heads before them.

`slipstream::rotate` runs in Triton on a CUDA device; on a CPU in PyTorch, or in Triton's interpreter where
TRITON_INTERPRET is 1: for tests. Sines and cosines are made once a pass, as Transformers makes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.cuda.triton_use import runs_triton


class Turns:
    """How rows are rotated: cosines and sines, float32 [rows, half of what is rotated of a head]."""

    def __init__(self, cosines: Tensor, sines: Tensor) -> None:
        self.cosines, self.sines = cosines, sines

    @classmethod
    def of(cls, positions: Tensor, inverse_frequencies: Tensor, scale: float) -> Turns:
        """At positions [rows], by frequencies float32 [half]."""
        angles = positions.float()[:, None] * inverse_frequencies
        turns = angles.cos(), angles.sin()
        return cls(*(turns if scale == 1.0 else (turn * scale for turn in turns)))


@torch.library.custom_op("slipstream::rotate", mutates_args=())
def rotate(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor,
    query_weight: Tensor | None, key_weight: Tensor | None, epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """query [rows, heads, dim] and key [rows, kv_heads, dim], dense in their last dimension -> the same, rotated.

    The first numbers of a head are rotated, twice as many as there are cosines; there may be none. With weights,
    float32 [dim], each head goes through a root mean square norm first.
    """
    if not runs_triton(query):
        return (
            _in_pytorch(query, cosines, sines, query_weight, epsilon),
            _in_pytorch(key, cosines, sines, key_weight, epsilon),
        )
    from triton import next_power_of_2

    from slipstream.models.cuda.layer_kernels import rotate_heads

    num_rows, num_heads, dim = query.shape
    rotated = query.new_empty(query.shape), key.new_empty(key.shape)
    rotate_heads[(num_rows, num_heads + key.shape[1])](
        query, key, cosines, sines, query_weight, key_weight, *rotated,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), num_heads, key.shape[1], epsilon,
        dim, next_power_of_2(dim), cosines.shape[1], query_weight is not None, key_weight is not None,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return rotated


@rotate.register_fake
def _(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor,
    query_weight: Tensor | None, key_weight: Tensor | None, epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _in_pytorch(
    heads: Tensor, cosines: Tensor, sines: Tensor, weight: Tensor | None, epsilon: float
) -> Tensor:
    numbers = heads.float()
    if weight is not None:
        numbers = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + epsilon) * weight
    half = cosines.shape[1]
    first, second, rest = numbers.tensor_split([half, 2 * half], dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return torch.cat([*turned, rest], dim=-1).to(heads.dtype)
