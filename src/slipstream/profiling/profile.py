"""What a forward pass of one model costs on one machine, by rows and context."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slipstream.config import check_at_least, check_types, options_from
from slipstream.errors import ConfigError


@dataclass(frozen=True)
class ProfileKey:
    """Everything that a pass's time depends on. A profile answers for its own key and for no other."""

    cpu: str
    num_cpus: int
    device: str
    """`cpu`, or the GPU's name."""
    num_threads: int
    model: str
    """A fingerprint of the configuration and the number of weights; not the path, which may move."""
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    kernels: str
    """`decoder` for whole passes in the native kernels, `native` for linear layers in them, each with the kernels'
    fingerprint; else `torch`."""
    attention: str
    """The class of the attention backend, "module:Class"."""
    slipstream: str
    torch: str
    transformers: str

    def __post_init__(self) -> None:
        check_types(self, "profile key")

    def digest(self) -> str:
        """A file name: equal keys have equal digests."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Rate:
    """Readings of a device's rate, taken in turns with the passes that they are compared with."""

    median: float
    best: float

    def __post_init__(self) -> None:
        check_types(self, "rate")
        if not 0 < self.median <= self.best < math.inf:
            raise ConfigError(f"rate must be positive and its median at most its best, got {self}")


@dataclass(frozen=True)
class StepTime:
    """Repeated passes of `rows` rows of one sequence that has `context` tokens in the cache. Times are in seconds."""

    rows: int
    context: int
    median_s: float
    q1_s: float
    q3_s: float
    best_s: float
    repeats: int
    bytes_read: int
    """Bytes that a pass must read: the weights that are multiplied with, and the keys and values."""

    def __post_init__(self) -> None:
        check_types(self, "step time")
        check_at_least("step time", 1, rows=self.rows, repeats=self.repeats)
        check_at_least("step time", 0, context=self.context, bytes_read=self.bytes_read)
        if not 0 < self.best_s <= self.q1_s <= self.median_s <= self.q3_s < math.inf:
            raise ConfigError(
                f"step time of {self.rows} rows must be positive, its median between its quartiles"
            )


@dataclass(frozen=True)
class CostProfile:
    """Measured times of one model's passes, and the rates that their roofline times follow from.

    `step_times` covers every pair of the row counts and contexts that occur in it, one row among them. Raises
    `ConfigError` where it does not, or where a number cannot be.
    """

    key: ProfileKey
    path: str
    """Where the model was loaded from, for people."""
    measured_at: str
    """ISO 8601, UTC."""
    num_weights: int
    """Weights that every row is multiplied with; of a mixture of experts, those of the experts that are chosen."""
    memory_bytes_per_s: Rate
    """Read bandwidth of the memory, over an array far larger than the last-level cache."""
    read_bytes_per_s: Rate
    """The same over an array of the size of this model's weights, which a cache may hold. The memory roofline uses
    it."""
    flops_per_s: Rate
    step_times: tuple[StepTime, ...]

    def __post_init__(self) -> None:
        check_types(self, "profile")
        check_at_least("profile", 1, num_weights=self.num_weights)
        cells = [(time.context, time.rows) for time in self.step_times]
        if (
            not cells
            or self.row_counts[0] != 1
            or sorted(cells) != list(itertools.product(self.contexts, self.row_counts))
        ):
            raise ConfigError(
                "profile step_times must have each pair of its contexts and row counts, from 1 on, once"
            )

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """The measured row counts, ascending."""
        return tuple(sorted({time.rows for time in self.step_times}))

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """The measured contexts, ascending."""
        return tuple(sorted({time.context for time in self.step_times}))

    @cached_property
    def _grid(self) -> list[list[float]]:
        """[row counts][contexts] seconds, made monotone in both: more work never takes less time.

        The second pass keeps what the first one made, since isotonic regression keeps the order of two series.
        """
        medians = {(time.rows, time.context): time.median_s for time in self.step_times}
        by_context = [
            isotonic([medians[rows, context] for rows in self.row_counts]) for context in self.contexts
        ]
        return [isotonic(series) for series in zip(*by_context, strict=True)]

    def step_s(self, rows: float, context: float) -> float:
        """Seconds of a pass of `rows` rows over `context` cached tokens, sampling and Python around it not included.

        Linear between the measured points and beyond the largest; below the smallest context as at the smallest.
        Never less for more rows.
        """
        if rows < 1 or context < 0:
            raise ValueError(f"a pass has at least one row and no negative context, got {rows} and {context}")
        column = [interpolate(self.contexts, series, max(context, self.contexts[0])) for series in self._grid]
        column = list(itertools.accumulate(column, max))  # extrapolated lines may cross
        return interpolate(self.row_counts, column, rows)

    def verify_cost(self, rows: float, context: float) -> float:
        """v: time of a pass of `rows` rows over that of one row."""
        return self.step_s(rows, context) / self.step_s(1, context)

    def memory_roofline_s(self, time: StepTime) -> float:
        """Time to read what the pass must read, at the median rate."""
        return time.bytes_read / self.read_bytes_per_s.median

    def compute_roofline_s(self, time: StepTime) -> float:
        """Time of two operations a weight and row, at the median rate."""
        return 2 * self.num_weights * time.rows / self.flops_per_s.median

    def roofline_s(self, time: StepTime) -> float:
        """The greater of the two."""
        return max(self.memory_roofline_s(time), self.compute_roofline_s(time))

    def as_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CostProfile:
        """Raises `ConfigError` for values that are no profile."""
        made = dict(values)
        if not isinstance(made.get("key"), dict) or not isinstance(made.get("step_times"), list):
            raise ConfigError("profile needs 'key', an object, and 'step_times', a list")
        if not all(isinstance(time, dict) for time in made["step_times"]):
            raise ConfigError("profile step_times must be objects")
        made["key"] = options_from(ProfileKey, made["key"], "profile key")
        for name in ("memory_bytes_per_s", "read_bytes_per_s", "flops_per_s"):
            if isinstance(made.get(name), dict):
                made[name] = options_from(Rate, made[name], name)
        made["step_times"] = tuple(options_from(StepTime, time, "step time") for time in made["step_times"])
        return options_from(cls, made, "profile")


def isotonic(values: Seq[float]) -> list[float]:
    """The non-decreasing series nearest to `values` in least squares: neighbours out of order become their mean.

    Pool adjacent violators (Ayer et al. 1955). A series that is in order comes back as it was.
    """
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left, num_left), (right, num_right) = pools[-2:]
            count = num_left + num_right
            pools[-2:] = [((left * num_left + right * num_right) / count, count)]
    return [mean for mean, count in pools for _ in range(count)]


def interpolate(points: Seq[int], values: Seq[float], at: float) -> float:
    """Linear between the points and beyond the last one; exact at each of them."""
    if len(points) == 1:
        return values[0]
    right = min(bisect_right(points, at), len(points) - 1)
    share = (at - points[right - 1]) / (points[right] - points[right - 1])
    return (1 - share) * values[right - 1] + share * values[right]
