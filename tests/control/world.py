"""A simulated engine for the policy: acceptance and costs are known, time is counted and nothing is computed.

What a choice is worth is known too, so that a run is judged by the tokens that its choices were expected to yield, and
not by the luck of the draw; the controller sees the draws, and noisy times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.control.policy import Policy
from slipstream.control.report import control_report
from slipstream.control.types import (
    NO_DRAFTER,
    Choice,
    ControlReport,
    DraftCall,
    PolicyDrafter,
    StepRequest,
)

PLAN_S = 2e-4
"""Seconds between two looks at the clock: what a search takes."""


class FakeClock:
    """Moves on by the same time at every look."""

    def __init__(self, tick_s: float = PLAN_S) -> None:
        self.tick_s, self.now_s = tick_s, 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


@dataclass(frozen=True)
class Machine:
    """Seconds of a target pass: the weights are read in `read_s`, and from some row on a row takes `row_s`."""

    read_s: float = 0.020
    row_s: float = 0.002
    other_s: float = 0.001
    slot_s: float = 0.0001
    """Seconds of each sequence, beside its row."""

    def pass_s(self, rows: float) -> float:
        return max(self.read_s + 0.05 * self.row_s * rows, 0.6 * self.read_s + self.row_s * rows)

    def step_s(self, num_sequences: int, rows: float) -> float:
        return self.other_s + self.slot_s * num_sequences + self.pass_s(rows)


@dataclass(frozen=True)
class Simulated:
    """A drafter: what it costs, and how often its tokens are accepted, by task."""

    traits: PolicyDrafter
    alpha: Mapping[str, float]
    """Task to conditional acceptance of each token; of a lookup, when it has found something."""
    call_s: float = 0.0005
    level_s: float = 0.001
    slot_s: float = 0.0001
    """Seconds of a sequence's token."""
    missed_token_s: float = 0.0
    fades_behind: int | None = None
    """Tokens of a text from which on next to nothing is accepted; None is never."""
    found: Mapping[str, Seq[tuple[float, int]]] = field(default_factory=dict)
    """Chances of a lookup's proposals by length, for each task; the rest finds nothing."""

    def call(self, depths: Seq[int], num_missed: int) -> float:
        """Seconds."""
        levels = self.level_s * max(depths, default=0) + self.slot_s * sum(depths)
        return self.call_s + levels + self.missed_token_s * num_missed

    def alpha_at(self, task: str, length: int) -> float:
        """Behind a text of `length` tokens."""
        fades = self.fades_behind is not None and length >= self.fades_behind
        return 0.02 if fades else self.alpha[task]

    def tokens(self, task: str, depth: int, length: int = 0) -> float:
        """Expected to be accepted, of a draft of so many."""
        return sum(self.alpha_at(task, length) ** level for level in range(1, depth + 1))


def chain(
    name: str, alpha: Mapping[str, float], *, depth: int = 8, level_s: float = 0.001, missed_s: float = 0.0
) -> Simulated:
    return Simulated(PolicyDrafter(name, depth, True), alpha, level_s=level_s, missed_token_s=missed_s)


@dataclass
class Running:
    """A request under way."""

    sequence_id: int
    task: str
    prompt: int
    answer: int
    limit: int
    allowed: frozenset[int] | None
    length: int = 0
    output: int = 0


class World:
    """Batches of `size` requests; where one ends another begins, with its task from `tasks` in turn."""

    def __init__(
        self,
        drafters: Seq[Simulated],
        *,
        size: int,
        tasks: Seq[str] = ("sql",),
        seed: int = 0,
        machine: Machine | None = None,
        prompt: int | Seq[int] = 64,
        answer: int = 200,
        limit: int = 16,
        allowed: frozenset[int] | None = None,
        adaptive: bool = True,
        probe_share: float = 0.005,
        noise: float = 0.03,
        clock: Callable[[], float] | None = None,
        one_by_one: bool = False,
        overhead_s: float = 0.0,
    ) -> None:
        """`prompt` is the length of prompts, or several in turn. `overhead_s` is what asking and telling the policy
        takes in a step. With `one_by_one`, requests do not all begin and end at once."""
        self.drafters, self.machine = drafters, machine or Machine()
        self.tasks = tasks
        self.prompts = (prompt,) if isinstance(prompt, int) else tuple(prompt)
        self.answer, self.limit, self.allowed = answer, limit, allowed
        self.policy = Policy(
            [drafter.traits for drafter in drafters],
            adaptive=adaptive,
            probe_share=probe_share,
            pass_s=self.machine.pass_s,
            clock=clock or FakeClock(),
        )
        self.overhead_s = overhead_s
        self.random = random.Random(seed)
        self.noise = noise
        self.slowdown: Callable[[int, float], float] = lambda number, seconds: seconds
        """Changes what a call takes; for accidents."""
        self.told_alpha: Mapping[str, float] | None = None
        """What outcomes say is accepted, by task, where that is not what a step yields: the estimate is then wrong."""
        self.seconds = self.tokens = 0.0
        """True ones, but for what the target takes for prompts, and expected ones."""
        self.probing_s = 0.0
        """Seconds of steps in which nobody was drafted for, to see what is gained."""
        self.num_steps = 0
        self.num_asked = [0] * len(drafters)
        """Draft tokens asked for, by drafter."""
        self.choices: list[Choice] = []
        """Choices of the last step."""
        self.num_begun = 0
        self._lengths: list[dict[int, int]] = [{} for _ in drafters]
        """By drafter, sequence id to the tokens that it has seen."""
        self.waiting: list[Running] = []
        self.running = [self._begin() for _ in range(size)]
        for i, request in enumerate(self.running):
            request.output = (i * self.answer) // size if one_by_one else 0
            request.length += request.output

    def _begin(self) -> Running:
        number = self.num_begun
        self.num_begun += 1
        task = self.tasks[number % len(self.tasks)]
        prompt = self.prompts[number % len(self.prompts)]
        request = Running(number, task, prompt, self.answer, self.limit, self.allowed)
        request.length = request.prompt
        return request

    def restart(self) -> None:
        """Begin to count anew."""
        self.seconds = self.tokens = self.probing_s = 0.0
        self.num_steps = 0
        self.num_asked = [0] * len(self.drafters)

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds

    def run(self, num_steps: int) -> World:
        for _ in range(num_steps):
            self.step()
        return self

    def step(self) -> None:
        """As the engine does one: prompts of new requests are computed in addition to the others' tokens."""
        policy, running = self.policy, self.running
        num_prompt_rows = sum(request.prompt for request in self.waiting)
        requests = [self.asked(request) for request in running]
        choices = self.choices = policy.choose(requests, num_prompt_rows)
        calls, drafts = self._draft(choices)
        for request in self.waiting:
            if not policy.in_probe:
                self._announce(request, calls)
        expected = self._verify(requests, choices, drafts)
        checked = sum(length for _, length in drafts.values())
        rows = len(running) + num_prompt_rows + checked
        undrafted_s = self.machine.step_s(len(running), rows)
        prompts_s = self.machine.step_s(len(running), len(running) + num_prompt_rows)
        if running:
            prompts_s -= self.machine.step_s(len(running), len(running))
        self.seconds += undrafted_s - prompts_s + sum(call.seconds for call in calls)
        self.seconds += self.overhead_s + policy.planning_s
        self.tokens += expected
        self.num_steps += 1
        if policy.in_probe:
            self.probing_s += undrafted_s
        ended = [request for request in running if request.output >= request.answer]
        for request in ended:
            policy.release(request.sequence_id, request.task, request.output)
            for seen in self._lengths:
                seen.pop(request.sequence_id, None)
        policy.observe(
            requests,
            num_rows=rows,
            num_prompt_rows=num_prompt_rows,
            num_checked=checked,
            undrafted_s=self._noisy(undrafted_s + self.overhead_s),
            calls=[call._replace(seconds=self._noisy(call.seconds)) for call in calls],
        )
        self.running = [request for request in running if request not in ended] + self.waiting
        self.waiting = [self._begin() for _ in ended]

    def report(self) -> ControlReport:
        """What the policy says of itself."""
        return control_report(self.policy)

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.2, 1 + self.noise * self.random.gauss(0, 1))

    def asked(self, request: Running) -> StepRequest:
        """As the policy sees it."""
        return StepRequest(
            request.sequence_id, request.task, request.limit, request.length, request.output, request.allowed
        )

    def _draft(self, choices: Seq[Choice]) -> tuple[list[DraftCall], dict[int, tuple[int, int]]]:
        """The calls, and request number to who drafted and how many tokens."""
        drafts: dict[int, tuple[int, int]] = {}
        calls: list[DraftCall] = []
        for number, drafter in enumerate(self.drafters):
            if not drafter.traits.looks_up:
                continue
            asked = [i for i, choice in enumerate(choices) if choice.lookup == number]
            for i in asked:
                length = min(self._found(drafter, self.running[i].task), self.running[i].limit)
                if length >= choices[i].min_tokens:
                    drafts[i] = number, length
            if asked:
                calls.append(self._call(number, asked, [1] * len(asked)))
        for number, drafter in enumerate(self.drafters):
            asked = [i for i, choice in enumerate(choices) if choice.drafter == number and i not in drafts]
            depths = [choices[i].depth for i in asked]
            if not asked:
                continue
            assert all(depths), "a drafter is asked for nothing"
            calls.append(self._call(number, asked, depths))
            drafts |= {
                i: (number, min(d, drafter.traits.max_depth)) for i, d in zip(asked, depths, strict=True)
            }
        return calls, drafts

    def _found(self, drafter: Simulated, task: str) -> int:
        point = self.random.random()
        for chance, length in drafter.found[task]:
            point -= chance
            if point < 0:
                return length
        return 0

    def _call(self, number: int, asked: Seq[int], depths: Seq[int]) -> DraftCall:
        drafter, missed = self.drafters[number], 0
        self.num_asked[number] += sum(depths)
        for i in asked:
            request = self.running[i]
            self.policy.note_called(number, request.sequence_id, request.length)
            missed += max(request.length - self._lengths[number].get(request.sequence_id, 0) - 1, 0)
            self._lengths[number][request.sequence_id] = request.length
        if drafter.traits.is_chain:
            depths = [min(depth, drafter.traits.max_depth) for depth in depths]
            levels, num_tokens = max(depths), sum(depths)
        else:
            levels, num_tokens = 1, len(asked)
        seconds = self.slowdown(number, drafter.call(depths, missed))
        return DraftCall(len(asked), levels, num_tokens, number, seconds)

    def _announce(self, request: Running, calls: list[DraftCall]) -> None:
        number = self.policy.announce(self.asked(request), request.prompt, request.prompt, request.answer)
        if number == NO_DRAFTER:
            return
        drafter = self.drafters[number]
        self._lengths[number][request.sequence_id] = request.prompt
        seconds = drafter.missed_token_s * request.prompt
        for place, call in enumerate(calls):
            if call.drafter == number:
                calls[place] = call._replace(seconds=call.seconds + seconds)
                return
        calls.append(DraftCall(0, 0, 0, number, drafter.call_s + seconds))

    def _verify(
        self, asked: Seq[StepRequest], choices: Seq[Choice], drafts: Mapping[int, tuple[int, int]]
    ) -> float:
        """Let the requests have their tokens, and say what became of their drafts; returns the tokens expected."""
        expected = 0.0
        for i, (request, seen, choice) in enumerate(zip(self.running, asked, choices, strict=True)):
            number, length = drafts.get(i, (NO_DRAFTER, 0))
            accepted = 0
            expected += 1.0
            if length:
                alpha = self.drafters[number].alpha_at(request.task, request.length)
                expected += self.drafters[number].tokens(request.task, length, request.length)
                while accepted < length and self.random.random() < alpha:
                    accepted += 1
            request.output += accepted + 1
            request.length += accepted + 1
            seen.num_tokens = accepted + 1
            if self.told_alpha is not None:
                accepted = 0
                while accepted < length and self.random.random() < self.told_alpha[request.task]:
                    accepted += 1
            seen.choice, seen.drafter, seen.lookup = choice, number, choice.lookup
            seen.num_checked, seen.num_accepted = length, accepted
            seen.num_reached = min(accepted + 1, length)
        return expected

    # --- what would be right ----------------------------------------------------------------------------------

    def fixed_rate(self, by_task: Mapping[str, tuple[int, int]]) -> float:
        """Expected tokens a second of a drafter and a depth for each task, prompts apart."""
        requests = [by_task[request.task] for request in self.running]
        tokens = float(len(requests))
        rows, seconds = len(requests), 0.0
        for number, drafter in enumerate(self.drafters):
            mine = [
                (request.task, depth)
                for request, (chosen, depth) in zip(self.running, requests, strict=True)
                if chosen == number and depth
            ]
            if mine:
                tokens += sum(drafter.tokens(task, depth) for task, depth in mine)
                rows += sum(depth for _, depth in mine)
                seconds += drafter.call([depth for _, depth in mine], 0)
        return tokens / (seconds + self.machine.step_s(len(requests), rows))

    def settings(self) -> list[tuple[int, int]]:
        """Off, and every chain at every depth."""
        return [(NO_DRAFTER, 0)] + [
            (number, depth)
            for number, drafter in enumerate(self.drafters)
            if drafter.traits.is_chain
            for depth in range(1, min(drafter.traits.max_depth, self.limit) + 1)
        ]

    def off_rate(self) -> float:
        return self.fixed_rate(dict.fromkeys(self.tasks, (NO_DRAFTER, 0)))

    def best_rate(self) -> float:
        """Return the rate of one setting for all."""
        return max(self.fixed_rate(dict.fromkeys(self.tasks, setting)) for setting in self.settings())

    def batch_best_rate(self, size: int) -> float:
        """`best_rate` of the first task with `size` requests at once, whatever runs at the moment."""
        running, self.running = self.running, [self.running[0]] * size if self.running else []
        try:
            return self.best_rate()
        finally:
            self.running = running

    def chosen(self) -> list[tuple[int, int]]:
        """Drafter and depth of each request in the last step."""
        return [(choice.drafter, choice.depth) for choice in self.choices]


def drafted(
    sequence_id: int, checked: int, accepted: int, *, task: str = "t", drafter: int = 0
) -> StepRequest:
    """A request of which a step has checked so many draft tokens."""
    return StepRequest(
        sequence_id,
        task,
        limit=8,
        choice=Choice(drafter, checked),
        drafter=drafter,
        num_checked=checked,
        num_reached=min(accepted + 1, checked),
        num_accepted=accepted,
        num_tokens=accepted + 1,
    )
