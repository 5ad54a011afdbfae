"""Alarms for operators: raised on statistical evidence, cleared when their cause is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from slipstream.control.monitor.causes import Traits, suspected_causes
from slipstream.control.monitor.drift import REFERENCE_SIZES, Shift, ShiftWatch
from slipstream.control.monitor.pass_watch import PassWatch
from slipstream.control.types import ControlReport, MethodReport
from slipstream.core.bounded import BoundedDict
from slipstream.core.metrics.passes import PassCounts
from slipstream.stats.shift import FALSE_ALARM_RATE, Bets, Reference, Value, mean

MAX_TASKS = 64
"""Tasks that are watched; the least recently requested one is dropped."""
FULL_WEIGHT_TOKENS = 32
"""Verified positions from which on a request has full weight: requests differ, so more positions add little."""
FAILURE_MEMORY_S = 600.0
"""How long the alarm lasts after a drafter's last failure."""

_SIZING_REQUESTS = 30
"""Requests that estimate the variance before the break-even test starts."""
_PAYS_AGAIN = 100.0
"""Evidence that clears an alarm under the break-even."""


class AlarmKind(StrEnum):
    """The kind of an alarm."""

    ACCEPTANCE_DRIFT = "acceptance_drift"
    UNDER_BREAK_EVEN = "under_break_even"
    TRUNCATION = "truncation"
    TOKEN_MISMATCH = "token_mismatch"
    DRAFTER_FAILED = "drafter_failed"
    EAGER_PASSES = "eager_passes"
    LEARNER_DIED = "learner_died"
    NEVER_IMPROVES = "never_improves"
    VERSION_ROLLED_BACK = "version_rolled_back"
    LEARNING_FAILED = "learning_failed"
    """A server's drafter learns: nothing is trained, all candidates are refused, a version did worse than it
    promised or is damaged, or answers cannot be kept."""
    SERVER_UNREACHABLE = "server_unreachable"
    """A server that is watched from outside does not answer."""


TASK_KINDS = (AlarmKind.ACCEPTANCE_DRIFT, AlarmKind.UNDER_BREAK_EVEN, AlarmKind.TRUNCATION)
"""The kinds that concern one task."""
LEARN_KINDS = (
    AlarmKind.LEARNER_DIED,
    AlarmKind.NEVER_IMPROVES,
    AlarmKind.VERSION_ROLLED_BACK,
    AlarmKind.LEARNING_FAILED,
)
"""The kinds that concern a drafter that learns."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A raised alarm."""

    kind: AlarmKind
    task: str | None
    """'' for requests without a task; None where it concerns no task."""
    method: str | None
    """The drafter; None where it concerns no drafter."""
    since: float
    """Unix time."""
    message: str
    value: float
    """The watched figure when the alarm was raised."""

    @property
    def key(self) -> tuple[AlarmKind, str | None, str | None]:
        return self.kind, self.task, self.method


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished request's figures; its answers count together, since they share one prompt."""

    task: str
    traits: Traits
    num_reached: int
    """Draft positions that were verified below an accepted path. Accepted over reached is the *conditional* α, which,
    unlike accepted over drafted, does not depend on the chosen depth."""
    num_accepted: int
    num_reached_first: int
    """Reached positions that are the first of a draft."""
    num_accepted_first: int
    num_streamed: int
    """Tokens sent to the client."""
    num_counted: int
    """Output tokens by the engine's counters."""
    share_truncated: float
    """Share of answers that ended by length."""
    share_out_of_context: float | None
    """Share of answers that ended at the model's context length; None where that is not known."""


class Alarms:
    """All alarms of one engine, from its finished requests and its controller's reports. Not thread-safe.

    `on_raise` and `on_clear` are called once for each alarm; `on_clear` gets the reason.
    """

    def __init__(
        self,
        on_raise: Callable[[Alarm], None] = lambda alarm: None,
        on_clear: Callable[[Alarm, str], None] = lambda alarm, why: None,
        clock: Callable[[], float] = time.time,
        task_name: Callable[[str], str] = str,
        unit: str = "requests",
    ) -> None:
        """`task_name` maps a task to its name in messages; `unit` is what they call what `on_request` counts."""
        self._task_name, self._unit = task_name, unit
        self._on_raise, self._on_clear, self._clock = on_raise, on_clear, clock
        self._raised: dict[tuple[AlarmKind, str | None, str | None], Alarm] = {}
        self._tasks: BoundedDict[str, _Task] = BoundedDict(MAX_TASKS, on_drop=self._forget)
        self._failures = _Failures()
        self._passes = PassWatch()
        self._num_mismatched = 0

    @property
    def num_tasks(self) -> int:
        """Tasks that are watched; at most `MAX_TASKS`."""
        return len(self._tasks)

    @property
    def raised(self) -> list[Alarm]:
        """Raised alarms, the oldest first."""
        return list(self._raised.values())

    def acceptance(self, task: str) -> ShiftWatch | None:
        """The watch over a task's conditional α; None where the task is not watched."""
        watched = self._tasks.get(task)
        return None if watched is None else watched.acceptance

    def on_request(self, finished: FinishedRequest) -> None:
        """Count a finished request."""
        watched = self._task(finished.task)
        watched.add(finished)
        self._sync(
            AlarmKind.ACCEPTANCE_DRIFT,
            finished.task,
            watched.acceptance.shift,
            lambda shift: _drift_message(self._task_name(finished.task), shift, watched, self._unit),
        )
        self._sync(
            AlarmKind.TRUNCATION,
            finished.task,
            watched.truncation.shift,
            lambda shift: _truncation_message(self._task_name(finished.task), shift, watched, self._unit),
        )
        self._check_pay(finished.task, watched.pay)
        self._check_count(finished)

    def on_report(self, report: ControlReport) -> None:
        """Update from the controller's report."""
        for task in report.tasks:
            if task.task in self._tasks:
                watched = self._tasks[task.task]
                watched.pay.break_even = None if task.method is None else task.break_even
                self._check_pay(task.task, watched.pay)
        for method in report.methods:
            message = self._failures.judge(method, self._clock())
            self.update(
                AlarmKind.DRAFTER_FAILED, None, method.name, message, method.num_failures, "no more failures"
            )

    def on_passes(self, passes: Mapping[str, PassCounts]) -> None:
        """Update from the counts of an engine whose passes are recorded; see `EngineStats.passes`."""
        self._passes.add(passes)
        why = "of the passes since hardly any ran outside a graph"
        self.update(AlarmKind.EAGER_PASSES, None, None, self._passes.message, self._passes.share, why)

    def acknowledge(self, kind: AlarmKind, task: str | None, method: str | None) -> bool:
        """Make the present level the reference; the alarm is cleared. False where there is no such alarm."""
        alarm = self._raised.get((kind, task, method))
        if alarm is None:
            return False
        watched = self._tasks.get(task) if task is not None else None
        if kind == AlarmKind.DRAFTER_FAILED and method is not None:
            self._failures.forgive(method)
        elif kind == AlarmKind.EAGER_PASSES:
            self._passes.forgive()
        elif kind == AlarmKind.TOKEN_MISMATCH:
            self._num_mismatched = 0
        elif watched is not None and kind == AlarmKind.ACCEPTANCE_DRIFT:
            watched.acceptance.resolve()
            watched.renew_usual()
        elif watched is not None and kind == AlarmKind.TRUNCATION:
            watched.truncation.resolve()
        elif watched is not None:
            watched.pay.begin()
        self._clear(alarm, "acknowledged")
        return True

    def update(
        self,
        kind: AlarmKind,
        task: str | None,
        method: str | None,
        message: str | None,
        value: float,
        why: str,
    ) -> None:
        """Raise the alarm where there is a message and it is not raised yet; clear it where there is none.

        `value` is the watched figure, `why` the reason of a clearing.
        """
        alarm = self._raised.get((kind, task, method))
        if message is not None and alarm is None:
            alarm = Alarm(kind, task, method, self._clock(), message, value)
            self._raised[alarm.key] = alarm
            self._on_raise(alarm)
        elif message is None and alarm is not None:
            self._clear(alarm, why)

    # --- rules --------------------------------------------------------------------------------------------------

    def _task(self, task: str) -> _Task:
        """The watched figures of a task, which becomes the most recently used one."""
        return self._tasks.touch(task, _Task)

    def _forget(self, task: str, _: _Task) -> None:
        for alarm in [alarm for alarm in self.raised if alarm.task == task]:
            self._clear(alarm, "the task had no recent requests and is no longer watched")

    def _sync(self, kind: AlarmKind, task: str, shift: Shift | None, message: Callable[[Shift], str]) -> None:
        key = (kind, task, None)
        if shift is None:
            self.update(
                *key,
                None,
                0.0,
                "back at the reference level, or the new level has lasted and is the new reference",
            )
        elif key not in self._raised:
            self.update(*key, message(shift), shift.after, "")

    def _check_pay(self, task: str, pay: _Pay) -> None:
        message, level = None, 0.0
        if pay.is_under and pay.break_even is not None:
            level = pay.level
            message = (
                f"α of the first draft token of {_named(self._task_name(task))} is {level:.2f}, "
                f"below its break-even of {pay.break_even:.2f}"
            )
        self.update(AlarmKind.UNDER_BREAK_EVEN, task, None, message, level, "above break-even again, or off")

    def _check_count(self, finished: FinishedRequest) -> None:
        if finished.num_streamed != finished.num_counted:
            self._num_mismatched += 1
            message = (
                f"a request's streams sent {finished.num_streamed} tokens, but the engine counted "
                f"{finished.num_counted}"
            )
            self.update(AlarmKind.TOKEN_MISMATCH, None, None, message, self._num_mismatched, "")

    def _clear(self, alarm: Alarm, why: str) -> None:
        del self._raised[alarm.key]
        self._on_clear(alarm, why)


class _Task:
    """The watched figures of one task."""

    def __init__(self) -> None:
        self.acceptance = ShiftWatch()
        self.truncation = ShiftWatch(falls=False)
        self.pay = _Pay()
        self.usual: list[Traits] = []
        """Traits of the requests behind the acceptance's reference."""
        self.recent: deque[Traits] = deque(maxlen=REFERENCE_SIZES[-1])
        """Traits of the recent requests with drafts."""
        self.out_of_context: deque[tuple[float, float | None]] = deque(maxlen=REFERENCE_SIZES[-1])
        """(share of answers ended by length, share ended at the context length) of recent requests."""

    def add(self, finished: FinishedRequest) -> None:
        self.out_of_context.append((finished.share_truncated, finished.share_out_of_context))
        self.truncation.add(Value(finished.share_truncated))
        if not finished.num_reached:
            return
        self.recent.append(finished.traits)
        if len(self.usual) < REFERENCE_SIZES[0]:
            self.usual.append(finished.traits)
        shift, reference = self.acceptance.shift, self.acceptance.reference
        self.acceptance.add(_rate(finished.num_accepted, finished.num_reached))
        if shift and not self.acceptance.shift and self.acceptance.reference is not reference:
            self.renew_usual()
        self.pay.add(_rate(finished.num_accepted_first, finished.num_reached_first))

    def renew_usual(self) -> None:
        """Take the recent requests as those behind the new reference."""
        self.usual = list(self.recent)[-REFERENCE_SIZES[0] :]


class _Pay:
    """A sequential test of whether the first draft token's α is below the break-even, which changes over time."""

    def __init__(self) -> None:
        self.break_even: float | None = None
        """None where nothing is drafted, or the costs are unknown."""
        self._recent: deque[Value] = deque(maxlen=REFERENCE_SIZES[0])
        self._bets: Bets | None = None
        self.is_under = False

    @property
    def level(self) -> float:
        """Recent α; NaN before the first verified draft."""
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
        """Restart the test."""
        self.is_under = False
        self._bets = None


class _Failures:
    """Drafters' failures, each shown for a limited time."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._last_s: dict[str, float] = {}
        self._forgiven: set[str] = set()

    def judge(self, method: MethodReport, now_s: float) -> str | None:
        """The alarm's message; None where no alarm is due."""
        name = method.name
        if method.num_failures > self._known.get(name, 0):
            self._last_s[name] = now_s
            self._forgiven.discard(name)
        self._known[name] = method.num_failures
        if name in self._forgiven:
            return None
        if method.retired:
            return (
                f"the drafter {name} is retired: it hung, or failed too often ({method.num_failures} times)"
            )
        if now_s - self._last_s.get(name, -FAILURE_MEMORY_S) < FAILURE_MEMORY_S:
            return f"the drafter {name} failed; affected requests continued without its drafts"
        return None

    def forgive(self, name: str) -> None:
        """Show no alarm until it fails again."""
        self._forgiven.add(name)


def _rate(num_accepted: int, num_reached: int) -> Value:
    return Value(num_accepted / num_reached, min(num_reached, FULL_WEIGHT_TOKENS) / FULL_WEIGHT_TOKENS)


def _named(task: str) -> str:
    return f"task {task!r}" if task else "requests without a task"


def _drift_message(task: str, shift: Shift, watched: _Task, unit: str) -> str:
    verb = "fell" if shift.after < shift.before else "rose"
    causes = suspected_causes(watched.usual, list(watched.recent)[-shift.num_requests :])
    also = (
        "; ".join(map(str, causes))
        if causes
        else "no other watched figure moved; check whether prompts or models have changed"
    )
    return (
        f"acceptance of {_named(task)} {verb} from {shift.before:.2f} to {shift.after:.2f} over its last "
        f"{shift.num_requests} {unit}. At the same time: {also}"
    )


def _truncation_message(task: str, shift: Shift, watched: _Task, unit: str) -> str:
    recent = list(watched.out_of_context)[-shift.num_requests :]
    message = (
        f"{shift.after:.0%} of the last {shift.num_requests} {unit} of {_named(task)} were cut off by length, "
        f"{shift.before:.0%} before"
    )
    known = [(cut, context) for cut, context in recent if context is not None]
    if not known:
        return message
    truncated = sum(cut for cut, _ in known)
    context = sum(share for _, share in known) / truncated if truncated else 0.0
    return f"{message}; {context:.0%} of them by the model's context, the rest by max_tokens"
