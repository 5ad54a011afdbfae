"""What else changed when something did: the traffic of a task before and after, compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

_MIN_Z = 4.0
"""Standard errors by which a figure must have moved: one in 16,000 by chance, for each of a handful of figures."""
_MIN_EFFECT = 0.5
"""Standard deviations by which lengths and temperatures must have moved to matter."""
_MIN_SHARE = 0.2
"""By how much a share must have moved to matter."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a request was like, apart from how its drafts fared."""

    num_prompt_tokens: int
    num_output_tokens: int
    temperature: float
    structured: bool
    """Whether its answer had to keep to a grammar."""
    method: str
    """What drafted for its task when it ended."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A figure of the traffic that moved too."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name} went from {self.before} to {self.after}"


def suspected_causes(before: Seq[Traits], after: Seq[Traits]) -> list[Cause]:
    """What moved between two stretches of traffic, the strongest first; empty where nothing that is known did.

    It moved at the same time; that it is the cause is likely, not certain.
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
    """Welch's statistic and the cause, where it is large and the means lie apart."""
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
    """The drafter of most requests, where that is another one now."""
    usual, now = _most([t.method for t in before]), _most([t.method for t in after])
    if usual == now:
        return None
    moved = _share_moved("drafter", [t.method == now for t in before], [t.method == now for t in after])
    return None if moved is None else (moved[0], Cause("drafter", usual, now))


def _most(names: Seq[str]) -> str:
    return max(sorted(set(names)), key=names.count)
