"""Samples with prompts of given lengths as the page compares them: by length, by what was beside, by mode."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.catalog import NAMES, OURS, PRECISIONS
from benchmarks.peers.figures import Ratio, student
from benchmarks.peers.groups import PRECISION_ORDER
from benchmarks.peers.results import ModelEntries, Results, Sample

Speed = Callable[[Sample, int], float | None]
"""What is compared: a rate of one sample with so many prompt tokens."""


def prompt_rate(sample: Sample, length: int) -> float | None:
    """Prompt tokens a second until the first token."""
    return length / sample.first_token_s if sample.first_token_s else None


def decode_rate(sample: Sample, length: int) -> float | None:
    """Tokens a second after the first one."""
    return sample.decode_tokens_per_s


def step_ms(sample: Sample, length: int) -> float | None:
    """Milliseconds a token after the first one."""
    rate = sample.decode_tokens_per_s
    return 1e3 / rate if rate else None


def memory_gib(sample: Sample, length: int) -> float | None:
    """Peak memory of the worker so far."""
    return sample.peak_memory_bytes / 2**30 if sample.peak_memory_bytes else None


@dataclass(frozen=True)
class Side:
    """Modes that one side of a comparison may take; the fastest of them is taken. Empty fields are not looked at."""

    ours: bool
    precision: str
    kinds: tuple[str, ...] = ("off",)
    caches: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    def takes(self, definition: dict[str, Any]) -> bool:
        return (
            (definition["peer"] == OURS) == self.ours
            and PRECISIONS[definition["weights"]] == self.precision
            and (not self.kinds or definition["kind"] in self.kinds)
            and (not self.caches or definition["cache"] in self.caches)
            and (not self.peers or definition["peer"] in self.peers)
        )


class Cells(ModelEntries):
    """One model's samples, by task (a length, and what was beside it) and by mode."""

    def __init__(self, results: Results, name: str) -> None:
        super().__init__(results, name)
        self.samples: dict[tuple[str, str], list[Sample]] = {}
        for sample in results.samples:
            if sample.model == name:
                self.samples.setdefault((sample.task, sample.mode), []).append(sample)
        self.tasks = sorted({task for task, _ in self.samples}, key=lambda task: (length_of(task), task))
        self.modes = sorted({mode for _, mode in self.samples}, key=self._order)

    def fastest(self, side: Side, task: str, speed: Speed) -> str | None:
        """Return the fastest of the modes that the side may take and that answered most texts."""
        medians = {
            mode: (len(values), statistics.median(values))
            for mode in self.modes
            if side.takes(self.definition(mode)) and (values := self.values(task, mode, speed))
        }
        return max(medians, key=lambda mode: medians[mode]) if medians else None

    def values(self, task: str, mode: str, speed: Speed) -> list[float]:
        length = length_of(task)
        rates = [speed(sample, length) for sample in self.samples.get((task, mode), [])]
        return [rate for rate in rates if rate]

    def ratio(self, task: str, ours: str, theirs: str, speed: Speed) -> Ratio | None:
        """Paired by text and round."""
        length = length_of(task)
        others = {sample.cell: speed(sample, length) for sample in self.samples.get((task, theirs), [])}
        pairs = [
            (speed(sample, length), others.get(sample.cell)) for sample in self.samples.get((task, ours), [])
        ]
        return student([mine / other for mine, other in pairs if mine and other])

    def _order(self, mode: str) -> tuple[int, str, int, str]:
        definition = self.definition(mode)
        precision = PRECISIONS[definition["weights"]]
        rank = PRECISION_ORDER.get(precision, len(PRECISION_ORDER))
        return (rank, precision, list(NAMES).index(definition["peer"]), mode)


def length_of(task: str) -> int:
    """Prompt tokens of a task's name: `1536, 1 busy beside it`."""
    return int(task.partition(",")[0])


def condition_of(task: str) -> str:
    """What was beside it; empty for nothing."""
    return task.partition(", ")[2]


def label(mode: str) -> str:
    peer, name, weights = mode.split("/")
    return f"{NAMES[peer]}, {name}, {weights}"
