"""The sizes of a target that a head must match."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from slipstream.errors import ModelError


class TargetSizes(Protocol):
    """A target's sizes; a target that is only planned has them too."""

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""

    @property
    def num_layers(self) -> int:
        """Number of layers; hidden state `num_layers` is the last one."""

    @property
    def context_length(self) -> int:
        """The most positions that it supports."""


class TargetShape(TargetSizes, Protocol):
    """A target's sizes and embedding; the engine's target and the trainer's both implement it."""

    def embed(self, token_ids: Tensor, /) -> Tensor:
        """int64 [...] -> [..., hidden]"""


def check_fits(path: str, hidden_size: int, vocab_size: int, target: TargetSizes) -> None:
    """Raise `ModelError` unless heads of these sizes match `target`."""
    if (hidden_size, vocab_size) != (target.hidden_size, target.vocab_size):
        raise ModelError(
            f"the heads {path!r} are for a target of hidden size {hidden_size} and {vocab_size} tokens; this one has "
            f"{target.hidden_size} and {target.vocab_size}: use heads that were trained for it"
        )
