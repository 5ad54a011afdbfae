"""Which target a head belongs to."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from slipstream.errors import ModelError


class TargetShape(Protocol):
    """What a head must fit; the engine's target and the trainer's both have it."""

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it can say."""

    @property
    def num_layers(self) -> int:
        """Layers, so that `num_layers` is the last hidden state."""

    @property
    def context_length(self) -> int:
        """Positions that it was made for."""

    def embed(self, token_ids: Tensor, /) -> Tensor:
        """int64 [...] -> [..., hidden]"""


def check_fits(path: str, hidden_size: int, vocab_size: int, target: TargetShape) -> None:
    """Raise `ModelError` unless heads of these sizes can have been made for `target`."""
    if (hidden_size, vocab_size) != (target.hidden_size, target.vocab_size):
        raise ModelError(
            f"the heads {path!r} are for a target of hidden size {hidden_size} and {vocab_size} tokens; this one has "
            f"{target.hidden_size} and {target.vocab_size}: use heads that were trained for it"
        )
