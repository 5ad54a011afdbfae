"""The test of shifts: its stated rate of false alarms, its delay, and what follows an alarm."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from slipstream.control.monitor.drift import REFERENCE_SIZES, RESOLVE_REQUESTS, ShiftWatch
from slipstream.stats.shift import (
    FALSE_ALARM_RATE,
    MIN_SHIFT,
    Bets,
    Reference,
    ShiftTest,
    Value,
    mean,
)


def requests(num: int, level: float, seed: int, rho: float = 0.1) -> list[Value]:
    """Rates of requests of 5 to 60 tokens that differ by more than the luck of their tokens."""
    rng = np.random.default_rng(seed)
    strength = (1 - rho) / rho
    sizes = rng.integers(5, 61, num)
    accepted = rng.binomial(sizes, rng.beta(level * strength, (1 - level) * strength, num))
    return [Value(a / n, min(n, 32) / 32) for a, n in zip(accepted, sizes, strict=True)]


def watching(level: float = 0.6, seed: int = 0, **sides: bool) -> ShiftWatch:
    """One that has learned its whole reference."""
    watch = ShiftWatch(**sides)
    for item in requests(REFERENCE_SIZES[-1], level, seed):
        watch.add(item)
    assert watch.shift is None
    return watch


def delay(watch: ShiftWatch, items: list[Value]) -> int | None:
    for number, item in enumerate(items, start=1):
        watch.add(item)
        if watch.shift is not None:
            return number
    return None


def test_a_bet_is_fair_where_the_mean_is_the_bound() -> None:
    """The property that the stated rate stands on, enumerated exactly: on average no bet gains."""
    bound = 0.4
    outcomes = [(0.0, 0.3), (0.5, 0.6), (1.0, 0.1)]  # value, chance; their mean is the bound
    assert sum(value * chance for value, chance in outcomes) == pytest.approx(bound)
    for below in (True, False):
        for stake in range(3):
            average = 0.0
            for sequence in itertools.product(outcomes, repeat=3):
                bets = Bets(bound, 1.0, 0.05, below=below)
                bets.log_wealths = [100.0] * 3  # rich enough not to start anew
                for value, _ in sequence:
                    bets.add(Value(value))
                average += math.prod(chance for _, chance in sequence) * math.exp(
                    bets.log_wealths[stake] - 100
                )
            assert average == pytest.approx(1.0)


def test_the_reference_knows_how_sure_it_is() -> None:
    small, large = Reference.of(requests(50, 0.6, 1)), Reference.of(requests(800, 0.6, 1))
    assert large.mean == pytest.approx(0.6, abs=0.02)
    assert small.tolerance > 1.5 * large.tolerance >= 1.5 * MIN_SHIFT
    equal = Reference.of([Value(0.0)] * 100)
    assert equal.mean == 0
    assert equal.variance > 0
    assert math.isnan(mean([]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("moved", [-0.15, 0.15])
def test_a_shift_of_fifteen_points_is_noticed_in_time(seed: int, moved: float) -> None:
    watch = watching(seed=seed)
    noticed = delay(watch, requests(400, 0.6 + moved, 100 + seed))
    assert noticed is not None
    assert noticed <= 300
    assert watch.shift is not None
    assert watch.shift.before == pytest.approx(0.6, abs=0.04)
    assert watch.shift.after == pytest.approx(0.6 + moved, abs=0.08)
    assert watch.shift.num_requests <= noticed + 40


def test_steady_requests_raise_nothing() -> None:
    """40,000 requests of each kind; the bound is one alarm in 25,000."""
    assert FALSE_ALARM_RATE <= 1 / 25_000
    for level, rho in ((0.6, 0.1), (0.9, 0.2)):
        for seed in range(4):
            assert delay(ShiftWatch(), requests(10_000, level, seed, rho)) is None


def test_the_alarm_comes_at_the_stated_evidence() -> None:
    test, eager = (
        ShiftTest(Reference.of(requests(400, 0.6, 1)), rate=rate) for rate in (FALSE_ALARM_RATE, 0.1)
    )
    raised = []
    for number, item in enumerate(requests(300, 0.4, 2)):
        before = test.evidence
        if eager.add(item):
            raised.append(number)
        if test.add(item):
            assert before < 1 / FALSE_ALARM_RATE <= test.evidence
            assert number > raised[0] + 10
            return
    raise AssertionError("no alarm")


def test_suspicious_requests_do_not_improve_the_reference() -> None:
    watch = ShiftWatch()
    for item in [*requests(160, 0.6, 1), *requests(40, 0.4, 2)]:
        watch.add(item)
    assert watch.shift is None
    assert watch.evidence > 3
    assert watch.num_learned == 100
    assert watch.reference is not None
    assert watch.reference.mean > 0.57


def test_what_is_not_watched_for_raises_nothing() -> None:
    assert delay(watching(falls=False), requests(1000, 0.3, 5)) is None
    assert delay(watching(rises=False), requests(1000, 0.9, 5)) is None
    sure = ShiftTest(Reference.of([Value(1.0)] * 400), falls=False)
    assert sure.age == 0
    assert not any(sure.add(Value(1.0)) for _ in range(100))


def test_rare_events_are_a_shift_only_when_they_become_frequent() -> None:
    rng = np.random.default_rng(3)
    watch = ShiftWatch(falls=False)
    for cut in rng.random(400) < 0.02:
        watch.add(Value(float(cut)))
    assert delay(watch, [Value(float(cut)) for cut in rng.random(5000) < 0.02]) is None
    noticed = delay(watch, [Value(float(cut)) for cut in rng.random(500) < 0.2])
    assert noticed is not None
    assert noticed < 150


def test_the_alarm_ends_when_the_old_level_is_back() -> None:
    watch = watching()
    reference = watch.reference
    delay(watch, requests(400, 0.4, 1))
    assert watch.shift is not None
    for item in requests(200, 0.6, 2):
        watch.add(item)
    assert watch.shift is None
    assert watch.reference is reference
    assert delay(watch, requests(400, 0.4, 3)) is not None


def test_a_level_that_lasts_becomes_the_reference() -> None:
    watch = watching()
    noticed = delay(watch, requests(400, 0.4, 1))
    assert noticed is not None
    for item in requests(RESOLVE_REQUESTS - 1, 0.4, 2):
        watch.add(item)
    assert watch.shift is not None
    watch.add(Value(0.4))
    assert watch.shift is None
    assert watch.reference is not None
    assert watch.reference.mean == pytest.approx(0.4, abs=0.03)
    assert delay(watch, requests(2000, 0.4, 3)) is None
    assert delay(watch, requests(400, 0.6, 4)) is not None


def test_taking_note_takes_the_level_since_for_usual() -> None:
    watch = watching()
    delay(watch, requests(400, 0.3, 1))
    watch.resolve()
    assert watch.shift is None
    if watch.reference is None:  # too few requests since: it learns on
        assert 0 < watch.num_learned < REFERENCE_SIZES[0]
    for item in requests(100, 0.3, 2):
        watch.add(item)
    assert watch.reference is not None
    assert watch.reference.mean == pytest.approx(0.3, abs=0.05)
    watch.resolve()  # nothing to note
    assert watch.reference is not None


def test_a_slow_decline_is_noticed_too() -> None:
    """The reference stays: what creeps is compared with where it began."""
    watch = watching()
    items = [requests(1, 0.6 - 0.2 * step / 2000, step)[0] for step in range(2000)]
    assert delay(watch, items) is not None


def test_memory_is_bounded() -> None:
    watch = watching()
    for item in requests(3000, 0.6, 9):
        watch.add(item)
    assert REFERENCE_SIZES[-1] <= watch.num_kept <= 2 * REFERENCE_SIZES[-1]
