"""An advice from traffic to plan: record, measure costs, predict, choose, check."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import cycle

from slipstream.core.meter import Meter, meter
from slipstream.engine.labels import engine_labels
from slipstream.profiling.provenance import provenance
from slipstream.tools.advise.advice import Advice, LoadAdvice, TraceAdvice
from slipstream.tools.advise.candidates import OFF
from slipstream.tools.advise.check import CheckedSetting
from slipstream.tools.advise.costs import StepCosts
from slipstream.tools.advise.engines import CheckEngines, make_recording_engine
from slipstream.tools.advise.findings import find
from slipstream.tools.advise.job import AdviceJob, make_jobs
from slipstream.tools.advise.kept_parts import KeptParts
from slipstream.tools.advise.predict import AdvisedPlan, PredictedCell, Rates, make_plan, predict
from slipstream.tools.advise.recording import OnProgress, Recorded, record
from slipstream.tools.advise.scores import scores_of
from slipstream.tools.advise.served import as_mapping, speculative_of
from slipstream.tools.advise.shortlist import Shortlist
from slipstream.tools.advise.simulate import SimulatedCache, Simulator, always
from slipstream.tools.advise.step_costs import measure_costs
from slipstream.tools.bench.result import EMBEDDED

RECORDING_SHARE, COSTS_SHARE = 0.3, 0.2
"""Shares of the time; the rest is for the check."""
MAX_RECORDING = 8
"""Requests at once in the recording."""


def advise(job: AdviceJob) -> Advice:
    """The whole advice; its finished parts stay in the job's folder.

    Raises what loading raises, and `RequestError` for traffic that cannot be served.
    """
    started_s = time.perf_counter()
    kept = KeptParts(job.folder, job.key(), job.resume)
    with meter("advise", refreshes=False) as shown:
        work = AdviceWork(job, kept, shown)
        work.record()
        work.measure()
        work.plan()
        return work.advice(work.checked(), started_s)


class AdviceWork:
    """What an advice has found so far; the steps are made in order."""

    def __init__(self, job: AdviceJob, kept: KeptParts, shown: Meter) -> None:
        self.job, self._kept, self._meter = job, kept, shown
        self._started_s = time.perf_counter()
        self._begin("loading")
        self.engine = make_recording_engine(job)
        self.jobs = make_jobs(job, self.engine)
        self.recorded: Recorded
        self.costs: StepCosts
        self.simulator: Simulator
        self.rates: Rates
        self.shortlist: Shortlist
        self.wanted: AdvisedPlan
        """What is predicted to be best."""

    def record(self) -> None:
        """Answer the requests once, everything else drafting at the same time."""
        job = self.job
        at_once = min(MAX_RECORDING, max(job.loads), len(self.jobs))
        budget_s = RECORDING_SHARE * job.budget_s

        def make() -> object:
            made = record(self.engine, job.candidates, self.jobs, at_once, budget_s, self._shown("recording"))
            return made.as_json()

        self.recorded = self._kept.part("recording", Recorded, make)
        self.jobs = self.jobs[: len(self.recorded.requests)]

    def measure(self) -> None:
        """What steps and drafts take."""
        job = self.job
        batches = sorted({1, *job.loads})
        budget_s = COSTS_SHARE * job.budget_s

        def make() -> object:
            shown = self._shown("measuring costs")
            made = measure_costs(
                self.engine, job.candidates, self.recorded, job.params, batches, budget_s, shown
            )
            return made.as_json()

        self.costs = self._kept.part("costs", StepCosts, make)

    def plan(self) -> None:
        """What is predicted to be best."""
        job, model = self.job, self.engine.model
        self._begin("predicting")
        scores = scores_of(job.candidates, self.recorded, model.vocab_size, self.engine.max_model_len)
        self.simulator = Simulator(
            self.recorded.requests,
            job.candidates,
            scores,
            self.costs,
            self.engine.config.max_num_batched_tokens,
            self.engine.config.max_num_seqs,
            partial(SimulatedCache, self.engine.config.enable_prefix_caching, model.fast_prompts),
        )
        self.rates = Rates(self.simulator, self.recorded, job.candidates, self.costs)
        self.wanted = make_plan(self.rates, self.recorded.tasks, job.loads)
        self.shortlist = Shortlist(job.candidates, self.simulator, self.rates, self.recorded, self.wanted)

    def predicted(self) -> list[PredictedCell]:
        """All settings at all loads."""
        return [
            cell
            for load in self.job.loads
            for cell in predict(self.simulator, self.recorded, self.job.candidates, self.rates, load)
        ]

    def checked(self) -> list[LoadAdvice]:
        """What is advised at each load, measured unless the job says otherwise."""
        engines = CheckEngines(self.job, self.engine)
        return [self._checked(engines, load) for load in self.job.loads]

    def _checked(self, engines: CheckEngines, load: int) -> LoadAdvice:
        if not self.job.checks:
            return self.shortlist.decide(load, [])
        part = f"checking {load} at once"
        budget_s = (1 - RECORDING_SHARE - COSTS_SHARE) * self.job.budget_s / len(self.job.loads)

        def make() -> object:
            checked = self.shortlist.measure(engines, self.jobs, load, budget_s, self._shown(part))
            return [one.as_json() for one in checked]

        return self.shortlist.decide(load, self._kept.part(part, list[CheckedSetting], make))

    def _begin(self, part: str) -> None:
        self._meter.say(f"{time.perf_counter() - self._started_s:5.0f} s  {part} …")
        self._meter.show(0, 1, part)

    def _shown(self, part: str) -> OnProgress:
        self._begin(part)
        return lambda done, total: self._meter.show(done, max(total, 1), part)

    # --- the result -------------------------------------------------------------------------------------------

    def advice(self, loads: list[LoadAdvice], started_s: float) -> Advice:
        """The result; what was measured decides for the loads nearest to it."""
        job, recorded, decisions = self.job, self.recorded, self.shortlist.decisions
        plan = make_plan(
            self.rates, recorded.tasks, job.loads, decisions.settings, by_task=decisions.keeps_tasks
        )
        return Advice(
            provenance=provenance(num_threads=job.engine_options.get("num_threads")),
            model=job.model or EMBEDDED,
            labels=[f"the target runs as {self.engine.model.runs_as}", *engine_labels(self.engine)],
            traffic=job.requests.workload.source,
            num_requests=dict(Counter(request.task for request in recorded.requests)),
            num_asked=recorded.num_asked,
            max_tokens=job.max_tokens,
            sampling={"temperature": job.params.temperature, "seed": job.params.seed},
            candidates=job.candidates,
            plan=plan,
            speculative=as_mapping(speculative_of(plan, job.candidates)),
            loads=loads,
            predicted=self.predicted(),
            findings=find(self.rates, job.candidates, self.costs, recorded, plan, job.loads),
            trace=self.traced(plan),
            notes=[*job.requests.notes, *self._notes()],
            wall_s=time.perf_counter() - started_s,
        )

    def _notes(self) -> Iterable[str]:
        number, most = len(self.recorded.requests), max(self.job.loads)
        if number < self.recorded.num_asked:
            yield (
                f"the time was up after {number} of {self.recorded.num_asked} requests; "
                "--minutes gives more of it"
            )
        strange = sorted({one.task for one in self.job.requests.trace} - set(self.recorded.tasks))
        if strange:
            yield (
                f"no prompt of {len(strange)} of the trace's tasks was recorded ({', '.join(strange[:4])}): their "
                "requests are predicted with texts of other tasks"
            )
        if number < most:
            yield f"{number} requests cannot keep {most} running at once; --prompts-per-task gives more"

    def traced(self, plan: AdvisedPlan) -> TraceAdvice | None:
        """The trace as it would be served, with the recorded texts of each request's task in turns."""
        trace = self.job.requests.trace
        if not trace:
            return None
        everybody = cycle(self.recorded.of(None))
        by_task = {task: cycle(self.recorded.of(task)) for task in self.recorded.tasks}
        coming = [(next(by_task.get(one.task, everybody)), one.arrival_s) for one in trace]
        off = self.simulator.arrivals(coming, always(OFF), [])
        own = self.simulator.arrivals(coming, plan.choose)
        return TraceAdvice(
            num_requests=len(trace),
            duration_s=trace[-1].arrival_s,
            mean_in_flight=off.in_flight_s / off.busy_s if off.busy_s else 0.0,
            busy_share=off.busy_s / off.wall_s if off.wall_s else 0.0,
            latency_off_s=statistics.median(one.total_s for one in off.requests),
            latency_s=statistics.median(one.total_s for one in own.requests),
            goodput_off=off.goodput,
            goodput=own.goodput,
        )
