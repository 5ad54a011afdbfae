"""Which settings are measured at each load, and what predictions and measurements together decide."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.config import SpeculativeConfig
from slipstream.engine.closed_loop import BenchJob
from slipstream.tools.advise.advice import LoadAdvice
from slipstream.tools.advise.candidates import OFF, Candidate, Setting, setting_name
from slipstream.tools.advise.check import CheckedSetting, ShortlistedSetting, check
from slipstream.tools.advise.engines import CheckEngines
from slipstream.tools.advise.predict import MIN_GAIN, AdvisedPlan, Rates
from slipstream.tools.advise.recording import OnProgress, Recorded
from slipstream.tools.advise.served import speculative_of
from slipstream.tools.advise.simulate import Simulator, always

NUM_RANKED = 8
"""Settings with the best steady rates, which closed loops rank."""
MIN_RIVAL_GAIN = 1.01
"""By which the runner-up must be faster to take the place of what was predicted to be best."""
BY_TASK = "by task"
"""Name of the plan with settings of their own for some tasks."""


@dataclass(slots=True)
class Decided:
    """What is decided at each load, by prediction and, where there is one, measurement."""

    settings: dict[int, Setting] = field(default_factory=dict)
    """By load."""
    is_measured: bool = False
    by_task: list[float] = field(default_factory=list)
    """Speed of the plan with settings by task over what else would be done, at each measured load where they differ."""

    @property
    def keeps_tasks(self) -> bool:
        """True where settings by task are found no slower, or nothing was measured."""
        return not self.is_measured or (bool(self.by_task) and sum(map(math.log, self.by_task)) >= 0)


class Shortlist:
    """Off, what is predicted to be best, and the best of another drafter, at each load."""

    def __init__(
        self,
        candidates: Seq[Candidate],
        simulator: Simulator,
        rates: Rates,
        recorded: Recorded,
        plan: AdvisedPlan,
    ) -> None:
        self._candidates, self._simulator, self._rates = candidates, simulator, rates
        self._recorded, self._plan = recorded, plan
        self.decisions = Decided()

    def settings_at(self, load: int) -> tuple[Setting, Setting]:
        """What is predicted to be best for all tasks together, and the best of another drafter.

        Where off is predicted to be best, what comes next is measured all the same. Closed loops rank the settings
        with the best steady rates, which do not know of beginnings and ends.
        """
        places = self._recorded.of(None)

        def goodput(setting: Setting) -> float:
            done = self._simulator.closed_loop(places, load, always(setting), [setting.candidate])
            return done.goodput

        steady = [setting for setting in self._rates.ranked(None, load) if not setting.is_off]
        ranked = sorted(steady[:NUM_RANKED], key=lambda setting: -goodput(setting))
        best = ranked[0]
        others = [one for one in (*ranked, *steady) if one.candidate != best.candidate]
        return best, others[0] if others else ranked[-1]

    def measure(
        self,
        engines: CheckEngines,
        jobs: Seq[BenchJob],
        load: int,
        budget_s: float,
        on_progress: OnProgress,
    ) -> list[CheckedSetting]:
        """The check at one load."""
        chosen = dict.fromkeys([OFF, *self.settings_at(load)])
        shortlisted = [self._shortlisted(engines, setting) for setting in chosen]
        if self._differs(load):
            shortlisted.append(self._shortlisted_plan(engines))
        return check(shortlisted, jobs, load, budget_s, on_progress)

    def decide(self, load: int, checked: Seq[CheckedSetting]) -> LoadAdvice:
        """What is advised at a load; `checked` is empty where nothing is measured."""
        best, rival = self.settings_at(load)
        if not checked:
            setting = best if self._rates.gain(best, None, load) >= MIN_GAIN else OFF
        else:
            setting = self._faster(best, rival, checked)
            self.decisions.is_measured = True
            self._note_tasks(checked)
        self.decisions.settings[load] = setting
        gain = 1.0 if setting.is_off else self._rates.gain(setting, None, load)
        return LoadAdvice(load, setting_name(setting, self._candidates), gain, tuple(checked))

    def _faster(self, best: Setting, rival: Setting, checked: Seq[CheckedSetting]) -> Setting:
        """The faster of the two, prediction and measurement weighed; off where neither gains enough."""
        speedups = {one.name: one.weighed_speedup or 1.0 for one in checked}
        of_best = speedups.get(setting_name(best, self._candidates), 0.0)
        of_rival = speedups.get(setting_name(rival, self._candidates), 0.0)
        if of_rival > MIN_RIVAL_GAIN * of_best:
            best, of_best = rival, of_rival
        return best if of_best >= MIN_GAIN else OFF

    def _note_tasks(self, checked: Seq[CheckedSetting]) -> None:
        """Settings by task must be faster than what is best for all tasks, and gain enough over off."""
        speedups = {one.name: one.weighed_speedup for one in checked}
        own = speedups.pop(BY_TASK, None)
        if own is not None:
            others = [speedup for speedup in speedups.values() if speedup is not None]
            self.decisions.by_task.append(own / max([MIN_GAIN, *others]))

    def _differs(self, load: int) -> bool:
        """True where some task has a setting of its own at this load."""
        common = self._plan.choose("", load)
        return any(self._plan.choose(task, load) != common for task in self._recorded.tasks)

    def _shortlisted(self, engines: CheckEngines, setting: Setting) -> ShortlistedSetting:
        config = SpeculativeConfig() if setting.is_off else self._candidates[setting.candidate].speculative
        name = "off" if setting.is_off else self._candidates[setting.candidate].name
        used = [] if setting.is_off else [setting.candidate]
        choose = always(setting)
        return ShortlistedSetting(
            name=setting_name(setting, self._candidates),
            engine=lambda: engines.get(name, config),
            max_draft_tokens=setting.depth or None,
            predicted_s=lambda places, load: self._simulator.closed_loop(places, load, choose, used).wall_s,
        )

    def _shortlisted_plan(self, engines: CheckEngines) -> ShortlistedSetting:
        """The plan as a server would run it."""
        config = speculative_of(self._plan, self._candidates)
        return ShortlistedSetting(
            name=BY_TASK,
            engine=lambda: engines.get(BY_TASK, config),
            max_draft_tokens=None,
            predicted_s=lambda places, load: (
                self._simulator.closed_loop(places, load, self._plan.choose).wall_s
            ),
        )
