"""Alarms: raised once, cleared once, with what else moved at the same time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.control.monitor.alarms import (
    FAILURE_MEMORY_S,
    MAX_TASKS,
    Alarm,
    AlarmKind,
    Alarms,
    FinishedRequest,
)
from slipstream.control.monitor.causes import Traits, suspected_causes
from slipstream.control.types import ControlReport, MethodReport, TaskReport
from slipstream.core.metrics.passes import PassCounts

TRAITS = Traits(
    num_prompt_tokens=100, num_output_tokens=60, temperature=0.7, structured=False, method="eagle3"
)


class Heard:
    """Alarms with all that they say, on a clock that is set by hand."""

    def __init__(self) -> None:
        self.raised: list[Alarm] = []
        self.cleared: list[tuple[Alarm, str]] = []
        self.now = 1000.0
        self.alarms = Alarms(
            self.raised.append, lambda alarm, why: self.cleared.append((alarm, why)), lambda: self.now
        )
        self._rng = np.random.default_rng(5)

    def request(self, level: float = 0.6, task: str = "sql", traits: Traits = TRAITS, **other: Any) -> None:
        reached = int(self._rng.integers(20, 80))
        first = reached // 2
        rate = float(np.clip(self._rng.normal(level, 0.12), 0, 1))
        finished = FinishedRequest(
            task=task,
            traits=replace(
                traits, num_prompt_tokens=max(1, int(traits.num_prompt_tokens * self._rng.lognormal(0, 0.5)))
            ),
            num_reached=reached,
            num_accepted=int(self._rng.binomial(reached, rate)),
            num_reached_first=first,
            num_accepted_first=int(self._rng.binomial(first, rate)),
            num_streamed=60,
            num_counted=60,
            share_truncated=0.0,
            share_out_of_context=0.0,
        )
        self.alarms.on_request(replace(finished, **other))

    def report(self, methods: tuple[MethodReport, ...] = (), **task: Any) -> None:
        told = TaskReport("sql", "eagle3", 3.0, 0.5, 2.0, 0.35, 1.2, None)
        self.alarms.on_report(
            ControlReport(True, True, False, 1.2, None, 0.01, methods, (replace(told, **task),), ())
        )


@pytest.fixture
def heard() -> Heard:
    return Heard()


def test_drift_names_what_moved_too(heard: Heard) -> None:
    for _ in range(200):
        heard.request()
    for _ in range(150):
        heard.request(0.4, traits=replace(TRAITS, num_prompt_tokens=700, structured=True))
    [alarm] = heard.raised
    assert (alarm.kind, alarm.task, alarm.method, alarm.since) == (
        AlarmKind.ACCEPTANCE_DRIFT,
        "sql",
        None,
        1000.0,
    )
    assert alarm.value == pytest.approx(0.4, abs=0.1)
    assert "acceptance of task 'sql' fell from 0.6" in alarm.message
    assert "prompt length went from" in alarm.message
    assert "share of structured requests went from 0% to" in alarm.message
    assert "temperature" not in alarm.message
    assert "output length" not in alarm.message
    assert heard.alarms.raised == [alarm]


def test_drift_without_a_cause_says_so(heard: Heard) -> None:
    for level in [0.6] * 200 + [0.8] * 200:
        heard.request(level)
    [alarm] = heard.raised
    assert "rose" in alarm.message
    assert "no other watched figure moved" in alarm.message


def test_drift_of_one_task_is_not_anothers(heard: Heard) -> None:
    for level in [0.6] * 200 + [0.4] * 200:
        heard.request(level, task="sql")
        heard.request(0.6, task="")
    assert [alarm.task for alarm in heard.raised] == ["sql"]


def test_an_alarm_clears_once_with_its_reason(heard: Heard) -> None:
    for level in [0.6] * 200 + [0.4] * 150 + [0.6] * 200:
        heard.request(level)
    [(alarm, why)] = heard.cleared
    assert heard.raised == [alarm]
    assert "back at the reference level" in why
    assert heard.alarms.raised == []


def test_an_acknowledged_level_is_usual(heard: Heard) -> None:
    for level in [0.6] * 200 + [0.4] * 150:
        heard.request(level)
    assert heard.alarms.acknowledge(AlarmKind.ACCEPTANCE_DRIFT, "sql", None)
    assert not heard.alarms.acknowledge(AlarmKind.ACCEPTANCE_DRIFT, "sql", None)
    assert [why for _, why in heard.cleared] == ["acknowledged"]
    for _ in range(1500):
        heard.request(0.4)
    assert heard.alarms.raised == []
    watch = heard.alarms.acceptance("sql")
    assert watch is not None
    assert watch.reference is not None
    assert watch.reference.mean == pytest.approx(0.4, abs=0.03)


def test_what_lasts_is_usual_for_the_traffic_too(heard: Heard) -> None:
    longer = replace(TRAITS, num_prompt_tokens=700)
    for _ in range(200):
        heard.request(0.6)
    for level in [0.4] * 1000 + [0.7] * 200:
        heard.request(level, traits=longer)
    assert [alarm.kind for alarm in heard.raised] == [AlarmKind.ACCEPTANCE_DRIFT] * 2
    assert "prompt length" in heard.raised[0].message
    assert "no other watched figure moved" in heard.raised[1].message


def test_truncation_tells_the_context_from_the_limit(heard: Heard) -> None:
    for number in range(500):
        cut = number > 200 and number % 3 == 0
        heard.request(share_truncated=float(cut), share_out_of_context=float(cut and number % 2 == 0))
    [alarm] = heard.raised
    assert alarm.kind == AlarmKind.TRUNCATION
    assert "37% of the last 19 requests of task 'sql' were cut off by length, 0% before" in alarm.message
    assert "43% of them by the model's context" in alarm.message  # 3 of 7
    assert heard.alarms.acknowledge(AlarmKind.TRUNCATION, "sql", None)


def test_tokens_that_do_not_add_up_are_told_until_noted(heard: Heard) -> None:
    heard.request(num_streamed=61)
    for _ in range(50):
        heard.request()
    [alarm] = heard.raised
    assert (alarm.kind, alarm.value) == (AlarmKind.TOKEN_MISMATCH, 1)
    assert "sent 61 tokens, but the engine counted 60" in alarm.message
    assert heard.alarms.raised == [alarm]
    assert heard.alarms.acknowledge(AlarmKind.TOKEN_MISMATCH, None, None)
    heard.request(num_streamed=59)
    assert len(heard.raised) == 2


def test_under_break_even_is_told_when_it_lasts(heard: Heard) -> None:
    heard.request()
    heard.report()
    for _ in range(500):
        heard.request(0.45)  # pays
    assert heard.raised == []
    heard.report(break_even=0.6)
    for _ in range(30):
        heard.request(0.45)
    assert heard.raised == []  # not on so few
    for _ in range(500):
        heard.request(0.45)
    [alarm] = heard.raised
    assert (alarm.kind, alarm.task) == (AlarmKind.UNDER_BREAK_EVEN, "sql")
    assert "below its break-even of 0.60" in alarm.message
    heard.report(break_even=0.3)
    for _ in range(300):
        heard.request(0.45)
    assert [alarm.kind for alarm, _ in heard.cleared] == [AlarmKind.UNDER_BREAK_EVEN]


@pytest.mark.parametrize("change", [{"method": None}, {"break_even": None}])
def test_without_drafts_nothing_can_fail_to_pay(heard: Heard, change: dict[str, Any]) -> None:
    heard.request()
    heard.report(break_even=0.6)
    for _ in range(500):
        heard.request(0.3)
    assert [alarm.kind for alarm in heard.alarms.raised] == [AlarmKind.UNDER_BREAK_EVEN]
    heard.report(**change)
    heard.request(0.3)
    assert heard.alarms.raised == []
    heard.report(break_even=0.6)
    for _ in range(500):
        heard.request(0.3)
    assert heard.alarms.acknowledge(AlarmKind.UNDER_BREAK_EVEN, "sql", None)


def method(num_failures: int, retired: bool = False) -> MethodReport:
    return MethodReport("suffix", 0.5, (), 100, num_failures, retired)


def test_a_drafter_that_fails(heard: Heard) -> None:
    heard.report((method(0),))
    assert heard.raised == []
    heard.report((method(2),))
    heard.now += FAILURE_MEMORY_S / 2
    heard.report((method(2),))
    [alarm] = heard.raised
    assert (alarm.kind, alarm.task, alarm.method, alarm.value) == (
        AlarmKind.DRAFTER_FAILED,
        None,
        "suffix",
        2,
    )
    heard.now += FAILURE_MEMORY_S
    heard.report((method(2),))
    assert len(heard.cleared) == 1
    heard.report((method(3, retired=True),))
    heard.now += 10 * FAILURE_MEMORY_S
    heard.report((method(3, retired=True),))
    assert "is retired" in heard.alarms.raised[0].message
    assert heard.alarms.acknowledge(AlarmKind.DRAFTER_FAILED, None, "suffix")
    heard.report((method(3, retired=True),))
    assert heard.alarms.raised == []
    heard.report((method(4, retired=True),))
    assert len(heard.alarms.raised) == 1


def test_passes_outside_a_graph(heard: Heard) -> None:
    def after(num_replayed: int, num_eager: int) -> list[AlarmKind]:
        """What is raised once so many more have run, a few of them of a draft model."""
        counts["target"] = PassCounts(
            counts["target"].num_replayed + num_replayed,
            {"a tree": 1, "too many rows": counts["target"].eager["too many rows"] + num_eager},
        )
        heard.alarms.on_passes(counts)
        return [alarm.kind for alarm in heard.alarms.raised]

    counts = {
        "target": PassCounts(0, {"a tree": 1, "too many rows": 50}),
        "draft": PassCounts(90, {"a tree": 2}),
    }
    heard.alarms.on_passes(counts)  # what ran while models were loaded
    assert after(990, 10) == []
    assert after(500, 400) == [], "too few to judge"
    assert after(100, 0) == [AlarmKind.EAGER_PASSES]
    [alarm] = heard.raised
    assert alarm.value == 0.4
    assert alarm.message.startswith("40.0% of 1,000 passes ran outside a recorded graph")
    assert alarm.message.endswith("the commonest reason: too many rows (400)")
    assert after(999, 11) == [AlarmKind.EAGER_PASSES]
    assert after(995, 5) == []
    assert len(heard.raised) == len(heard.cleared) == 1
    assert after(900, 100) == [AlarmKind.EAGER_PASSES]
    assert heard.alarms.acknowledge(AlarmKind.EAGER_PASSES, None, None)
    assert after(10, 1) == []
    assert after(0, 1000) == [AlarmKind.EAGER_PASSES]
    counts["target"] = PassCounts(0, {"a tree": 0, "too many rows": 0})  # an engine that was started again
    assert after(0, 0) == [AlarmKind.EAGER_PASSES], "nothing is known of it yet"
    assert after(2000, 0) == []


def test_tasks_are_bounded_and_their_alarms_go_with_them(heard: Heard) -> None:
    for level in [0.6] * 200 + [0.4] * 200:
        heard.request(level, task="old")
    assert len(heard.raised) == 1
    for number in range(2 * MAX_TASKS):
        heard.request(task=f"task {number}")
        heard.request(task="busy")
    assert heard.alarms.num_tasks == MAX_TASKS
    assert heard.alarms.raised == []
    assert "no longer watched" in heard.cleared[0][1]
    busy = heard.alarms.acceptance("busy")
    assert busy is not None
    assert busy.num_learned == 100
    assert heard.alarms.acceptance("old") is None


def test_causes() -> None:
    rng = np.random.default_rng(2)

    def some(num: int, **changes: Any) -> list[Traits]:
        lengths = rng.lognormal(4.5, 0.6, num)
        base = [replace(TRAITS, num_prompt_tokens=int(length)) for length in lengths]
        return [replace(traits, **changes) for traits in base]

    before = some(100)
    assert suspected_causes(before, some(80)) == []
    assert suspected_causes(before, some(5, temperature=1.5)) == []  # too few to tell
    warm = [replace(TRAITS, temperature=0.5 + 0.1 * (number % 5)) for number in range(20)]
    warmer = [replace(traits, temperature=traits.temperature + 0.12) for traits in warm]
    assert suspected_causes(warm, warmer) == []  # far enough, but so few requests may differ by chance
    [cause] = suspected_causes(before, some(80, temperature=1.2))
    assert str(cause) == "temperature went from 0.70 to 1.20"
    [cause] = suspected_causes(before, some(80, num_output_tokens=200))
    assert str(cause) == "output length went from 60 tokens to 200 tokens"
    [cause] = suspected_causes(before, some(80, method="off"))
    assert str(cause) == "drafter went from eagle3 to off"
    [cause] = suspected_causes(before, some(40, structured=True) + some(60))
    assert str(cause) == "share of structured requests went from 0% to 40%"
