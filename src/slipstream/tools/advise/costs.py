"""What steps and drafts take, as measured: by requests at once, checked rows, levels and context.

Between measured points times are linear, and beyond the largest batch too. All seconds are of whole steps of the
engine, its Python included; what a drafter takes is apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Points = tuple[tuple[float, float], ...]
"""(x, seconds), x ascending."""


@dataclass(frozen=True)
class DrafterCost:
    """One drafter's calls."""

    levels: Mapping[int, Points]
    """Requests at once to (levels, seconds)."""
    prompt_row_s: float = 0.0
    """Seconds of a prompt's token."""


@dataclass(frozen=True)
class StepCosts:
    """All measured times of one target and its drafters."""

    steps: Mapping[int, Points]
    """Requests at once to (draft tokens checked in all, seconds of the step without drafting)."""
    contexts: Mapping[int, float]
    """Requests at once to the mean tokens of context at which `steps` were measured."""
    accepted_s: float
    """Seconds of each accepted draft token: its text, its accounting."""
    context_s: float
    """Seconds of each token of context of a request, in a step."""
    prompts: Points
    """(prompt rows besides the decoding ones, seconds that they add)."""
    drafters: Mapping[str, DrafterCost]
    """By candidate."""

    @property
    def batches(self) -> list[int]:
        """Requests at once that were measured, ascending."""
        return sorted(self.steps)

    def step_s(
        self, number: float, checked: float = 0.0, accepted: float = 0.0, context: float | None = None
    ) -> float:
        """Seconds of a step of `number` requests that checks and accepts so many draft tokens in all.

        `context` is their mean context; None is that of the measurement.
        """
        if number <= 0:
            return 0.0
        each = checked / number
        values = [along(self.steps[batch], each * batch) for batch in self.batches]
        seconds = between(self.batches, values, number)
        if context is not None:
            usual = between(self.batches, [self.contexts[batch] for batch in self.batches], number)
            seconds += self.context_s * number * (context - usual)
        return max(seconds, 0.0) + self.accepted_s * accepted

    def prompt_s(self, rows: float) -> float:
        """Seconds that `rows` rows of prompts add to a step."""
        return along(((0.0, 0.0), *self.prompts), rows) if rows > 0 else 0.0

    def draft_s(self, candidate: str, number: float, levels: float) -> float:
        """Seconds of a drafter's call for `number` requests."""
        cost = self.drafters.get(candidate)
        if cost is None or not cost.levels or number <= 0 or levels <= 0:
            return 0.0
        batches = sorted(cost.levels)
        return max(between(batches, [along(cost.levels[batch], levels) for batch in batches], number), 0.0)

    def draft_prompt_s(self, candidate: str, rows: float) -> float:
        """Seconds of a drafter's own pass over `rows` rows of prompts."""
        cost = self.drafters.get(candidate)
        return 0.0 if cost is None else cost.prompt_row_s * rows

    def as_json(self) -> dict[str, Any]:
        """Plain values; `msgspec.convert` is the way back."""
        return asdict(self)


def along(points: Points, at: float) -> float:
    """Linear between points and beyond the last one, constant before the first."""
    if len(points) == 1:
        return points[0][1]
    places = [place for place, _ in points]
    if at <= places[0]:
        return points[0][1]
    right = min(int(np.searchsorted(places, at)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def between(batches: Seq[int], values: Seq[float], number: float) -> float:
    """Return the value between those of measured batches, for `number` requests; below the smallest batch as there."""
    return along(tuple(zip(map(float, batches), values, strict=True)), number)
