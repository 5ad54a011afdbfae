"""Suspected causes of a shift: a task's traffic before and after it, compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

_MIN_Z = 4.0
"""Standard errors by which a figure must have moved; by chance that happens once in 16,000 for each figure."""
_MIN_EFFECT = 0.5
"""Standard deviations by which a length or temperature must have moved."""
_MIN_SHARE = 0.2
"""Difference by which a share must have moved."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a request other than its acceptance."""

    num_prompt_tokens: int
    num_output_tokens: int
    temperature: float
    structured: bool
    """Whether its answer was constrained by a grammar."""
    method: str
    """The task's drafter when the request ended."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A figure of the traffic that moved at the same time."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name} went from {self.before} to {self.after}"


def suspected_causes(before: Seq[Traits], after: Seq[Traits]) -> list[Cause]:
    """Figures that differ between two stretches of traffic, the most significant first.

    They changed at the same time, which does not prove that they are the cause.
    """
    if min(len(before), len(after)) < 10:
        return []
    found = [
        _moved(
            "prompt length",
            [_log(t.num_prompt_tokens) for t in before],
            [_log(t.num_prompt_tokens) for t in after],
            _tokens,
        ),
        _moved(
            "output length",
            [_log(t.num_output_tokens) for t in before],
            [_log(t.num_output_tokens) for t in after],
            _tokens,
        ),
        _moved(
            "temperature", [t.temperature for t in before], [t.temperature for t in after], "{:.2f}".format
        ),
        _share_moved(
            "share of structured requests", [t.structured for t in before], [t.structured for t in after]
        ),
        _method_moved(before, after),
    ]
    ranked = sorted((item for item in found if item is not None), key=lambda item: -item[0])
    return [cause for _, cause in ranked]


def _log(length: int) -> float:
    return math.log1p(length)


def _tokens(log: float) -> str:
    return f"{math.expm1(log):.0f} tokens"


def _mean_and_variance(values: Seq[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _moved(
    name: str, before: Seq[float], after: Seq[float], write: Callable[[float], str]
) -> tuple[float, Cause] | None:
    """Welch's statistic and the cause; None unless the statistic and the difference of means are large."""
    (mean_0, variance_0), (mean_1, variance_1) = _mean_and_variance(before), _mean_and_variance(after)
    distance = abs(mean_1 - mean_0)
    spread = math.sqrt((variance_0 + variance_1) / 2)
    error = math.sqrt(variance_0 / len(before) + variance_1 / len(after))
    if distance < 1e-9 or distance < _MIN_EFFECT * spread or distance < _MIN_Z * error:
        return None
    return distance / max(error, 1e-9), Cause(name, write(mean_0), write(mean_1))


def _share_moved(name: str, before: Seq[bool], after: Seq[bool]) -> tuple[float, Cause] | None:
    share_0, share_1 = sum(before) / len(before), sum(after) / len(after)
    pooled = (sum(before) + sum(after)) / (len(before) + len(after))
    error = math.sqrt(pooled * (1 - pooled) * (1 / len(before) + 1 / len(after)))
    distance = abs(share_1 - share_0)
    if distance < _MIN_SHARE or distance < _MIN_Z * error:
        return None
    return distance / max(error, 1e-9), Cause(name, f"{share_0:.0%}", f"{share_1:.0%}")


def _method_moved(before: Seq[Traits], after: Seq[Traits]) -> tuple[float, Cause] | None:
    """The change of the most frequent drafter; None where there is none."""
    usual, now = _most([t.method for t in before]), _most([t.method for t in after])
    if usual == now:
        return None
    moved = _share_moved("drafter", [t.method == now for t in before], [t.method == now for t in after])
    return None if moved is None else (moved[0], Cause("drafter", usual, now))


def _most(names: Seq[str]) -> str:
    return max(sorted(set(names)), key=names.count)
