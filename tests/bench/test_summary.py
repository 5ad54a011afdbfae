"""From runs to figures, on runs made by hand."""

from __future__ import annotations

import pytest
from bench_cases import NAMES, PROMPTS, answer, result_of, run, two_tasks

from slipstream.core.metrics.step import StepReport
from slipstream.tools.bench.engine.summary import summarise, timings
from slipstream.tools.bench.report.engine_tables import remarks, tables
from slipstream.tools.bench.result import EngineFigures


def cell(figures: list[EngineFigures], name: str, task: str | None = None) -> EngineFigures:
    [found] = [f for f in figures if (f.configuration, f.task) == (name, task)]
    return found


def test_speedups_by_task_and_over_all() -> None:
    figures = summarise(two_tasks(), NAMES, PROMPTS)
    assert cell(figures, NAMES[1], "a").speedup == pytest.approx(3.0)
    assert cell(figures, NAMES[1], "b").speedup == pytest.approx(1.0)
    overall = cell(figures, NAMES[1])
    assert overall.speedup == pytest.approx(3**0.5)
    assert overall.pooled_speedup == pytest.approx(7 / 3)
    assert overall.tokens_per_s == pytest.approx(14 / 3)
    off = cell(figures, "off")
    assert off.tokens_per_s == pytest.approx(14 / 7)
    assert (off.speedup, off.speedup_interval, off.identity, off.prediction) == (None,) * 4


def test_an_interval_needs_two_prompts_a_task() -> None:
    figures = summarise(two_tasks(), NAMES, PROMPTS)
    assert cell(figures, NAMES[1], "a").speedup_interval is not None
    assert cell(figures, NAMES[1], "b").speedup_interval is None
    assert cell(figures, NAMES[1]).speedup_interval is None


def test_acceptance_is_pooled_over_requests() -> None:
    figures = summarise(two_tasks(), NAMES, PROMPTS)
    a = cell(figures, NAMES[1]).acceptance
    assert (a.num_draft_tokens, a.num_accepted_tokens, a.num_wasted_tokens) == (13, 7, 6)
    assert a.rate == pytest.approx(7 / 13)
    assert a.length == pytest.approx(14 / 7)
    assert a.conditional == pytest.approx([5 / 7, 2 / 5])
    assert a.reached_per_position == [7, 5]
    off = cell(figures, "off").acceptance
    assert (off.rate, off.conditional, off.length) == (None, [], 1.0)


def test_texts_are_compared_token_by_token() -> None:
    same = cell(summarise(two_tasks(), NAMES, PROMPTS), NAMES[1]).identity
    assert same is not None
    assert (same.num_compared, same.num_identical, same.first_differing_token) == (3, 2, 1)
    [difference] = same.differences
    assert (difference.where, difference.task, difference.token, difference.num_times) == (
        "line 2",
        "b",
        1,
        1,
    )


def test_shares_and_prediction() -> None:
    overall = cell(summarise(two_tasks(), NAMES, PROMPTS), NAMES[1])
    assert overall.time_shares is not None
    assert overall.time_shares.draft == pytest.approx(0.6 / 3)
    assert overall.time_shares.verify == pytest.approx(1.5 / 3)
    assert overall.time_shares.other == pytest.approx(0.9 / 3)
    p = overall.prediction
    assert p is not None
    target_s = (1.0 + 0.5 + 2.0) / 3  # off's steps take half of its runs
    assert p.target_step_s == pytest.approx(target_s)
    assert (p.gamma, p.c, p.v) == (2, pytest.approx(0.1 / target_s), pytest.approx(0.5 / target_s))
    assert p.predicted_speedup == pytest.approx(2.0 / ((0.2 + 0.5) / target_s))
    assert p.efficiency == pytest.approx(7 / 3 / p.predicted_speedup)
    decode_off, decode_on = 0.9 * 7 / 11, 0.9 * 3 / 11
    assert overall.decode_speedup == pytest.approx(decode_off / decode_on)
    assert p.decode_efficiency == pytest.approx(overall.decode_speedup / p.predicted_speedup)


def test_latencies() -> None:
    overall = cell(summarise(two_tasks(), NAMES, PROMPTS), "off")
    assert overall.latency_s is not None
    assert overall.latency_s.p50 == 2.0
    assert overall.time_to_first_token_s is not None
    assert overall.time_to_first_token_s.p50 == pytest.approx(0.2)
    assert overall.time_per_output_token_s is not None
    assert overall.time_per_output_token_s.p50 == pytest.approx(0.6)  # of 1.8/3, 0.9/1, 3.6/7
    one_token = summarise([run(0, [answer(1, [5], 1.0)], 1.0)], NAMES, PROMPTS)
    assert one_token[0].time_per_output_token_s is None


def test_repeats_count_at_their_median() -> None:
    runs = [run(0, [answer(0, [1] * 10, 1.0)], wall_s, repeat=r) for r, wall_s in enumerate([1.0, 90.0, 1.2])]
    runs += [
        run(1, [answer(0, [1] * 10, 1.0)], wall_s, repeat=r) for r, wall_s in enumerate([0.6, 0.5, 80.0])
    ]
    figures = summarise(runs, NAMES, PROMPTS)
    assert cell(figures, "off").tokens_per_s == pytest.approx(10 / 1.2)
    assert cell(figures, NAMES[1]).speedup == pytest.approx(1.2 / 0.6)


def test_a_run_without_its_partner_is_not_compared() -> None:
    """After Ctrl-C between the two: the lone run's own figures stay, the pair's do not count it."""
    whole = two_tasks()
    cut = [*whole[:4], whole[5]]  # prompt 2 ran with the draft only
    overall = cell(summarise(cut, NAMES, PROMPTS), NAMES[1])
    assert overall.pooled_speedup == pytest.approx(3 / 2)
    assert overall.num_requests == 3
    assert overall.identity is not None
    assert overall.identity.num_compared == 2
    alone = cell(summarise([whole[1]], NAMES, PROMPTS), NAMES[1])
    assert (alone.speedup, alone.prediction, alone.decode_speedup) == (None, None, None)
    assert alone.tokens_per_s == pytest.approx(4.0)


def test_at_several_requests_at_once_tasks_share_the_clock() -> None:
    both = [answer(0, [1, 2], 1.0), answer(1, [3, 4], 2.0)]
    step = StepReport(2, 2, 20, 0, 0, 0.0, 1.0)
    runs = [run(number, both, 2.0 - number, concurrency=2, step=step) for number in (0, 1)]
    figures = summarise(runs, NAMES, PROMPTS)
    overall, task = cell(figures, NAMES[1]), cell(figures, NAMES[1], "a")
    assert overall.speedup == pytest.approx(2.0)
    assert overall.num_in_flight == pytest.approx(3.0)
    assert (task.speedup, task.tokens_per_s, task.time_shares, task.prediction) == (None,) * 4
    assert task.num_requests == 1
    assert task.latency_s is not None
    assert overall.prediction is not None
    assert overall.prediction.v == pytest.approx(1.0)


def test_timings_hold_every_run() -> None:
    found = timings(two_tasks(), NAMES)
    assert len(found) == 6
    assert (found[1].configuration, found[1].batch, found[1].wall_s) == (NAMES[1], 0, 1.0)
    assert (found[1].prompts, found[1].num_output_tokens, found[1].latency_s) == ([0], [4], [1.0])


def test_tables_write_a_dash_where_there_is_nothing() -> None:
    result = result_of(two_tasks()[:1], complete=False)
    grids = tables(result)
    assert len(grids) == 3
    for grid in grids:
        [row] = grid.rows
        assert row[0] == "off"
        assert "–" in row
        assert "0.00" not in row
    assert remarks(result)[0] == "interrupted: the figures are of the 1 runs that were made until then"
    assert remarks(result_of([], complete=False)) == ["interrupted before anything was measured"]
