"""Computes figures from timed runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.assets.workload.prompts import Prompt, task_names
from slipstream.core.metrics.request import RequestMetrics
from slipstream.engine.closed_loop import TimedAnswer
from slipstream.profiling.steps import StepTally, cost_model
from slipstream.tools.bench.engine.measure import BenchRun
from slipstream.tools.bench.result import (
    Comparison,
    Difference,
    EngineFigures,
    Identity,
    PooledAcceptance,
    Prediction,
    TimeShares,
    Timing,
)
from slipstream.tools.bench.statistics import (
    PairedTimes,
    first_difference,
    geometric_mean_speedup,
    joined,
    percentiles,
    ratio,
    speedup_interval,
)

OFF = 0
"""Index of speculation off: it is the first configuration."""


def summarise(runs: Seq[BenchRun], names: Seq[str], prompts: Seq[Prompt]) -> list[EngineFigures]:
    """The figures of every configuration at every concurrency: over all tasks, then by task where there are several.

    Where several requests run at once a batch holds several tasks, so that a task has acceptance and latencies, but no
    speed of its own.
    """
    figures: list[EngineFigures] = []
    tasks = task_names(prompts)
    for concurrency in dict.fromkeys(run.concurrency for run in runs):
        here = [run for run in runs if run.concurrency == concurrency]
        groups = [None, *tasks] if len(tasks) > 1 else [None]
        for number in sorted({run.turn.configuration for run in here}):
            for task in groups:
                cell = _Cell(here, number, task, prompts, concurrency)
                if cell.answers:
                    figures.append(cell.figures(names[number]))
    return figures


def comparisons(runs: Seq[BenchRun], names: Seq[str], prompts: Seq[Prompt]) -> list[Comparison]:
    """At every concurrency the configuration with the highest speedup against each of the others, in pairs."""
    found: list[Comparison] = []
    for concurrency in dict.fromkeys(run.concurrency for run in runs):
        here = [run for run in runs if run.concurrency == concurrency]
        speedups = {
            number: speedup
            for number in sorted({run.turn.configuration for run in here} - {OFF})
            if (speedup := _Cell(here, number, None, prompts, concurrency).speedup()) is not None
        }
        order = sorted(speedups, key=lambda number: -speedups[number])
        for other in order[1:]:
            cell = _Cell(here, order[0], None, prompts, concurrency, baseline=other)
            speedup = cell.speedup()
            if speedup is not None:
                interval = speedup_interval(cell.paired_times())
                found.append(Comparison(names[order[0]], names[other], concurrency, speedup, interval))
    return found


def timings(runs: Seq[BenchRun], names: Seq[str]) -> list[Timing]:
    """The raw timings of all runs."""
    return [
        Timing(
            configuration=names[run.turn.configuration],
            concurrency=run.concurrency,
            repeat=run.turn.repeat,
            batch=run.turn.batch,
            wall_s=run.wall_s,
            prompts=[answer.prompt for answer in run.answers],
            num_output_tokens=[len(answer.token_ids) for answer in run.answers],
            time_to_first_token_s=[answer.metrics.time_to_first_token_s for answer in run.answers],
            latency_s=[answer.metrics.total_s for answer in run.answers],
        )
        for run in runs
    ]


@dataclass(frozen=True)
class _Pair:
    """A batch in one repeat, with a configuration and with the baseline."""

    on: BenchRun
    off: BenchRun


class _Cell:
    """The runs of one configuration at one concurrency, for one task or all tasks."""

    def __init__(
        self,
        runs: Seq[BenchRun],
        number: int,
        task: str | None,
        prompts: Seq[Prompt],
        concurrency: int,
        baseline: int = OFF,
    ) -> None:
        self.number = number
        self.task = task
        self.prompts = prompts
        self.concurrency = concurrency
        self.runs = [run for run in runs if run.turn.configuration == number and self._concerns(run)]
        self.answers = [answer for run in self.runs for answer in self._chosen(run)]
        off = {(run.turn.repeat, run.turn.batch): run for run in runs if run.turn.configuration == baseline}
        places = [(run.turn.repeat, run.turn.batch) for run in self.runs]
        self.pairs = [
            _Pair(run, off[place]) for run, place in zip(self.runs, places, strict=True) if place in off
        ]
        self._timed_alone = concurrency == 1 or task is None
        """True where the batches contain only this task."""

    def figures(self, name: str) -> EngineFigures:
        """All figures of this cell."""
        merged = RequestMetrics.merged([answer.metrics for answer in self.answers])
        accepted = PooledAcceptance.of(merged)
        groups = self.paired_times()
        pooled = joined(groups).speedup if groups else None
        decode = self._decode_speedup()
        on = self.number != OFF
        return EngineFigures(
            configuration=name,
            concurrency=self.concurrency,
            task=self.task,
            num_requests=len(self.answers),
            num_prompt_tokens=sum(answer.metrics.num_prompt_tokens for answer in self.answers),
            num_output_tokens=sum(len(answer.token_ids) for answer in self.answers),
            tokens_per_s=self._tokens_per_s(),
            speedup=geometric_mean_speedup(groups) if on else None,
            speedup_interval=speedup_interval(groups) if on else None,
            num_pairs=sum(map(len, groups)) if on else None,
            pooled_speedup=pooled if on else None,
            decode_speedup=decode if on else None,
            acceptance=accepted,
            time_to_first_token_s=percentiles([a.metrics.time_to_first_token_s for a in self.answers]),
            time_per_output_token_s=percentiles([*_seconds_per_token(self.answers)]),
            latency_s=percentiles([a.metrics.total_s for a in self.answers]),
            time_shares=self._time_shares(),
            prediction=self._prediction(accepted.length, pooled, decode) if on else None,
            identity=self._identity() if on else None,
            num_in_flight=self._num_in_flight(),
            num_preemptions=sum(answer.metrics.num_preemptions for answer in self.answers),
        )

    def speedup(self) -> float | None:
        """Speedup over the baseline; the geometric mean over tasks."""
        return geometric_mean_speedup(self.paired_times())

    # --- which runs and answers -------------------------------------------------------------------------------

    def _concerns(self, run: BenchRun) -> bool:
        return self.task is None or any(self._is_of_task(answer) for answer in run.answers)

    def _chosen(self, run: BenchRun) -> list[TimedAnswer]:
        return [answer for answer in run.answers if self._is_of_task(answer)]

    def _is_of_task(self, answer: TimedAnswer) -> bool:
        return self.task is None or self.prompts[answer.prompt].task == self.task

    # --- speed ------------------------------------------------------------------------------------------------

    def _tokens_per_s(self) -> float | None:
        if not self._timed_alone:
            return None
        batches = _by_batch(self.runs)
        tokens = sum(statistics.median(run.num_tokens for run in group) for group in batches.values())
        return ratio(
            tokens, sum(statistics.median(run.wall_s for run in group) for group in batches.values())
        )

    def paired_times(self) -> list[PairedTimes]:
        """One group a task at a concurrency of 1, otherwise a single one; each batch has the medians of its repeats.
        Empty for a task that shares its batches with others."""
        if not self._timed_alone:
            return []
        groups: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
        batches: dict[int, list[_Pair]] = defaultdict(list)
        for pair in self.pairs:
            batches[pair.on.turn.batch].append(pair)
        for pairs in batches.values():
            task = self.prompts[pairs[0].on.answers[0].prompt].task if self.concurrency == 1 else ""
            groups[task].append(
                (
                    statistics.median(pair.on.num_tokens for pair in pairs),
                    statistics.median(pair.on.wall_s for pair in pairs),
                    statistics.median(pair.off.num_tokens for pair in pairs),
                    statistics.median(pair.off.wall_s for pair in pairs),
                )
            )
        return [PairedTimes(*zip(*rows, strict=True)) for rows in groups.values()]

    def _decode_speedup(self) -> float | None:
        """Pooled seconds a token after the first step: off's over the configuration's, on the pairs."""
        on = _decode_s_per_token([a for pair in self.pairs for a in self._chosen(pair.on)])
        off = _decode_s_per_token([a for pair in self.pairs for a in self._chosen(pair.off)])
        return None if on is None or off is None else ratio(off, on)

    def _num_in_flight(self) -> float | None:
        if not self._timed_alone:
            return None
        busy_s = sum(answer.metrics.total_s for answer in self.answers)
        return ratio(busy_s, sum(run.wall_s for run in self.runs))

    # --- where the time went ----------------------------------------------------------------------------------

    def _steps(self, runs: Iterable[BenchRun]) -> StepTally:
        tally = StepTally()
        for run in runs:
            tally.merge(run.steps)
        return tally

    def _time_shares(self) -> TimeShares | None:
        wall_s = sum(run.wall_s for run in self.runs)
        if not self._timed_alone or not wall_s:
            return None
        steps = self._steps(self.runs)
        draft, verify = steps.draft_s / wall_s, steps.verify_s / wall_s
        return TimeShares(draft, verify, other=1 - draft - verify)

    def _prediction(
        self, tau: float | None, speedup: float | None, decode_speedup: float | None
    ) -> Prediction | None:
        if not self._timed_alone or tau is None:
            return None
        model = cost_model(
            self._steps(pair.on for pair in self.pairs), self._steps(pair.off for pair in self.pairs)
        )
        if model is None:
            return None
        predicted = model.predicted_speedup(tau)
        return Prediction(
            target_step_s=model.target_step_s,
            gamma=model.gamma,
            c=model.c,
            v=model.v,
            predicted_speedup=predicted,
            efficiency=None if speedup is None else speedup / predicted,
            decode_efficiency=None if decode_speedup is None else decode_speedup / predicted,
            num_steps=model.num_steps,
            num_unmatched_steps=model.num_unmatched_steps,
        )

    # --- texts ------------------------------------------------------------------------------------------------

    def _identity(self) -> Identity:
        positions: dict[int, list[int]] = defaultdict(list)
        num_compared = 0
        for pair in self.pairs:
            for on, off in zip(self._chosen(pair.on), self._chosen(pair.off), strict=True):
                num_compared += 1
                position = first_difference(on.token_ids, off.token_ids)
                if position is not None:
                    positions[on.prompt].append(position)
        differences = [
            Difference(self.prompts[prompt].where, self.prompts[prompt].task, min(found), len(found))
            for prompt, found in sorted(positions.items())
        ]
        return Identity(
            num_compared=num_compared,
            num_identical=num_compared - sum(map(len, positions.values())),
            first_differing_token=min((difference.token for difference in differences), default=None),
            differences=differences,
        )


def _by_batch(runs: Iterable[BenchRun]) -> dict[int, list[BenchRun]]:
    batches: dict[int, list[BenchRun]] = defaultdict(list)
    for run in runs:
        batches[run.turn.batch].append(run)
    return batches


def _seconds_per_token(answers: Iterable[TimedAnswer]) -> Iterable[float]:
    """Seconds a token after the first, for each answer of two tokens or more."""
    for answer in answers:
        if len(answer.token_ids) > 1:
            decode_s = answer.metrics.total_s - answer.metrics.time_to_first_token_s
            yield decode_s / (len(answer.token_ids) - 1)


def _decode_s_per_token(answers: Seq[TimedAnswer]) -> float | None:
    """Seconds a token after the step that committed the first token."""
    seconds = sum(a.metrics.total_s - a.metrics.time_to_first_token_s for a in answers)
    return ratio(seconds, sum(len(a.token_ids) - a.num_first_tokens for a in answers))
