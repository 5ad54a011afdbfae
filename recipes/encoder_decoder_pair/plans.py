"""The sizes of the models and how long each is trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What makes one model of a task different from another."""

    num_encoder_layers: int
    num_decoder_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int


@dataclass(frozen=True)
class Plan:
    """A shape, and its training."""

    shape: Shape
    num_steps: int
    """At most."""
    enough: float = 0.998
    """Share of tokens that are right at which training ends: drafts stay worse than their targets."""
    batch_size: int = 16
    muon_rate: float = 0.02
    adam_rate: float = 0.003


PLANS = {
    "t5": {
        "target": Plan(Shape(1, 2, 64, 128, 2), 6000),
        "draft": Plan(Shape(1, 1, 64, 128, 2), 2000, enough=0.97),
    },
    "whisper": {
        "target": Plan(Shape(1, 2, 128, 256, 2), 500),
        "draft": Plan(Shape(1, 1, 64, 128, 2), 500, enough=0.97),
    },
}
