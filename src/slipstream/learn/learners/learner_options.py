"""Options of learners. No torch is imported here, so that a command line and a server can check them."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import check_at_least, check_types
from slipstream.errors import ConfigError


@dataclass(frozen=True)
class LearnerOptions:
    """How a learner makes one candidate."""

    num_steps: int = 120
    """Optimizer steps."""
    batch_rows: int = 8
    """Rows of a batch; half of them are from older records."""
    row_length: int = 512
    """The most tokens of a row; longer texts lose their beginnings."""
    learning_rate: float = 1e-3
    """AdamW's peak."""
    overlap_weight: float = 1.0
    """Weight of one minus the overlap, next to the forward divergence."""
    depth: int = 4
    """Draft tokens of the chains that are served."""
    rank: int = 16
    """Rank of adapters and of the bigram bias."""
    adapted_layers: int = 1
    """How many of the last layers low_rank adapts, besides the output layer."""
    seed: int = 0
    """Seed of the order of the records and of fresh tensors."""

    def __post_init__(self) -> None:
        check_types(self, "learner")
        check_at_least(
            "learner",
            1,
            num_steps=self.num_steps,
            batch_rows=self.batch_rows,
            depth=self.depth,
            rank=self.rank,
        )
        check_at_least("learner", 2, row_length=self.row_length)
        check_at_least("learner", 0, seed=self.seed, adapted_layers=self.adapted_layers)
        if not self.learning_rate > 0 or not self.overlap_weight >= 0:
            raise ConfigError("learner learning_rate must be above 0 and overlap_weight at least 0")
