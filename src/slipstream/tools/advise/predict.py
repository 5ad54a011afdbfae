"""Predicts goodput by setting, load and task, and chooses a plan from it.

Every figure is of counted steps and measured costs. No formula of acceptance takes part in a choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.tools.advise.candidates import OFF, Candidate, Setting, setting_name, settings
from slipstream.tools.advise.costs import StepCosts
from slipstream.tools.advise.recording import Recorded
from slipstream.tools.advise.simulate import Simulated, Simulator, always

MIN_GAIN = 1.02
"""Less is not worth a drafter: noise decides, and it takes memory."""
KEPT_RATE = 0.99
"""A setting is kept from one load to the next while it makes this share of the best one's rate."""
MIN_TASK_GAIN = 1.03
"""By which a task's own setting must be better than everybody's, to have rules of its own."""
FAR_GAIN = 1.1
"""At the largest measured load, for a setting to be kept beyond it."""


@dataclass(frozen=True, slots=True)
class PredictedCell:
    """What a setting is predicted to do at one load, for all tasks or one."""

    setting: str
    concurrency: int
    task: str | None
    goodput: float
    """Tokens a second."""
    speedup: float
    """Over off."""
    tau: float
    """Tokens a step of a request, the target's own included."""
    acceptance_rate: float | None
    """Accepted over drafted tokens (pooled)."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a setting's steps came to on a recording."""

    tokens_per_step: float
    """τ."""
    drafted_per_step: float
    accepted_per_step: float
    """More than τ - 1 where answers end at an accepted token: none of the target's own comes behind it."""
    levels: float
    """Requested of the drafter in each step."""


class Rates:
    """Tokens a second of any number of requests of a task that run at once, steadily."""

    def __init__(
        self, simulator: Simulator, recorded: Recorded, candidates: Seq[Candidate], costs: StepCosts
    ) -> None:
        self._simulator, self._recorded = simulator, recorded
        self._candidates, self._costs = candidates, costs
        self._counts: dict[tuple[Setting, str | None], StepCounts] = {}

    def counts(self, setting: Setting, task: str | None) -> StepCounts:
        """Return the counts of a task's requests, one after another; None is all tasks."""
        key = setting, task
        if key not in self._counts:
            used = [] if setting.is_off else [setting.candidate]
            done = self._simulator.closed_loop(self._recorded.of(task), 1, always(setting), used)
            steps = max(done.num_request_steps, 1)
            drafted, accepted = done.num_drafted / steps, done.num_accepted / steps
            self._counts[key] = StepCounts(done.tau, drafted, accepted, setting.depth or max(drafted, 1.0))
        return self._counts[key]

    def step_s(self, setting: Setting, task: str | None, number: float) -> float:
        """Seconds of a step of `number` requests, as often and as deep as they were drafted for."""
        counts = self.counts(setting, task)
        checked, accepted = number * counts.drafted_per_step, number * counts.accepted_per_step
        seconds = self._costs.step_s(number, checked, accepted)
        if not setting.is_off:
            name = self._candidates[setting.candidate].name
            seconds += self._costs.draft_s(name, number, counts.levels)
        return seconds

    def full_step_s(self, setting: Setting, task: str | None, number: float) -> float:
        """Seconds of a step in which each of `number` requests has a chain as deep as the setting drafted and checked.

        `step_s` is less where the drafter often has nothing to say.
        """
        accepted = number * self.counts(setting, task).accepted_per_step
        name = self._candidates[setting.candidate].name
        checking_s = self._costs.step_s(number, number * setting.depth, accepted)
        return checking_s + self._costs.draft_s(name, number, setting.depth)

    def rate(self, setting: Setting, task: str | None, number: float) -> float:
        """Tokens a second."""
        return number * self.counts(setting, task).tokens_per_step / self.step_s(setting, task, number)

    def gain(self, setting: Setting, task: str | None, number: float) -> float:
        """Return the gain over off."""
        return self.rate(setting, task, number) / self.rate(OFF, task, number)

    def ranked(self, task: str | None, number: float) -> list[Setting]:
        """All settings, off included, the fastest first."""
        every = [OFF, *settings(self._candidates)]
        return sorted(every, key=lambda setting: -self.rate(setting, task, number))


def predict(
    simulator: Simulator, recorded: Recorded, candidates: Seq[Candidate], rates: Rates, concurrency: int
) -> list[PredictedCell]:
    """Every setting at one load: all tasks in a closed loop, then task by task at that load."""
    found: list[PredictedCell] = []
    off: Simulated | None = None
    for setting in [OFF, *settings(candidates)]:
        used = [] if setting.is_off else [setting.candidate]
        done = simulator.closed_loop(recorded.of(None), concurrency, always(setting), used)
        off = off or done
        name = setting_name(setting, candidates)
        speedup = done.goodput / off.goodput if off.goodput else 1.0
        found.append(
            PredictedCell(name, concurrency, None, done.goodput, speedup, done.tau, done.acceptance_rate)
        )
        if len(recorded.tasks) > 1:
            found += _by_task(setting, name, recorded, rates, concurrency)
    return found


def _by_task(
    setting: Setting, name: str, recorded: Recorded, rates: Rates, concurrency: int
) -> Iterator[PredictedCell]:
    for task in recorded.tasks:
        counts = rates.counts(setting, task)
        drafted = counts.drafted_per_step
        yield PredictedCell(
            name,
            concurrency,
            task,
            rates.rate(setting, task, concurrency),
            rates.gain(setting, task, concurrency),
            counts.tokens_per_step,
            counts.accepted_per_step / drafted if drafted else None,
        )


@dataclass(frozen=True, slots=True)
class Band:
    """What is done up to a number of requests at once."""

    max_requests: int | None
    """None is any number."""
    setting: Setting
    gain: float
    """Predicted over off, at the band's first load."""


@dataclass(frozen=True)
class AdvisedPlan:
    """Settings by task and load. A task without bands of its own has those of None."""

    bands: Mapping[str | None, tuple[Band, ...]]

    def choose(self, task: str, number: int) -> Setting:
        """For a task's request in a step of `number` requests that decode."""
        for band in self.bands.get(task, self.bands[None]):
            if band.max_requests is None or number <= band.max_requests:
                return band.setting
        return OFF

    @property
    def is_off(self) -> bool:
        """True where nothing is ever drafted."""
        return all(band.setting.is_off for bands in self.bands.values() for band in bands)

    def as_json(self, candidates: Seq[Candidate]) -> list[dict[str, Any]]:
        """One object a band."""
        return [
            {
                "task": task,
                "max_requests": band.max_requests,
                "setting": setting_name(band.setting, candidates),
                "predicted_speedup": round(band.gain, 3),
            }
            for task, bands in self.bands.items()
            for band in bands
        ]


def make_plan(
    rates: Rates,
    tasks: Seq[str],
    loads: Seq[int],
    decided: Mapping[int, Setting] | None = None,
    by_task: bool = True,
) -> AdvisedPlan:
    """The plan for loads up to the largest of `loads`, those whose costs were measured.

    `decided` are settings that a measurement has decided, by load; they hold for the loads nearest to theirs.
    """
    decided = decided or {}
    bands: dict[str | None, tuple[Band, ...]] = {None: tuple(_bands(rates, None, loads, decided))}
    if by_task and len(tasks) > 1:
        everybody = AdvisedPlan({None: bands[None]})
        for task in tasks:
            own = tuple(_bands(rates, task, loads, {}))
            gains = [
                rates.rate(AdvisedPlan({None: own}).choose(task, load), task, load)
                / rates.rate(everybody.choose(task, load), task, load)
                for load in loads
            ]
            if max(gains, default=1.0) >= MIN_TASK_GAIN:
                bands[task] = own
    return AdvisedPlan(bands)


def _bands(rates: Rates, task: str | None, loads: Seq[int], decided: Mapping[int, Setting]) -> Iterator[Band]:
    """Equal neighbours as one band."""
    current: Setting | None = None
    gain = 1.0
    for number in range(1, max(loads) + 1):
        setting = _at(rates, task, number, current, loads, decided)
        if current is not None and setting != current:
            yield Band(number - 1, current, gain)
        if setting != current:
            current, gain = setting, rates.gain(setting, task, number)
    assert current is not None
    last = max(loads)
    if current.is_off or rates.gain(current, task, last) >= FAR_GAIN:
        yield Band(None, current, gain)
    else:
        yield Band(last, current, gain)
        yield Band(None, OFF, 1.0)


def _at(
    rates: Rates,
    task: str | None,
    number: int,
    before: Setting | None,
    loads: Seq[int],
    decided: Mapping[int, Setting],
) -> Setting:
    nearest = min(loads, key=lambda load: abs(load - number) / (load + number))
    if nearest in decided:
        return decided[nearest]
    best = rates.ranked(task, number)[0]
    if rates.gain(best, task, number) < MIN_GAIN:
        return OFF
    if before is not None and not before.is_off:
        kept = rates.rate(before, task, number) >= KEPT_RATE * rates.rate(best, task, number)
        return before if kept else best
    return best
