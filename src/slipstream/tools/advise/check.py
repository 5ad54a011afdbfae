"""Measures what is recommended, the runner-up and off on the same requests, in turns, next to what was predicted."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.engine.closed_loop import BenchJob, closed_loop
from slipstream.engine.engine import Engine
from slipstream.tools.advise.recording import OnProgress
from slipstream.tools.bench.engine.measure import rotated
from slipstream.tools.bench.statistics import Interval, PairedTimes, joined, speedup_interval

MIN_PAIRS = 3
"""Blocks of requests, each with every setting, at least."""
MAX_ROUNDS = 6
MIN_BLOCK = 2
"""Requests of a block, for each that runs at once."""
PREDICTION_ERROR = 0.08
"""Standard error of the logarithm of a predicted speedup: of the 18 cells of docs/benchmarks/advise_quick.md."""
LEAST_ERROR = 0.01
"""Error of a measured speedup, at least: what differs between runs of a process is in no interval of pairs."""
UNKNOWN_ERROR = 0.15
"""Error of a measured speedup whose pairs say nothing of it: a single pair."""


@dataclass(frozen=True)
class ShortlistedSetting:
    """A setting to be measured."""

    name: str
    engine: Callable[[], Engine]
    """Made when it is needed."""
    max_draft_tokens: int | None
    predicted_s: Callable[[Seq[int], int], float]
    """Seconds of a closed loop over these requests, so many at once."""


@dataclass(frozen=True, slots=True)
class CheckedSetting:
    """A setting as it was predicted and as it was measured, on the same blocks of requests."""

    name: str
    concurrency: int
    measured_goodput: float
    """Tokens a second."""
    predicted_goodput: float
    measured_speedup: float | None
    """Over off; None for off itself."""
    predicted_speedup: float | None
    interval: Interval | None
    """Interval of the measured speedup."""
    num_pairs: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one: of the speedup, or of off's tokens a second."""
        if self.measured_speedup is None or self.predicted_speedup is None:
            return self.predicted_goodput / self.measured_goodput - 1
        return self.predicted_speedup / self.measured_speedup - 1

    @property
    def weighed_speedup(self) -> float | None:
        """What prediction and measurement say together, each with the weight of what it is worth; None for off itself.

        The mean of their logarithms, weighted by the inverse squares of their errors.
        """
        if self.measured_speedup is None or self.predicted_speedup is None:
            return None
        of_measured, of_predicted = self.measured_error**-2, PREDICTION_ERROR**-2
        measured, predicted = math.log(self.measured_speedup), math.log(self.predicted_speedup)
        return math.exp((of_measured * measured + of_predicted * predicted) / (of_measured + of_predicted))

    @property
    def measured_error(self) -> float:
        """Standard error of the logarithm of the measured speedup, from its interval.

        Intervals over few pairs are too narrow: resampling n pairs loses a factor of √((n - 1) / n), and how far they
        scatter is hardly known. Student's t says how much wider an honest interval is.
        """
        if self.interval is None or self.num_pairs < 2:
            return UNKNOWN_ERROR
        from scipy.stats import norm, t

        tail = (1 + self.interval.confidence) / 2
        usual = math.log(self.interval.high / self.interval.low) / (2 * norm.ppf(tail))
        lost = (
            math.sqrt(self.num_pairs / (self.num_pairs - 1))
            * t.ppf(tail, self.num_pairs - 1)
            / norm.ppf(tail)
        )
        return max(float(usual * lost), LEAST_ERROR)

    def as_json(self) -> dict[str, Any]:
        """Plain values; `msgspec.convert` is the way back."""
        return asdict(self)


def blocks(number: int, concurrency: int) -> list[range]:
    """Places of requests, block by block: enough to keep the engine full most of the time."""
    size = MIN_BLOCK * concurrency
    count = max(number // size, 1)
    ends = [number * place // count for place in range(count + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def check(
    shortlisted: Seq[ShortlistedSetting],
    jobs: Seq[BenchJob],
    concurrency: int,
    budget_s: float,
    on_progress: OnProgress,
) -> list[CheckedSetting]:
    """Every each, the first of which is off, on each block in turns, until the time is up."""
    cut = blocks(len(jobs), concurrency)
    runs: list[list[tuple[range, int, float]]] = [[] for _ in shortlisted]
    engines = [each.engine() for each in shortlisted]
    for engine, each in zip(engines, shortlisted, strict=True):
        closed_loop(engine, jobs[: max(1, concurrency)][:4], concurrency, each.max_draft_tokens)
    started_s = time.perf_counter()
    total = len(cut) * MAX_ROUNDS
    for turn in range(total):
        late = time.perf_counter() - started_s > budget_s
        if late and turn >= MIN_PAIRS:
            break
        on_progress(turn, total)
        places = cut[turn % len(cut)]
        batch = [jobs[place] for place in places]
        for number in rotated(len(shortlisted), turn):
            limit = shortlisted[number].max_draft_tokens
            answers, _, seconds = closed_loop(engines[number], batch, concurrency, limit)
            tokens = sum(len(answer.token_ids) for answer in answers)
            runs[number].append((places, tokens, seconds))
    on_progress(total, total)
    return [
        _checked(each, shortlisted[0], own, runs[0], concurrency)
        for each, own in zip(shortlisted, runs, strict=True)
    ]


def _checked(
    each: ShortlistedSetting,
    off: ShortlistedSetting,
    own: Seq[tuple[range, int, float]],
    without: Seq[tuple[range, int, float]],
    concurrency: int,
) -> CheckedSetting:
    pairs = PairedTimes(
        tokens_on=[tokens for _, tokens, _ in own],
        seconds_on=[seconds for _, _, seconds in own],
        tokens_off=[tokens for _, tokens, _ in without],
        seconds_off=[seconds for _, _, seconds in without],
    )
    predicted_s = _predicted_s(each, own, concurrency)
    without_s = _predicted_s(off, without, concurrency)
    tokens = sum(pairs.tokens_on)
    is_off = each is off
    return CheckedSetting(
        name=each.name,
        concurrency=concurrency,
        measured_goodput=tokens / sum(pairs.seconds_on),
        predicted_goodput=tokens / predicted_s,
        measured_speedup=None if is_off else joined([pairs]).speedup,
        predicted_speedup=None if is_off else without_s / predicted_s,
        interval=None if is_off else speedup_interval([pairs]),
        num_pairs=len(own),
    )


def _predicted_s(each: ShortlistedSetting, runs: Seq[tuple[range, int, float]], concurrency: int) -> float:
    known: dict[range, float] = {}
    for places, _, _ in runs:
        if places not in known:
            known[places] = each.predicted_s(places, concurrency)
    return sum(known[places] for places, _, _ in runs)
