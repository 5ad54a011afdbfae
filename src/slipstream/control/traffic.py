"""What is known of the requests and their tasks: acceptance of each drafter, the text that it has computed, lengths of
answers, recent use, and so what each drafter could do for them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.control.acceptance import Acceptance, Drafts, LookupYield, length_class
from slipstream.control.cost import DraftCost, Mean, TextSeen
from slipstream.control.optimise import Curve, LookupCurve, Row
from slipstream.control.types import MAX_TASKS, NO_DRAFTER, MethodReport, PolicyDrafter, StepRequest
from slipstream.core.bounded import BoundedDict

FIRST_LENGTH = 64.0
"""Tokens of an answer before any has ended."""
MAX_UNLEARNED = 64
"""Outcomes that are kept before they are worked in."""


@dataclass(slots=True)
class TaskUse:
    """What a task's requests were given recently."""

    depth: Mean = field(default_factory=Mean)
    tokens: Mean = field(default_factory=Mean)
    length: Mean = field(default_factory=Mean)
    """Tokens of an answer."""
    num_requests: int = 0
    """Requests that have ended."""


class Traffic:
    """Outcomes are kept as they come, which is quick, and worked in together by `learn`."""

    def __init__(self, drafters: Seq[PolicyDrafter]) -> None:
        self.acceptance = [Acceptance(each.max_depth) for each in drafters]
        self.lookups = {number: LookupYield() for number, each in enumerate(drafters) if each.looks_up}
        self.seen = [TextSeen() for _ in drafters]
        self._drafters = tuple(drafters)
        self._tasks = BoundedDict[str, TaskUse](MAX_TASKS)
        self._length = Mean()
        self._num_steps = [0] * len(drafters)
        self._outcomes: list[StepRequest] = []
        self._gone: list[int] = []
        """Requests that are over, of which there may be outcomes still."""

    def keep(self, outcomes: Seq[StepRequest]) -> None:
        """What a step made of its requests."""
        self._outcomes.extend(outcomes)

    def release(self, sequence_id: int, task: str, num_tokens: int | None) -> None:
        """The request is over, after `num_tokens` of answer; None where it will come back."""
        if num_tokens:
            self._length.learn(float(num_tokens))
            use = self._tasks.touch(task, TaskUse)
            use.length.learn(float(num_tokens))
            use.num_requests += 1
        self._gone.append(sequence_id)
        for seen in self.seen:
            seen.release(sequence_id)

    @property
    def has_much_to_learn(self) -> bool:
        return len(self._outcomes) >= MAX_UNLEARNED or len(self._gone) >= MAX_UNLEARNED

    def learn(self) -> bool:
        """Work in what was only kept so far; True where the acceptance of some drafter has changed."""
        drafts: dict[tuple[int, int, str], Drafts] = {}
        lengths: dict[int, int] = {}
        for outcome in self._outcomes:
            drafter, lookup = outcome.drafter, outcome.lookup
            if drafter != NO_DRAFTER:
                key = drafter, outcome.sequence_id, outcome.task
                if key not in drafts:
                    drafts[key] = Drafts()
                lengths[outcome.sequence_id] = outcome.length
                drafts[key].add(outcome.num_checked, outcome.num_reached, outcome.num_accepted)
                self._num_steps[drafter] += 1
            if lookup in self.lookups:
                found = (outcome.num_checked, outcome.num_accepted) if drafter == lookup else (0, 0)
                self.lookups[lookup].learn(outcome.task, *found)
            use = self._tasks.touch(outcome.task, TaskUse)
            use.depth.learn(float(outcome.num_checked))
            use.tokens.learn(float(outcome.num_tokens))
        has_changed = False
        for (drafter, sequence_id, task), each in drafts.items():
            has_changed |= self.acceptance[drafter].learn(sequence_id, task, each, lengths[sequence_id])
        self._outcomes = []
        for sequence_id in self._gone:
            for acceptance in self.acceptance:
                acceptance.release(sequence_id)
        self._gone = []
        return has_changed

    def usual_length(self, task: str) -> float:
        """Tokens of an answer, in the mean."""
        use = self._tasks.get(task)
        length = use.length if use is not None and use.length.weight else self._length
        return length.value if length.weight else FIRST_LENGTH

    def rows(self, requests: Seq[StepRequest], usable: Seq[int], draft_costs: Seq[DraftCost]) -> list[Row]:
        """What `usable` drafters and lookups could do for each request; requests of which nothing is known share what
        their task's may expect."""
        shared: dict[tuple[int, str, int, int, int], Curve] = {}
        lookups: dict[str, dict[int, LookupCurve]] = {}
        rows = []
        for request in requests:
            task, limit, allowed = request.task, request.limit, request.allowed
            curves: dict[int, Curve] = {}
            for number in usable:
                if limit < 1 or (allowed is not None and number not in allowed):
                    continue
                missing = self.seen[number].num_missing(request.sequence_id, request.length)
                known = self.acceptance[number]
                key = number, task, limit, missing, length_class(request.length)
                is_known = known.knows(request.sequence_id)
                curve = None if is_known else shared.get(key)
                if curve is None:
                    entry_s = missing * draft_costs[number].missed_token_s / self._steps_left(request)
                    traits = self._drafters[number]
                    curve = Curve.of(traits, known, request, entry_s)
                    if not is_known:
                        shared[key] = curve
                curves[number] = curve
            if task not in lookups:
                lookups[task] = {n: LookupCurve.of(known, task) for n, known in self.lookups.items()}
            found = lookups[task] if limit > 0 else {}
            if allowed is not None:
                found = {number: curve for number, curve in found.items() if number in allowed}
            rows.append(Row(curves, found))
        return rows

    def _steps_left(self, request: StepRequest) -> float:
        """A careful estimate: answers are as long as those of their task, and steps yield a token and a half."""
        usual = self.usual_length(request.task)
        return max(usual - request.num_output, 0.25 * usual, 4.0) / 1.5

    @property
    def num_held(self) -> int:
        """Requests of which something is remembered, once `learn` has worked all in."""
        return max(*(each.num_held for each in self.acceptance), *map(len, self.seen))

    def tasks(self) -> Iterator[tuple[str, TaskUse]]:
        """Those that have had steps, the latest last."""
        return ((task, use) for task, use in self._tasks.items() if use.tokens.weight)

    def method_reports(self, num_failures: Seq[int], retired: Seq[bool]) -> Iterator[MethodReport]:
        """One a drafter; the arguments are by drafter, or empty."""
        for number, traits in enumerate(self._drafters):
            yield MethodReport(
                name=traits.name,
                acceptance_rate=self.acceptance[number].rate(),
                survival=tuple(self.acceptance[number].survival(-1, "")) if traits.is_chain else (),
                num_steps=self._num_steps[number],
                num_failures=num_failures[number] if num_failures else 0,
                retired=retired[number] if retired else False,
            )
