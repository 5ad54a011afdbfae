"""Attention of an encoder-decoder besides that over its decoder's own tokens.

An encoder sees all of its input at once. Its output is read by the decoder's layers across, through keys and values
that depend on nothing else, so that they are computed once a sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor


class WholePass(ABC):
    """Takes the place of an `AttentionPass` in passes over one input without a cache."""

    sees_all: ClassVar[bool] = False
    """Whether every layer sees all of it."""

    @abstractmethod
    def attend(
        self,
        layer: int | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        bias: Tensor | None,
    ) -> Tensor:
        """query [1, heads, N, dim], key/value [1, heads, S, dim], bias [1, heads, N, S] -> [1, N, heads, dim]."""


class EncoderPass(WholePass):
    """Every token of an encoder's input sees all of it."""

    sees_all = True

    def attend(
        self,
        layer: int | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        bias: Tensor | None,
    ) -> Tensor:
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
        return attended.transpose(1, 2).contiguous()


class AcrossPass(WholePass):
    """Collects the keys and values that a decoder's layers make of an encoder's output, in a pass over one token.

    A layer attends to its own tokens first and across afterwards.
    """

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}
        """Layer to keys and values, [heads, positions, dim] each."""

    def attend(
        self,
        layer: int | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        bias: Tensor | None,
    ) -> Tensor:
        if layer is None or layer in self.entries:
            raise ValueError("its decoder's layers do not attend once to their own tokens and once across")
        if layer in self._begun:
            self.entries[layer] = (key[0], value[0])
        self._begun.add(layer)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
