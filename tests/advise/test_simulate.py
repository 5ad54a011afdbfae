"""The simulated scheduler, with costs and drafts made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from advise_cases import FREE, chain, hand_made, linear, recorded, request

from slipstream.errors import RequestError
from slipstream.sampling.params import SamplingParams
from slipstream.tools.advise.candidates import OFF, Setting, make_candidates
from slipstream.tools.advise.costs import along, between
from slipstream.tools.advise.engines import make_recording_engine
from slipstream.tools.advise.simulate import always
from slipstream.tools.advise.step_costs import measure_costs
from tests.kit.tape import ENGINE, Tape

DRAFT = Setting(0, 4)


def test_off_takes_a_step_a_token() -> None:
    done = hand_made([request(10), request(4)], FREE).closed_loop([0, 1], 1, always(OFF), [])
    assert (done.num_tokens, done.num_request_steps, done.num_drafted) == (14, 14, 0)
    assert done.wall_s == 14
    assert done.acceptance_rate is None


def test_two_at_once_share_steps() -> None:
    done = hand_made([request(10), request(4)], FREE).closed_loop([0, 1], 2, always(OFF), [])
    assert done.wall_s == 10
    assert done.in_flight_s == 14


def test_a_chain_that_is_all_right_takes_one_step_for_each_five_tokens() -> None:
    known = request(11, chain(4, [4] * 11))
    done = hand_made([known], FREE).closed_loop([0], 1, always(DRAFT), [0])
    assert done.num_request_steps == 3  # 5 + 5 + 1
    assert done.num_accepted == 8
    assert done.tau == pytest.approx(11 / 3)


def test_a_shorter_depth_takes_the_first_levels_of_a_chain() -> None:
    known = request(6, chain(4, [2, 0, 0, 4, 0, 0]))
    simulator = hand_made([known], FREE)
    assert (
        simulator.closed_loop([0], 1, always(Setting(0, 4)), [0]).num_request_steps == 2
    )  # 3 tokens, 3 tokens
    one = simulator.closed_loop([0], 1, always(Setting(0, 1)), [0])
    assert one.num_request_steps == 4  # places 0 (2 tokens), 2 (1), 3 (2), 5 (1, nothing may be drafted)
    assert one.num_drafted == 3


def test_drafts_are_paid_for() -> None:
    known = request(11, chain(4, [0] * 11))
    costs = linear(1.0, 0.0, 0.1, {"draft": 0.05})
    done = hand_made([known], costs).closed_loop([0], 1, always(DRAFT), [0])
    # Ten steps draft: min(4, tokens left before the last) tokens each; the last one does not.
    drafted = 7 * 4 + 3 + 2 + 1
    assert done.num_drafted == drafted
    assert done.draft_s == pytest.approx(0.05 * drafted)
    assert done.wall_s == pytest.approx(11 + 0.1 * drafted + 0.05 * drafted)


def test_a_trace_waits_for_arrivals_and_for_room() -> None:
    simulator = hand_made([request(3), request(3)], FREE, max_requests=1)
    done = simulator.arrivals([(0, 5.0), (1, 6.0)], always(OFF), [])
    assert done.wall_s == 11
    assert done.busy_s == 6
    first, second = done.requests
    assert first.total_s == 3
    assert second.total_s == 5, "two seconds in the queue"


@pytest.mark.parametrize(("at_once", "reuses", "rows"), [(1, True, 40 + 20), (2, True, 80), (1, False, 80)])
def test_a_prompt_that_begins_like_an_earlier_one_is_computed_in_part(
    at_once: int, reuses: bool, rows: int
) -> None:
    first = replace(request(2), prompt_token_ids=list(range(40)))
    second = replace(request(2), prompt_token_ids=[*range(20), *range(50, 70)])
    a_second_a_row = replace(FREE, steps={1: ((0.0, 0.0),)}, prompts=((1000.0, 1000.0),))
    simulator = hand_made([first, second], a_second_a_row, reuses_prefixes=reuses)
    done = simulator.closed_loop([0, 1], at_once, always(OFF), [])
    assert done.wall_s == rows - 2  # a prompt's last row decodes


@pytest.mark.parametrize(("fast_prompts", "known"), [(False, 42 + 3), (True, 41)])
def test_an_answer_in_a_later_prompt_is_computed_again_with_fast_prompts(
    fast_prompts: bool, known: int
) -> None:
    first = replace(request(4), prompt_token_ids=list(range(42)), output_token_ids=[60, 61, 62, 63])
    second = replace(request(2), prompt_token_ids=[*range(42), 60, 61, 62, 63, 64])
    a_second_a_row = replace(FREE, steps={1: ((0.0, 0.0),)}, prompts=((1000.0, 1000.0),))
    simulator = hand_made([first, second], a_second_a_row, fast_prompts=fast_prompts)
    done = simulator.closed_loop([0, 1], 1, always(OFF), [])
    assert done.wall_s == 42 + 47 - known - 2


def test_the_last_row_of_a_known_prompt_is_computed() -> None:
    known = replace(request(2), prompt_token_ids=list(range(40)))
    done = hand_made([known, known], FREE).closed_loop([0, 1], 1, always(OFF), [])
    assert done.num_tokens == 4


def test_prompts_share_the_rows_that_are_left() -> None:
    simulator = hand_made([request(2, num_prompt=30), request(2, num_prompt=10)], FREE, max_rows=20)
    done = simulator.closed_loop([0, 1], 2, always(OFF), [])
    # Rows 10 and 10; then 1 and 19; then the longer prompt's last row, which decodes; then its last token.
    assert done.num_steps == 4


def test_between_measured_points_times_are_linear() -> None:
    points = ((1.0, 1.0), (3.0, 2.0))
    assert [along(points, at) for at in (0, 1, 2, 3, 5)] == [1, 1, 1.5, 2, 3]
    assert between([1, 4], [1.0, 2.5], 2) == pytest.approx(1.5)
    costs = linear(1.0, 0.5, 0.25, {})
    assert costs.step_s(2, 4) == pytest.approx(1 + 1 + 1)
    assert costs.step_s(16, 32) == pytest.approx(1 + 8 + 8)


def test_longer_contexts_cost_more() -> None:

    costs = replace(linear(1.0, 0.0, 0.0, {}), context_s=0.01)
    assert costs.step_s(2, context=50) == pytest.approx(2.0)


def test_a_load_that_never_runs_has_no_costs(tape: Tape) -> None:
    """Else costs of four requests would be those of one, drawn out."""
    lookups = make_candidates([], with_trees=False)
    sizes = {"kv_cache_bytes": 200 * tape.engine.model.kv_bytes_per_token, "max_model_len": 128}
    engine = make_recording_engine(replace(tape.job, candidates=lookups, engine_options={**ENGINE, **sizes}))
    known = recorded([request(30, num_prompt=40)])
    with pytest.raises(RequestError, match="4 requests never ran at once"):
        measure_costs(engine, lookups, known, SamplingParams(), [4], 0.01, lambda done, total: None)
