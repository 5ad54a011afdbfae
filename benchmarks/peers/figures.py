"""Arithmetic of the reports: paired ratios, geometric means, bootstrap and Student's intervals. No files, no clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from benchmarks.peers.results import Sample

RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one thing is as another."""

    value: float
    low: float
    high: float
    """Ends of the 95 % interval."""
    num_pairs: int

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.value:.2f} (one pair)"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.mean(math.log(value) for value in values))


def paired_ratios(ours: Iterable[Sample], theirs: Iterable[Sample]) -> dict[str, list[float]]:
    """By task: our tokens/s over theirs for each prompt and round that both answered."""
    other = {sample.cell: sample for sample in theirs}
    ratios: dict[str, list[float]] = {}
    for sample in ours:
        if sample.cell in other:
            ratio = sample.tokens_per_s / other[sample.cell].tokens_per_s
            ratios.setdefault(sample.task, []).append(ratio)
    return ratios


def over_tasks(ratios: Mapping[str, Sequence[float]], *, seed: int = 0) -> Ratio | None:
    """Geometric mean of the tasks' geometric means; None without a pair.

    The interval resamples tasks, and pairs within each: tasks differ more than repetitions do, and with a pair or
    two a task an interval over repetitions alone would claim too much.
    """
    if not ratios:
        return None
    logs = [np.log(np.asarray(values)) for _, values in sorted(ratios.items())]
    value = math.exp(float(np.mean([values.mean() for values in logs])))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(logs), size=(RESAMPLES, len(logs)))  # [resample, place] -> task
    resampled = np.empty(drawn.shape)
    for task, values in enumerate(logs):
        places = drawn == task
        pairs = rng.integers(len(values), size=(int(places.sum()), len(values)))
        resampled[places] = values[pairs].mean(axis=1)
    means = resampled.mean(axis=1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return Ratio(value, float(low), float(high), sum(len(values) for values in logs))


def student(ratios: Sequence[float]) -> Ratio | None:
    """Geometric mean of a few pairs with Student's interval of their logarithms; None without a pair."""
    if not ratios:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean, count = statistics.mean(logs), len(logs)
    if count == 1:
        return Ratio(ratios[0], 0.0, math.inf, 1)
    reach = float(stats.t.ppf(0.975, count - 1)) * statistics.stdev(logs) / math.sqrt(count)
    return Ratio(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), count)


def best_by_task(by_mode: Mapping[str, Iterable[Sample]]) -> list[Sample]:
    """For each task the samples of the mode with the highest geometric mean of tokens/s there."""
    speeds: dict[str, dict[str, list[Sample]]] = {}
    for mode, samples in by_mode.items():
        for sample in samples:
            speeds.setdefault(sample.task, {}).setdefault(mode, []).append(sample)
    best: list[Sample] = []
    for modes in speeds.values():
        best += max(modes.values(), key=lambda samples: geometric_mean(s.tokens_per_s for s in samples))
    return best


def task_mean(samples: Iterable[Sample]) -> float:
    """Geometric mean over tasks of each task's geometric mean of tokens/s."""
    by_task: dict[str, list[float]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample.tokens_per_s)
    return geometric_mean(geometric_mean(values) for values in by_task.values())


def equal_texts(ours: Iterable[Sample], reference: Iterable[Sample]) -> tuple[int, int]:
    """Prompts whose output token ids are those of the reference in every round, and prompts compared."""
    expected = {(s.model, s.task, s.index): s.token_ids for s in reference}
    equal: dict[tuple[str, str, int], bool] = {}
    for sample in ours:
        key = (sample.model, sample.task, sample.index)
        if key in expected:
            equal[key] = equal.get(key, True) and sample.token_ids == expected[key]
    return sum(equal.values()), len(equal)
