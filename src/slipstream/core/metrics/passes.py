"""How many passes of a model were replays of recorded ones, and why the others were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MOST_EAGER = 0.01
"""Share of passes outside a graph from which on something is wrong."""
LEAST_PASSES = 1000
"""Passes from which on the share is judged."""


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Passes of models whose executors record them. All of it only grows."""

    num_replayed: int = 0
    """Passes that a graph computed."""
    eager: Mapping[str, int] = field(default_factory=dict)
    """Passes that none did, by why."""

    @classmethod
    def joined(cls, parts: Iterable[PassCounts]) -> PassCounts:
        """All together."""
        parts = list(parts)
        eager: Counter[str] = Counter()
        for part in parts:
            eager.update(part.eager)
        return cls(sum(part.num_replayed for part in parts), dict(eager))

    def since(self, before: PassCounts) -> PassCounts:
        """What came on top of `before`."""
        eager = {reason: number - before.eager.get(reason, 0) for reason, number in self.eager.items()}
        return PassCounts(self.num_replayed - before.num_replayed, eager)

    @property
    def num_eager(self) -> int:
        return sum(self.eager.values())

    @property
    def num_passes(self) -> int:
        return self.num_replayed + self.num_eager

    @property
    def share_eager(self) -> float:
        """In [0, 1]; 0 where there were no passes."""
        return self.num_eager / max(self.num_passes, 1)

    @property
    def complaint(self) -> str | None:
        """A sentence where too many of them ran outside a graph; None where that is not so, or they are too few."""
        if self.num_passes < LEAST_PASSES or self.share_eager <= MOST_EAGER:
            return None
        reason = max(self.eager, key=lambda each: self.eager[each])
        return (
            f"{self.share_eager:.1%} of {self.num_passes:,} passes ran outside a recorded graph, which is slower; "
            f"the commonest reason: {reason} ({self.eager[reason]:,})"
        )
