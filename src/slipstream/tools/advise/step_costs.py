"""Measures what steps and drafts take: steps of the engine itself, of chosen sizes, on the recorded prompts.

Kinds of steps take turns, so that a machine that becomes slower or faster meanwhile favours none.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from slipstream.core.metrics.step import StepReport
from slipstream.core.request import RequestOptions
from slipstream.engine.engine import Engine
from slipstream.errors import RequestError
from slipstream.models import CausalLM
from slipstream.profiling.pass_times import time_passes
from slipstream.profiling.profile import isotonic
from slipstream.sampling.params import SamplingParams
from slipstream.tools.advise.candidates import Candidate
from slipstream.tools.advise.costs import DrafterCost, Points, StepCosts
from slipstream.tools.advise.recording import OnProgress, Recorded, RecordedRequest
from slipstream.tools.advise.recording_drafter import RecordingDrafter, ReplayedStep

CHECKED = (1, 2, 4, 8, 16)
"""Draft tokens a request, checked without a drafter's call."""
STEPS_A_TURN = 3
"""Steps of one kind in a row; the first pays for what the step before it left, and is not counted."""
MIN_ROUNDS = 2
MAX_ROUNDS = 12
MAX_BEGUN = 3
"""Batches of requests that are begun without one step of all of them at once."""
MIN_LENGTH = 192
"""Tokens of a replayed answer, at least: each begins with a prompt."""
CONTEXTS = (32, 544)
"""Tokens of context between which the cost of a longer one is measured."""


class Kind(NamedTuple):
    """A kind of step."""

    member: int
    levels: int
    num_checked: int


@dataclass(frozen=True, slots=True)
class StepSample:
    """One timed step in which only decoding requests took part."""

    batch: int
    checked: int
    accepted: int
    context: float
    seconds: float
    """Without drafting."""


class Samples:
    """All timed steps."""

    def __init__(self) -> None:
        self.steps: list[StepSample] = []
        self.drafts: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        """(member, batch, levels) to seconds."""
        self.prompts: list[tuple[int, int, float]] = []
        """(requests, rows besides one of each, seconds without drafting) of steps that computed prompts."""
        self.draft_prompts: dict[int, list[tuple[int, float]]] = defaultdict(list)
        """Member to (prompt rows, seconds)."""


def measure_costs(
    engine: Engine,
    candidates: Seq[Candidate],
    recorded: Recorded,
    params: SamplingParams,
    batches: Seq[int],
    budget_s: float,
    on_progress: OnProgress,
) -> StepCosts:
    """The costs of an engine whose drafter is a `RecordingDrafter` of the candidates, for requests with `params`.

    `batches` are the numbers of requests at once. Takes about `budget_s`, more where two rounds of each take more.
    Raises `RequestError` where so many never run at once.
    """
    drafter = engine.drafter_as(RecordingDrafter)
    samples = Samples()
    for done, batch in enumerate(batches):
        on_progress(done, len(batches))
        kinds = _kinds(candidates, drafter)
        _TimedReplays(engine, drafter, recorded, params, batch, samples).run(kinds, budget_s / len(batches))
    on_progress(len(batches), len(batches))
    drafter.replay = None
    engine.reset_caches()
    return fitted(samples, [candidate.name for candidate in candidates], context_cost(engine.model))


def context_cost(model: CausalLM) -> float:
    """Seconds that a token of context adds to a pass of one row."""
    short, long = (min(context, model.context_length // 2) for context in CONTEXTS)
    if long <= short:
        return 0.0
    times_s = [time_passes(model, (1,), context, 0.5)[1] for context in (short, long)]
    return max(times_s[1] - times_s[0], 0.0) / (long - short)


def _kinds(candidates: Seq[Candidate], drafter: RecordingDrafter) -> list[Kind]:
    """Steps without drafts come several times in a round: everything is compared with them."""
    room = drafter.traits.max_nodes
    found = [Kind(-1, 0, checked) for checked in CHECKED if checked <= room]
    for number, candidate in enumerate(candidates):
        most = drafter.members[number].drafter.traits.max_nodes
        levels = candidate.depths if candidate.depths != (0,) else (most,)
        ends = {levels[0], levels[len(levels) // 2], levels[-1]}
        found += [Kind(number, level, level) for level in sorted(ends)]
    every = max(len(found) // 3, 1)
    mixed: list[Kind] = []
    for place, kind in enumerate(found):
        mixed += [Kind(-1, 0, 0), kind] if place % every == 0 else [kind]
    return mixed


class _TimedReplays:
    """Replays steps at one number of requests at once."""

    def __init__(
        self,
        engine: Engine,
        drafter: RecordingDrafter,
        recorded: Recorded,
        params: SamplingParams,
        batch: int,
        samples: Samples,
    ) -> None:
        self._engine, self._drafter, self._batch, self._samples = engine, drafter, batch, samples
        self._params = params
        self._requests = itertools.cycle([one for one in recorded.requests if one.num_output])
        self._reports: list[StepReport] = []
        self._names = itertools.count()

    def run(self, kinds: Seq[Kind], budget_s: float) -> None:
        """Rounds over all kinds until the time is up."""
        started_s = time.perf_counter()
        order = self._order(kinds, started_s, budget_s)
        self._engine.on_step = self._reports.append
        open_: list[str] = []
        begun = 0
        try:
            for kind, right in order:
                for repeat in range(STEPS_A_TURN):
                    if not open_ or not all(self._engine.is_unfinished(name) for name in open_):
                        self._end(open_)
                        if begun == MAX_BEGUN:
                            self._check_together()
                        open_, begun = self._begin(), begun + 1
                    self._step(kind, right, counts=repeat > 0)
        finally:
            self._engine.on_step = None
            self._end(open_)
        self._check_together()

    def _check_together(self) -> None:
        """Raise `RequestError` unless some step of all requests was timed."""
        if all(one.batch != self._batch for one in self._samples.steps):
            raise RequestError(
                f"{self._batch} requests never ran at once, so their steps could not be measured: the cache has room "
                f"for {self._engine.memory_plan.num_slots:,} tokens; give a larger --kv-cache-bytes or a smaller "
                "--concurrency"
            )

    def _order(self, kinds: Seq[Kind], started_s: float, budget_s: float) -> Iterator[tuple[Kind, bool]]:
        for turn in range(MAX_ROUNDS):
            if turn >= MIN_ROUNDS and time.perf_counter() - started_s > budget_s:
                return
            for place, kind in enumerate(kinds if turn % 2 == 0 else kinds[::-1]):
                yield kind, (turn + place) % 2 == 0

    def _begin(self) -> list[str]:
        """Add as many requests as run at once, and compute their prompts."""
        names: list[str] = []
        self._engine.reset_caches()
        self._drafter.texts = {}
        for _ in range(self._batch):
            request = next(self._requests)
            name = str(next(self._names))
            self._drafter.texts[name] = request.output_token_ids
            self._engine.add_request(
                name, request.prompt_token_ids, self._params_of(request), RequestOptions()
            )
            names.append(name)
        self._drafter.replay = ReplayedStep()
        while True:
            self._engine.step()
            report = self._reports[-1]
            if report.only_decodes and report.num_sequences == self._batch:
                return names
            extra = report.num_rows - report.num_sequences
            self._samples.prompts.append((report.num_sequences, extra, report.verify_s + report.other_s))
            for member, seconds in self._drafter.times.prompt_seconds.items():
                self._samples.draft_prompts[member].append((extra, seconds))
            if not all(self._engine.is_unfinished(name) for name in names):
                return names

    def _params_of(self, request: RecordedRequest) -> SamplingParams:
        room = self._engine.max_model_len - len(request.prompt_token_ids)
        length = max(min(room, max(request.num_output, MIN_LENGTH)), 1)
        return replace(self._params, seed=request.seed, max_tokens=length, ignore_eos=True)

    def _step(self, kind: Kind, right: bool, counts: bool) -> None:
        member, levels, num_checked = kind
        self._drafter.replay = ReplayedStep(member, levels, num_checked, right)
        updates = self._engine.step()
        report, times = self._reports[-1], self._drafter.times
        whole = report.num_draft_tokens == num_checked * self._batch
        if not counts or not report.only_decodes or report.num_sequences != self._batch or not whole:
            return
        accepted = sum(len(update.token_ids) for update in updates) - len(updates)
        context = report.num_context_tokens / self._batch
        seconds = report.verify_s + report.other_s
        self._samples.steps.append(
            StepSample(self._batch, report.num_draft_tokens, accepted, context, seconds)
        )
        if member >= 0 and times.num_sequences == self._batch:
            self._samples.drafts[member, self._batch, levels].append(times.seconds)

    def _end(self, names: Seq[str]) -> None:
        for name in names:
            self._engine.abort(name)


# --- from samples to costs --------------------------------------------------------------------------------------


def fitted(samples: Samples, names: Seq[str], context_s: float) -> StepCosts:
    """Medians of each kind of step, monotone in what is checked; what was accepted is taken out first."""
    contexts = {
        batch: statistics.fmean(one.context for one in samples.steps if one.batch == batch)
        for batch in {one.batch for one in samples.steps}
    }
    even = [
        replace(one, seconds=one.seconds - context_s * one.batch * (one.context - contexts[one.batch]))
        for one in samples.steps
    ]
    accepted_s = _accepted_cost(even)
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in even:
        groups[one.batch, one.checked].append(one.seconds - accepted_s * one.accepted)
    steps: dict[int, Points] = {}
    for batch in sorted(contexts):
        sizes = sorted(checked for number, checked in groups if number == batch)
        medians = isotonic([statistics.median(groups[batch, checked]) for checked in sizes])
        steps[batch] = tuple(zip(map(float, sizes), medians, strict=True))
    costs = StepCosts(steps, contexts, accepted_s, context_s, (), {})
    drafters = {name: _drafter_cost(number, samples) for number, name in enumerate(names)}
    return replace(costs, prompts=_prompt_points(samples, costs), drafters=drafters)


def _accepted_cost(steps: Seq[StepSample]) -> float:
    """Seconds of an accepted token: within steps of the same size, those that accepted more took longer."""
    groups: dict[tuple[int, int], list[StepSample]] = defaultdict(list)
    for one in steps:
        groups[one.batch, one.checked].append(one)
    rows: list[tuple[float, float]] = []
    for group in groups.values():
        usual = statistics.median(one.seconds for one in group)
        mean = statistics.fmean(one.accepted for one in group)
        rows += [
            ((one.accepted - mean) / usual, (one.seconds - usual) / usual)
            for one in group
            if 0.5 * usual < one.seconds < 2 * usual
        ]
    if not rows:
        return 0.0
    x: NDArray[np.float64] = np.array([[a] for a, _ in rows])
    [slope], _ = nnls(x, np.array([b for _, b in rows]))
    return float(slope)


def _drafter_cost(member: int, samples: Samples) -> DrafterCost:
    by_batch: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (number, batch, deep), seconds in samples.drafts.items():
        if number == member:
            by_batch[batch].append((deep, statistics.median(seconds)))
    levels: dict[int, Points] = {}
    for batch, found in by_batch.items():
        found.sort()
        monotone = isotonic([each_s for _, each_s in found])
        levels[batch] = tuple(
            (float(deep), each_s) for (deep, _), each_s in zip(found, monotone, strict=True)
        )
    rows = [(number, row_s) for number, row_s in samples.draft_prompts[member] if number > 0]
    total = sum(number for number, _ in rows)
    return DrafterCost(levels, sum(row_s for _, row_s in rows) / total if total else 0.0)


def _prompt_points(samples: Samples, costs: StepCosts) -> Points:
    """What rows of prompts add to a step of the decoding requests alone."""
    found: dict[int, list[float]] = defaultdict(list)
    for number, rows, seconds in samples.prompts:
        if rows > 0:
            found[rows].append(max(seconds - costs.step_s(number), 0.0))
    places = sorted(found)
    monotone = isotonic([statistics.median(found[rows]) for rows in places])
    return tuple(zip(map(float, places), monotone, strict=True)) or ((1.0, 0.0),)
