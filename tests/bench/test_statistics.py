"""The arithmetic of the report against cases worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.metrics.step import StepReport
from slipstream.profiling.steps import CONTEXT_BIN, StepTally, cost_model
from slipstream.tools.bench.statistics import (
    PairedTimes,
    first_difference,
    geometric_mean_speedup,
    joined,
    percentiles,
    ratio,
    speedup_interval,
)

SECONDS = st.floats(0.01, 10)


def test_percentiles() -> None:
    found = percentiles([*range(101)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.num) == (50, 90, 99, 101)
    found = percentiles([1.0, 2.0])
    assert found is not None
    assert (found.p50, found.p90) == (1.5, pytest.approx(1.9))
    assert percentiles([]) is None


def test_speedup_is_of_the_sums() -> None:
    times = PairedTimes([30, 10], [1.0, 1.0], [30, 10], [2.0, 4.0])
    assert times.speedup == pytest.approx((40 / 2) / (40 / 6))
    # other texts: the speed counts, not the time
    assert PairedTimes([20], [1.0], [10], [1.0]).speedup == pytest.approx(2.0)


def test_geometric_mean_weighs_tasks_alike() -> None:
    fast, slow = PairedTimes([10], [1.0], [10], [4.0]), PairedTimes([1000], [1.0], [1000], [1.0])
    assert geometric_mean_speedup([fast, slow]) == pytest.approx(2.0)
    assert joined([fast, slow]).speedup == pytest.approx((1010 / 2) / (1010 / 5))
    assert geometric_mean_speedup([]) is None


def test_an_interval_needs_two_pairs_in_each_group() -> None:
    one, two = PairedTimes([1], [1], [1], [2]), PairedTimes([1, 1], [1, 1], [1, 1], [2, 2])
    assert speedup_interval([]) is None
    assert speedup_interval([one]) is None
    assert speedup_interval([two, one]) is None
    interval = speedup_interval([two, two])
    assert interval is not None
    assert interval.num_pairs == 4


def test_pairs_are_resampled_together() -> None:
    """Batches of very different lengths, each twice as fast: paired there is no doubt, unpaired there would be."""
    seconds = [0.1, 1.0, 10.0, 100.0]
    times = PairedTimes([1] * 4, seconds, [1] * 4, [2 * s for s in seconds])
    interval = speedup_interval([times])
    assert interval is not None
    assert (interval.low, interval.high) == (pytest.approx(2), pytest.approx(2))


def test_groups_are_resampled_apart() -> None:
    """Each task is certain, though the tasks differ: resampling across tasks would make the mean doubtful."""
    twice = PairedTimes([1, 1], [1, 1], [1, 1], [2, 2])
    eightfold = PairedTimes([1, 1], [1, 1], [1, 1], [8, 8])
    interval = speedup_interval([twice, eightfold])
    assert interval is not None
    assert (interval.low, interval.high) == (pytest.approx(4), pytest.approx(4))


def test_a_worked_interval() -> None:
    """Two pairs, speedups 1 and 3 at equal times: a quarter of the resamples holds the first twice."""
    interval = speedup_interval([PairedTimes([1, 3], [1, 1], [1, 1], [1, 1])])
    assert interval is not None
    assert (interval.low, interval.high) == (pytest.approx(1), pytest.approx(3))
    assert interval.confidence == 0.95


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=6))
def test_intervals_lie_within_the_pairs(pairs: list[tuple[float, float]]) -> None:
    on, off = [a for a, _ in pairs], [b for _, b in pairs]
    times = PairedTimes([5] * len(pairs), on, [5] * len(pairs), off)
    interval = speedup_interval([times])
    assert interval is not None
    speedups = [b / a for a, b in pairs]
    assert min(speedups) - 1e-9 <= interval.low <= interval.high + 1e-9 <= max(speedups) + 2e-9
    assert speedup_interval([times]) == interval


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_first_difference(first: list[int], second: list[int]) -> None:
    found = first_difference(first, second)
    if found is None:
        assert first == second
    else:
        assert first[:found] == second[:found]
        assert first[found : found + 1] != second[found : found + 1]


def test_a_ratio_over_nothing_is_none() -> None:
    assert ratio(3, 0) is None
    assert ratio(3, 2) == 1.5


# --- c and v -----------------------------------------------------------------------------------------------------


def step(
    draft_s: float,
    verify_s: float,
    depth: int = 0,
    context: int = 10,
    sequences: int = 1,
    rows: int | None = None,
) -> StepReport:
    rows = sequences if rows is None else rows
    return StepReport(sequences, rows, context * sequences, depth * sequences, depth, draft_s, verify_s)


def tally(*steps: StepReport) -> StepTally:
    found = StepTally()
    for one in steps:
        found.add(one)
    return found


def test_a_worked_cost_model() -> None:
    off = tally(step(0, 0.010), step(0, 0.014))  # T = 12 ms
    on = tally(step(0.009, 0.015, depth=3), step(0.003, 0.015, depth=1))
    model = cost_model(on, off)
    assert model is not None
    assert model.target_step_s == pytest.approx(0.012)
    assert model.gamma == 2
    assert model.c == pytest.approx(0.003 / 0.012)
    assert model.v == pytest.approx(1.25)
    assert model.predicted_speedup(3.5) == pytest.approx(3.5 / (2 * 0.25 + 1.25))
    assert (model.num_steps, model.num_unmatched_steps) == (2, 0)


def test_contexts_are_compared_with_their_like() -> None:
    """Off's contexts are mostly short, the configuration's mostly long: T is off's time where the latter are."""
    near, far = 10, 10 + CONTEXT_BIN
    off = tally(*[step(0, 0.010, context=near)] * 9, step(0, 0.030, context=far))
    on = tally(step(0, 0.010, depth=1, context=near), *[step(0, 0.030, depth=1, context=far)] * 3)
    model = cost_model(on, off)
    assert model is not None
    assert model.target_step_s == pytest.approx((0.010 + 3 * 0.030) / 4)
    assert model.v == pytest.approx(1.0)


def test_steps_without_their_like_are_left_out() -> None:
    off = tally(step(0, 0.010), step(0, 0.020, sequences=2), step(0, 9.0, rows=40))
    on = tally(step(0, 0.015, depth=2), step(0, 7.0, depth=2, sequences=3), step(0, 8.0, depth=2, rows=50))
    model = cost_model(on, off)
    assert model is not None
    assert (model.v, model.num_steps, model.num_unmatched_steps) == (pytest.approx(1.5), 1, 1)
    assert cost_model(tally(step(0, 1.0, sequences=5)), off) is None
    assert cost_model(StepTally(), off) is None


def test_without_drafts_there_is_no_c() -> None:
    model = cost_model(tally(step(0.001, 0.010)), tally(step(0, 0.010)))
    assert model is not None
    assert model.c is None
    assert model.gamma == 0
    assert model.predicted_speedup(1.0) == pytest.approx(1 / 1.1)  # looking in vain costs time as well


def test_all_steps_count_for_the_shares() -> None:
    found = tally(step(0.1, 0.2), step(0.3, 0.4, rows=9))
    found.merge(tally(step(0.5, 0.6)))
    assert found.draft_s == pytest.approx(0.9)
    assert found.verify_s == pytest.approx(1.2)
    assert sum(cell.num_steps for cell in found.cells.values()) == 2


@given(st.floats(0.1, 0.95), st.integers(1, 8), st.floats(0.01, 1), st.floats(1, 3))
def test_the_prediction_is_the_formula(alpha: float, gamma: int, c: float, v: float) -> None:
    """Steps made to measure give back τ/(γ·c + v)."""
    target_s = 0.02
    model = cost_model(tally(step(gamma * c * target_s, v * target_s, depth=gamma)), tally(step(0, target_s)))
    assert model is not None
    tau = sum(alpha**k for k in range(gamma + 1))
    assert math.isclose(model.predicted_speedup(tau), tau / (gamma * c + v), rel_tol=1e-9)
