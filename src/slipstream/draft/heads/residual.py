"""The residual block and the projections of Medusa and Hydra heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Projection = Callable[[Tensor], Tensor]
"""[..., hidden] -> [..., vocab]"""


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """The shape of a set of heads."""

    hidden_size: int
    """Hidden size of the target."""
    vocab_size: int
    """Width of the target's logits."""
    num_heads: int = 4
    num_layers: int = 1
    """Residual blocks a head."""
    shares_lm_head: bool = False
    """True: the heads have no projections and use the target's frozen output layer. Projections are most of a set's
    weights, and one pass over the shared one serves all heads."""
    base_model: str = ""
    """Folder or hub id of the target that they were trained for."""


class ResidualBlock(nn.Module):
    """`x + SiLU(Linear(x))`, initialised as the identity.

    For an input wider than `hidden_size`, a second linear layer on the residual path reduces it to that width. It
    begins as the projection to the first `hidden_size` numbers.
    """

    def __init__(self, in_features: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, hidden_size, bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)
        self.res_connection: nn.Module = nn.Identity()
        if in_features != hidden_size:
            self.res_connection = nn.Linear(in_features, hidden_size)
            nn.init.zeros_(self.res_connection.bias)
            with torch.no_grad():
                self.res_connection.weight.copy_(torch.eye(hidden_size, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., hidden_size]"""
        output: Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return output


class ProjectedHeads(nn.Module):
    """Base of a set of heads: each head's blocks, then its own vocabulary projection or the target's for all heads."""

    config: HeadsConfig
    blocks: nn.ModuleList
    """Blocks of each head."""
    reads_tokens: ClassVar[bool] = False
    """Whether a head reads the embeddings of the tokens before its own, besides the target's state."""

    def __init__(self, own: list[nn.Linear], shared: Projection | None) -> None:
        super().__init__()
        self.projections = nn.ModuleList(own)
        # In a tuple, because an assigned module would become a submodule, trained and saved with this one.
        self._shared: tuple[Any, ...] = (shared,)
        if not own and shared is None:
            raise ValueError("heads without projections of their own need the target's")

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def init_projections(self, weight: Tensor) -> None:
        """Initialise every own projection with the target's output layer, `weight` [vocab, hidden]."""
        with torch.no_grad():
            for projection in self.projections:
                assert isinstance(projection, nn.Linear)
                projection.weight.copy_(weight)
                if projection.bias is not None:
                    projection.bias.zero_()

    def some(self, rows: Tensor, first: int, count: int | None) -> Tensor:
        """[..., width] -> logits [count, ..., vocab] of the heads from `first` on (None: all), over the same rows."""
        chosen = list(self.blocks)[first : None if count is None else first + count]
        return self.project(torch.stack([block(rows) for block in chosen]), first)

    def project(self, states: Tensor, first: int = 0) -> Tensor:
        """[k, ..., hidden] -> [k, ..., vocab], for the heads from `first` on; a shared projection runs once for all."""
        if not self.projections:
            logits: Tensor = self._shared[0](states)
            return logits
        return torch.stack([self.projections[first + i](state) for i, state in enumerate(states)])
