"""What an operator should know of: raised by evidence, not by noise, and cleared when it is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from slipstream.bounded import BoundedDict
from slipstream.control.report import ControlReport, MethodReport
from slipstream.monitor.causes import Traits, suspected_causes
from slipstream.monitor.drift import REFERENCE_SIZES, Shift, ShiftWatch
from slipstream.monitor.shift import FALSE_ALARM_RATE, Bets, Reference, Value, mean

MAX_TASKS = 64
"""Tasks that are watched; the one that was asked for longest ago gives way."""
FULL_WEIGHT_TOKENS = 32
"""A request with fewer checked tokens says less of acceptance: requests differ, so more tokens add little."""
FAILURE_MEMORY_S = 600.0
"""How long a drafter's failure is shown after the last one."""

_SIZING_REQUESTS = 30
"""Requests that say how far requests differ, before bets are made on whether drafting pays."""
_PAYS_AGAIN = 100.0
"""Evidence that drafting pays after all."""


class Kind(StrEnum):
    """What an alarm is about."""

    ACCEPTANCE_DRIFT = "acceptance_drift"
    UNDER_BREAK_EVEN = "under_break_even"
    TRUNCATION = "truncation"
    TOKEN_MISMATCH = "token_mismatch"
    DRAFTER_FAILED = "drafter_failed"


TASK_KINDS = (Kind.ACCEPTANCE_DRIFT, Kind.UNDER_BREAK_EVEN, Kind.TRUNCATION)
"""Those that are about a task."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm while it is raised."""

    kind: Kind
    task: str | None
    """'' is requests without a task; None where it is not about one."""
    method: str | None
    """The drafter; None where it is not about one."""
    since: float
    """Unix time."""
    message: str
    value: float
    """The figure that it is about, when it was raised."""

    @property
    def key(self) -> tuple[Kind, str | None, str | None]:
        return self.kind, self.task, self.method


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a finished request tells; its answers count together, since they are about one prompt."""

    task: str
    traits: Traits
    num_reached: int
    """Positions at which a draft was checked below an accepted path. Accepted over reached is the *conditional* α,
    which does not change with the depth that is chosen, as accepted over drafted does."""
    num_accepted: int
    num_reached_first: int
    """Of them, those at the first position."""
    num_accepted_first: int
    num_streamed: int
    """Tokens that the streams gave out."""
    num_counted: int
    """Output tokens by the engine's counters."""
    share_truncated: float
    """Answers that were ended by length."""
    share_out_of_context: float
    """Answers that were ended by the model's context."""


class Alarms:
    """All alarms of one engine, from its finished requests and its control's reports. Not thread-safe.

    `on_raise` and `on_clear` are called once for each alarm; `on_clear` with the reason.
    """

    def __init__(
        self,
        on_raise: Callable[[Alarm], None] = lambda alarm: None,
        on_clear: Callable[[Alarm, str], None] = lambda alarm, why: None,
        clock: Callable[[], float] = time.time,
        told: Callable[[str], str] = str,
    ) -> None:
        """`told` is what messages call a task."""
        self._told = told
        self._on_raise, self._on_clear, self._clock = on_raise, on_clear, clock
        self._raised: dict[tuple[Kind, str | None, str | None], Alarm] = {}
        self._tasks: BoundedDict[str, _Task] = BoundedDict(MAX_TASKS, on_drop=self._forget)
        self._failures = _Failures()
        self._num_mismatched = 0

    @property
    def raised(self) -> list[Alarm]:
        """The oldest first."""
        return list(self._raised.values())

    def acceptance(self, task: str) -> ShiftWatch | None:
        """What is known of the conditional α of a task; None where it is not watched."""
        watched = self._tasks.get(task)
        return None if watched is None else watched.acceptance

    def on_request(self, facts: RequestFacts) -> None:
        """Take in a request that has finished."""
        watched = self._task(facts.task)
        watched.add(facts)
        self._sync(
            Kind.ACCEPTANCE_DRIFT,
            facts.task,
            watched.acceptance.shift,
            lambda shift: _drift_message(self._told(facts.task), shift, watched),
        )
        self._sync(
            Kind.TRUNCATION,
            facts.task,
            watched.truncation.shift,
            lambda shift: _truncation_message(self._told(facts.task), shift, watched),
        )
        self._check_pay(facts.task, watched.pay)
        self._check_count(facts)

    def on_report(self, report: ControlReport) -> None:
        """Take in what the control has found out."""
        for task in report.tasks:
            if task.task in self._tasks:
                watched = self._tasks[task.task]
                watched.pay.break_even = None if task.method is None else task.break_even
                self._check_pay(task.task, watched.pay)
        for method in report.methods:
            message = self._failures.judge(method, self._clock())
            self._set(
                Kind.DRAFTER_FAILED, None, method.name, message, method.num_failures, "no more failures"
            )

    def acknowledge(self, kind: Kind, task: str | None, method: str | None) -> bool:
        """Somebody has taken note: what is now is taken for usual. False where there is no such alarm."""
        alarm = self._raised.get((kind, task, method))
        if alarm is None:
            return False
        watched = self._tasks.get(task) if task is not None else None
        if kind == Kind.DRAFTER_FAILED and method is not None:
            self._failures.forgive(method)
        elif kind == Kind.TOKEN_MISMATCH:
            self._num_mismatched = 0
        elif watched is not None and kind == Kind.ACCEPTANCE_DRIFT:
            watched.acceptance.settle()
            watched.renew_usual()
        elif watched is not None and kind == Kind.TRUNCATION:
            watched.truncation.settle()
        elif watched is not None:
            watched.pay.begin()
        self._clear(alarm, "acknowledged")
        return True

    # --- rules --------------------------------------------------------------------------------------------------

    def _task(self, task: str) -> _Task:
        """What is known of a task, which is the last to make room now."""
        return self._tasks.touch(task, _Task)

    def _forget(self, task: str, _: _Task) -> None:
        for alarm in [alarm for alarm in self.raised if alarm.task == task]:
            self._clear(alarm, "the task was not asked for lately and is no longer watched")

    def _sync(self, kind: Kind, task: str, shift: Shift | None, message: Callable[[Shift], str]) -> None:
        key = (kind, task, None)
        if shift is None:
            self._set(
                *key,
                None,
                0.0,
                "back at the usual level, or the new level has lasted and is the usual one now",
            )
        elif key not in self._raised:
            self._set(*key, message(shift), shift.after, "")

    def _check_pay(self, task: str, pay: _Pay) -> None:
        message, level = None, 0.0
        if pay.is_under and pay.break_even is not None:
            level = pay.level
            message = (
                f"α of the first draft token of {_named(self._told(task))} is {level:.2f}, "
                f"under the {pay.break_even:.2f} from which on drafting pays"
            )
        self._set(Kind.UNDER_BREAK_EVEN, task, None, message, level, "drafting pays again, or is off")

    def _check_count(self, facts: RequestFacts) -> None:
        if facts.num_streamed != facts.num_counted:
            self._num_mismatched += 1
            message = (
                f"a request's streams gave out {facts.num_streamed} tokens where the engine counted "
                f"{facts.num_counted}"
            )
            self._set(Kind.TOKEN_MISMATCH, None, None, message, self._num_mismatched, "")

    def _set(
        self, kind: Kind, task: str | None, method: str | None, message: str | None, value: float, why: str
    ) -> None:
        """Raise the alarm where there is a message and it is not raised yet; clear it where there is none."""
        alarm = self._raised.get((kind, task, method))
        if message is not None and alarm is None:
            alarm = Alarm(kind, task, method, self._clock(), message, value)
            self._raised[alarm.key] = alarm
            self._on_raise(alarm)
        elif message is None and alarm is not None:
            self._clear(alarm, why)

    def _clear(self, alarm: Alarm, why: str) -> None:
        del self._raised[alarm.key]
        self._on_clear(alarm, why)


class _Task:
    """What is remembered of one task."""

    def __init__(self) -> None:
        self.acceptance = ShiftWatch()
        self.truncation = ShiftWatch(falls=False)
        self.pay = _Pay()
        self.usual: list[Traits] = []
        """Of the requests that the reference of the acceptance was learned from."""
        self.recent: deque[Traits] = deque(maxlen=REFERENCE_SIZES[-1])
        """Of drafted requests, as the acceptance counts them."""
        self.out_of_context: deque[tuple[float, float]] = deque(maxlen=REFERENCE_SIZES[-1])
        """Shares of answers ended by length, and by the context."""

    def add(self, facts: RequestFacts) -> None:
        self.out_of_context.append((facts.share_truncated, facts.share_out_of_context))
        self.truncation.add(Value(facts.share_truncated))
        if not facts.num_reached:
            return
        self.recent.append(facts.traits)
        if len(self.usual) < REFERENCE_SIZES[0]:
            self.usual.append(facts.traits)
        shift, reference = self.acceptance.shift, self.acceptance.reference
        self.acceptance.add(_rate(facts.num_accepted, facts.num_reached))
        if shift and not self.acceptance.shift and self.acceptance.reference is not reference:
            self.renew_usual()
        self.pay.add(_rate(facts.num_accepted_first, facts.num_reached_first))

    def renew_usual(self) -> None:
        """The reference is another one: so are the requests that it stands for."""
        self.usual = list(self.recent)[-REFERENCE_SIZES[0] :]


class _Pay:
    """Whether the first draft token's α is under what drafting costs, which moves: the bound is that of the moment."""

    def __init__(self) -> None:
        self.break_even: float | None = None
        """None where nothing is drafted, or the costs are not known."""
        self._recent: deque[Value] = deque(maxlen=REFERENCE_SIZES[0])
        self._bets: Bets | None = None
        self.is_under = False

    @property
    def level(self) -> float:
        """α of late; NaN before anything was checked."""
        return mean(self._recent)

    def add(self, item: Value) -> None:
        self._recent.append(item)
        if self.break_even is None:
            self.begin()
            return
        if self._bets is None and len(self._recent) >= _SIZING_REQUESTS:
            sizes = Reference.of(list(self._recent))
            bound = 1.0 if self.is_under else 0.0
            self._bets = Bets(bound, sizes.weight, sizes.variance, below=not self.is_under)
        elif self._bets is not None:
            self._bets.add(item, self.break_even)
            if self._bets.evidence >= (_PAYS_AGAIN if self.is_under else 1 / FALSE_ALARM_RATE):
                self.is_under = not self.is_under
                self._bets = None

    def begin(self) -> None:
        """Forget the evidence."""
        self.is_under = False
        self._bets = None


class _Failures:
    """Which drafters' failures are shown."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._last_s: dict[str, float] = {}
        self._forgiven: set[str] = set()

    def judge(self, method: MethodReport, now_s: float) -> str | None:
        """The alarm's message; None where there is nothing to tell."""
        name = method.name
        if method.num_failures > self._known.get(name, 0):
            self._last_s[name] = now_s
            self._forgiven.discard(name)
        self._known[name] = method.num_failures
        if name in self._forgiven:
            return None
        if method.retired:
            return f"the drafter {name} is no longer asked: it hung, or failed too often ({method.num_failures} times)"
        if now_s - self._last_s.get(name, -FAILURE_MEMORY_S) < FAILURE_MEMORY_S:
            return f"the drafter {name} failed; answers went on without its drafts"
        return None

    def forgive(self, name: str) -> None:
        """Say no more until it fails again."""
        self._forgiven.add(name)


def _rate(num_accepted: int, num_reached: int) -> Value:
    return Value(num_accepted / num_reached, min(num_reached, FULL_WEIGHT_TOKENS) / FULL_WEIGHT_TOKENS)


def _named(task: str) -> str:
    return f"task {task!r}" if task else "requests without a task"


def _drift_message(task: str, shift: Shift, watched: _Task) -> str:
    verb = "fell" if shift.after < shift.before else "rose"
    causes = suspected_causes(watched.usual, list(watched.recent)[-shift.num_requests :])
    also = (
        "; ".join(map(str, causes))
        if causes
        else "nothing else that is watched moved: have prompts or models changed?"
    )
    return (
        f"acceptance of {_named(task)} {verb} from {shift.before:.2f} to {shift.after:.2f} over its last "
        f"{shift.num_requests} requests. At the same time: {also}"
    )


def _truncation_message(task: str, shift: Shift, watched: _Task) -> str:
    recent = list(watched.out_of_context)[-shift.num_requests :]
    truncated = sum(share for share, _ in recent)
    context = sum(share for _, share in recent) / truncated if truncated else 0.0
    return (
        f"{shift.after:.0%} of the last {shift.num_requests} requests of {_named(task)} were cut off by length, "
        f"{shift.before:.0%} before; {context:.0%} of them by the model's context, the rest by max_tokens"
    )
