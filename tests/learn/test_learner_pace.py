"""When the learner runs: by what runs and waits, as a property of every course of events."""

from __future__ import annotations

import random

import pytest

from slipstream.learn.background.pace import BESIDE_SHARE, IDLE_S, SLICE_S, LearnerPace
from slipstream.models.cpu import threads


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeProcess:
    runs = True

    def pause(self) -> None:
        self.runs = False

    def resume(self) -> None:
        self.runs = True


def made(has_own_core: bool = False) -> tuple[LearnerPace, FakeProcess, Clock]:
    clock, process = Clock(), FakeProcess()
    return LearnerPace(process, has_own_core, clock=clock), process, clock


def test_it_is_stopped_with_the_first_step_and_goes_on_once_nothing_runs() -> None:
    pace, process, clock = made()
    pace.look(0, 0, 8)
    assert process.runs
    pace.step_begins()
    assert not process.runs
    clock.now_s += IDLE_S / 2
    pace.look(0, 0, 8)
    assert not process.runs, "the next request often follows at once"
    clock.now_s += IDLE_S
    pace.look(0, 0, 8)
    assert process.runs


@pytest.mark.parametrize("seed", range(20))
def test_beside_requests_it_has_its_share_and_no_more(seed: int) -> None:
    rng = random.Random(seed)
    pace, process, clock = made()
    pace.look(1, 0, 8)
    pace.step_begins()
    ran_s = worked_s = 0.0
    for _ in range(40_000):
        passed_s = rng.uniform(0.001, 0.02)
        ran_s += passed_s * process.runs
        worked_s += passed_s
        clock.now_s += passed_s
        if rng.random() < 0.7:
            pace.step_begins()
        if rng.random() < 0.8:
            pace.look(rng.randint(1, 4), 0, 8)
    most_s = 0.04  # a slice ends with the look after it
    assert ran_s <= BESIDE_SHARE * worked_s * (SLICE_S + most_s) / SLICE_S + SLICE_S
    assert ran_s >= 0.8 * BESIDE_SHARE * worked_s - SLICE_S


@pytest.mark.parametrize("has_own_core", [False, True])
def test_beside_many_requests_it_never_runs(has_own_core: bool) -> None:
    pace, process, clock = made(has_own_core)
    for running, waiting in ((5, 0), (1, 1), (0, 1), (8, 30)):
        pace.look(1, 0, 8)
        pace.step_begins()
        assert process.runs == has_own_core
        for _ in range(1000):
            clock.now_s += 0.02
            pace.look(running, waiting, 8)
            assert not process.runs
            pace.step_begins()
            assert not process.runs


def test_one_with_a_core_of_its_own_runs_beside_some() -> None:
    pace, process, clock = made(has_own_core=True)
    for _ in range(100):
        clock.now_s += 0.02
        pace.look(4, 0, 8)
        pace.step_begins()
        assert process.runs


def test_the_share_may_be_all_or_nothing() -> None:
    for share in (0.0, 1.0):
        clock, process = Clock(), FakeProcess()
        pace = LearnerPace(process, False, share, clock)
        pace.look(1, 0, 8)
        for _ in range(10_000):
            clock.now_s += 0.02
            pace.step_begins()
            pace.look(2, 0, 8)
            assert process.runs == bool(share)


def test_it_may_be_waited_for() -> None:
    """Within the body nobody stops it."""
    pace, process, clock = made()
    pace.step_begins()
    with pace.running():
        with pace.running():
            assert process.runs
            pace.step_begins()
            pace.look(9, 9, 8)
            assert process.runs
        assert process.runs
    assert not process.runs, "it is stopped again at once, in the middle of a step"
    clock.now_s += 1
    pace.look(0, 0, 8)
    clock.now_s += 2 * IDLE_S
    pace.look(0, 0, 8)
    with pace.running():
        pass
    assert process.runs, "nothing runs"


def test_after_a_long_step_it_waits_too() -> None:
    pace, process, clock = made()
    pace.step_begins()
    for _ in range(50):
        clock.now_s += 0.02
        pace.look(1, 0, 8)
    clock.now_s += IDLE_S / 4
    pace.look(0, 0, 8)
    assert not process.runs
    clock.now_s += IDLE_S
    pace.look(0, 0, 8)
    assert process.runs


def test_a_core_is_left_where_the_engine_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    assert threads.leaves_a_core(6)
    assert not threads.leaves_a_core(7)
    monkeypatch.setattr(threads, "available", lambda: 4)
    assert threads.leaves_a_core(None)
