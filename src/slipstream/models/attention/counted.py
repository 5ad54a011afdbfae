"""Layers that count the tokens before their rows by a cache's length, and not by the positions that they are given.

Packed rows have no cache whose length says where they are. So such a layer gets one that knows its rows' positions, and
a table of positions is read at those that the model was given.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.support import is_encoder_decoder

COUNTING = frozenset({"llama4_text"})
"""Types of models whose layers do: Llama 4 scales queries by where they are in layers without a rotary embedding."""

COUNTING_TABLES = frozenset(
    {"bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"}
)
"""Types of models whose table of positions does: decoders of encoder-decoders that are used without the encoder."""


class _Count:
    """Looks like a cache in which each row finds as many tokens as its position has before it."""

    def __init__(self, positions: Tensor) -> None:
        """`positions` [N] are the rows'."""
        self._ahead = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """[N]: what a layer adds to 0 .. N - 1."""
        return self._ahead

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the rows as they are: attention keeps them."""
        return key, value


class LengthProbe:
    """Looks like an empty cache; knows whether a layer has read its length."""

    def __init__(self) -> None:
        self.was_read = False

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Zero. A model reads it as well, and names no layer."""
        self.was_read |= layer_idx is not None
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Zero: the rows are the first ones."""
        self.was_read = True
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys and the first one's index."""
        return query_length, 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the rows as they are."""
        return key, value


class _Table:
    """Reads a model's table of positions at those that the model is given."""

    def __init__(self, model: Any) -> None:
        self._positions: Tensor | None = None
        table = model.get_decoder().embed_positions
        table.forward = partial(self._embed, table.forward)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, _: nn.Module, __: Any, keywords: dict[str, Any]) -> None:
        given = keywords.get("position_ids")
        self._positions = None if given is None else given[0]

    def _end(self, *_: Any) -> None:
        self._positions = None

    def _embed(self, embed: Any, *inputs: Any, **keywords: Any) -> Any:
        if self._positions is not None:
            keywords["position_ids"] = self._positions
        return embed(*inputs, **keywords)


def needs_positions(model: Any) -> bool:
    """Whether layers of a model count tokens by a cache's length; see `COUNTING`."""
    return model.config.model_type in COUNTING


def pass_positions(model: Any) -> None:
    """Let the layers of `model` count by the positions that they are given, where its type is in `COUNTING`, and its
    table, where it is in `COUNTING_TABLES`.

    Passes have one row of tokens then, [1, N].
    """
    if model.config.model_type in COUNTING_TABLES and not is_encoder_decoder(model.config):
        _Table(model)
    if needs_positions(model):
        for layer in model.model.layers:
            layer.register_forward_pre_hook(_with_count, with_kwargs=True)


def _with_count(
    _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (positions,) = keywords["position_ids"]
    return args, {**keywords, "past_key_values": _Count(positions)}
