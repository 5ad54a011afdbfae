"""From counted steps and costs to a plan; 'do not enable' where nothing pays."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from advise_cases import CANDIDATE, chain, hand_made, linear, recorded, request

from slipstream.config import SpeculativeConfig
from slipstream.draft.combine.auto import AutoOptions
from slipstream.profiling.break_even import acceptance_length
from slipstream.tools.advise.candidates import OFF, Candidate, Setting, setting_name
from slipstream.tools.advise.check import LEAST_ERROR, PREDICTION_ERROR, UNKNOWN_ERROR, CheckedSetting
from slipstream.tools.advise.costs import StepCosts
from slipstream.tools.advise.findings import AdviceFindings, find
from slipstream.tools.advise.predict import AdvisedPlan, Band, Rates, make_plan, predict
from slipstream.tools.advise.recording import NOT_DRAFTED, Recorded
from slipstream.tools.advise.served import serve_file, speculative_of
from slipstream.tools.advise.shortlist import BY_TASK, Shortlist
from slipstream.tools.bench.statistics import Interval

LOADS = (1, 4, 16)


def traffic(alpha: float, tasks: tuple[str, ...] = ("a",), num_tokens: int = 200) -> Recorded:
    """Answers of which each token is predicted with probability α, independently."""
    draw = random.Random(3)
    requests = []
    for task in tasks:
        for _ in range(4):
            hits = [draw.random() < (alpha if task != "hopeless" else 0.0) for _ in range(num_tokens)]
            right = [
                next((n for n in range(4) if place + n >= num_tokens or not hits[place + n]), 4)
                for place in range(num_tokens)
            ]
            requests.append(request(num_tokens, chain(4, right), task))
    return recorded(requests)


def rates(of: Recorded, costs: StepCosts) -> Rates:
    return Rates(hand_made(of.requests, costs), of, [CANDIDATE], costs)


def findings(of: Recorded, costs: StepCosts, plan: AdvisedPlan) -> AdviceFindings:
    return find(rates(of, costs), [CANDIDATE], costs, of, plan, LOADS)


CHEAP = linear(1.0, 0.001, 0.001, {"draft": 0.05})
BOUND = linear(1.0, 0.5, 0.5, {"draft": 0.05})
"""Rows cost more and more: at many requests nothing pays."""
DEAR = linear(1.0, 0.0, 0.9, {"draft": 0.9})


def test_counted_steps_are_the_right_formulas() -> None:
    """τ of independent tokens is (1 - α^(γ+1))/(1 - α): at 0.8 and 4 draft tokens 3.36, not 1 + αγ."""
    tau = rates(traffic(0.8, num_tokens=2000), CHEAP).counts(Setting(0, 4), None).tokens_per_step
    assert tau == pytest.approx(acceptance_length(0.8, 4), rel=0.03)
    assert abs(tau - (1 + 0.8 * 4)) > 0.5
    assert abs(tau - 1 / (1 - 0.8 * 4 / 5)) > 0.5


def test_an_accepted_end_token_counts_as_accepted() -> None:
    ends = replace(request(3, [(4, 4, 3), (4, 4, 2), (4, 4, 1)]), max_tokens=10)
    of = recorded([ends, replace(ends, task="b")])
    counts = rates(of, CHEAP).counts(Setting(0, 4), None)
    assert (counts.tokens_per_step, counts.drafted_per_step, counts.accepted_per_step) == (3, 4, 3)
    cells = predict(hand_made(of.requests, CHEAP), of, [CANDIDATE], rates(of, CHEAP), 1)
    told = [cell.acceptance_rate for cell in cells if cell.setting == "draft γ=4"]
    assert told == [0.75] * 3, "of all tasks together and of each"


def test_the_predicted_speedup_is_tau_over_the_measured_cost() -> None:
    """At α 0.8, γ 4, c 0.05 and v 1.004: 2.79. Formulas in circulation say 5 = 1/(1 - α) or less than 1."""
    gain = rates(traffic(0.8, num_tokens=2000), CHEAP).gain(Setting(0, 4), None, 1)
    assert gain == pytest.approx(acceptance_length(0.8, 4) / (4 * 0.05 + 1.004), rel=0.03)


def test_the_plan_drafts_where_it_pays_and_stops_where_it_does_not() -> None:
    known = rates(traffic(0.6), BOUND)
    plan = make_plan(known, ["a"], LOADS)
    first = plan.choose("a", 1)
    assert not first.is_off
    assert plan.choose("a", 16).is_off
    for number in range(1, 17):
        best = known.ranked(None, number)[0]
        assert known.rate(plan.choose("a", number), None, number) >= 0.97 * known.rate(best, None, number)
    found = findings(traffic(0.6), BOUND, plan)
    assert found.break_even_batch is not None
    assert plan.choose("a", found.break_even_batch - 1) != OFF
    assert plan.choose("a", found.break_even_batch) == OFF


def test_nothing_pays_is_do_not_enable() -> None:
    plan = make_plan(rates(traffic(0.7), DEAR), ["a"], LOADS)
    assert plan.is_off
    config = speculative_of(plan, [CANDIDATE])
    assert config.method == "off"
    assert 'spec = "off"' in serve_file(None, config, {}, [])
    found = findings(traffic(0.7), DEAR, plan)
    assert found.shortest_answer is None
    assert "cheaper drafter" in found.remedy


def test_a_little_too_little_acceptance_names_what_is_needed() -> None:
    costs = linear(1.0, 0.0, 0.05, {"draft": 0.25})
    of = traffic(0.2)
    plan = make_plan(rates(of, costs), ["a"], LOADS)
    assert plan.is_off
    remedy = findings(of, costs, plan).remedy
    assert "τ is at least" in remedy
    needed = float(remedy.split("at least ")[1].split(" ")[0])
    assert 1.2 < needed < 3


def test_nothing_pays_from_the_last_change_on() -> None:
    """Off at low loads is no break-even batch where more requests gain."""
    known = rates(traffic(0.8), CHEAP)
    in_the_middle = make_plan(known, ["a"], LOADS, {1: OFF, 4: Setting(0, 2), 16: OFF})
    batch = findings(traffic(0.8), CHEAP, in_the_middle).break_even_batch
    assert batch is not None
    assert not in_the_middle.choose("a", batch - 1).is_off
    assert all(in_the_middle.choose("a", number).is_off for number in range(batch, 40))
    at_the_end = make_plan(known, ["a"], LOADS, {1: OFF, 4: OFF, 16: Setting(0, 2)})
    assert findings(traffic(0.8), CHEAP, at_the_end).break_even_batch is None


def test_a_task_that_gains_is_no_load_at_which_nothing_pays() -> None:
    some = AdvisedPlan({None: (Band(None, OFF, 1.0),), "a": (Band(None, Setting(0, 2), 1.5),)})
    assert findings(traffic(0.8), CHEAP, some).break_even_batch is None


def test_break_even_is_of_steps_that_draft() -> None:
    """A drafter that mostly has nothing to say costs little a step; what it says must be right all the same."""
    drafts = [entry if place % 10 == 0 else NOT_DRAFTED for place, entry in enumerate(chain(4, [2] * 200))]
    of = recorded([request(200, drafts)])
    costs = linear(1.0, 0.0, 0.1, {"draft": 0.05})
    for one in findings(of, costs, make_plan(rates(of, costs), ["a"], LOADS)).break_evens:
        depth = int(one.setting.partition("γ=")[2])
        assert one.cost == pytest.approx(1 + 0.1 * depth * one.concurrency + 0.05 * depth)
        if one.concurrency > 1:
            continue
        assert one.acceptance is not None
        assert acceptance_length(one.acceptance, depth) == pytest.approx(one.cost)


def test_no_training_makes_a_lookup_pay() -> None:
    lookup = Candidate("draft", SpeculativeConfig("ngram"), (1, 2, 4))
    of, costs = traffic(0.1), linear(1.0, 0.0, 0.3, {"draft": 0.0})
    known = Rates(hand_made(of.requests, costs), of, [lookup], costs)
    plan = make_plan(known, ["a"], LOADS)
    assert plan.is_off
    remedy = find(known, [lookup], costs, of, plan, LOADS).remedy
    assert "τ" not in remedy
    assert "--spec draft:PATH" in remedy


def test_a_task_that_gains_nothing_has_rules_of_its_own() -> None:
    costs = linear(1.0, 0.0, 0.12, {"draft": 0.05})
    of = traffic(0.8, ("good", "hopeless"))
    plan = make_plan(rates(of, costs), of.tasks, LOADS)
    assert not plan.choose("good", 1).is_off
    assert plan.choose("hopeless", 1).is_off
    config = speculative_of(plan, [CANDIDATE])
    assert config.method == "auto"
    assert AutoOptions(**config.options).rules(), "the engine can read it"


def test_what_was_measured_decides_for_the_nearest_loads() -> None:
    plan = make_plan(rates(traffic(0.8), CHEAP), ["a"], LOADS, {1: OFF, 4: Setting(0, 2), 16: Setting(0, 1)})
    assert plan.choose("a", 1).is_off
    assert plan.choose("a", 4) == Setting(0, 2)
    assert plan.choose("a", 16) == Setting(0, 1)


def test_a_uniform_plan_needs_no_plan() -> None:
    plan = make_plan(rates(traffic(0.9), CHEAP), ["a"], LOADS, dict.fromkeys(LOADS, Setting(0, 2)))
    config = speculative_of(plan, [CANDIDATE])
    assert (config.method, config.options["num_speculative_tokens"]) == ("draft_model", 2)


def test_the_serve_file_is_what_serve_reads(tmp_path: object) -> None:
    import tomllib

    plan = make_plan(rates(traffic(0.6), BOUND), ["a"], LOADS)
    config = speculative_of(plan, [CANDIDATE])
    options = {"quantization": "int8", "num_threads": 2, "override_generation_config": {"top_k": 5}}
    text = serve_file("a 'model' 🚀", config, options, ["two\nlines"])
    written = tomllib.loads(text)
    assert (written["model"], written["quantization"], written["num_threads"]) == ("a 'model' 🚀", "int8", 2)
    assert json.loads(written["override_generation_config"]) == {"top_k": 5}
    assert SpeculativeConfig.from_mapping(json.loads(written["speculative_config"])) == config


def test_every_setting_is_predicted_for_every_task() -> None:
    of = traffic(0.8, ("good", "hopeless"))
    known = rates(of, CHEAP)
    cells = predict(hand_made(of.requests, CHEAP), of, [CANDIDATE], known, 4)
    assert {cell.setting for cell in cells} == {"off", "draft γ=1", "draft γ=2", "draft γ=4"}
    assert {cell.task for cell in cells} == {None, "good", "hopeless"}
    hopeless = {cell.setting: cell.speedup for cell in cells if cell.task == "hopeless"}
    assert max(hopeless, key=lambda name: hopeless[name]) == "off"


def checked(
    name: str, speedup: float | None, predicted: float | None = None, spread: float = 0.0, pairs: int = 3
) -> CheckedSetting:
    """A measured speedup whose interval goes from it times and over 1 + `spread`."""
    interval = (
        None if speedup is None else Interval(speedup / (1 + spread), speedup * (1 + spread), 0.95, pairs)
    )
    return CheckedSetting(name, 1, 1.0, 1.0, speedup, predicted or speedup, interval, pairs)


@pytest.mark.parametrize(
    ("of_best", "of_rival", "expected"),
    [(1.5, 1.2, "draft γ=4"), (1.3, 1.4, "draft γ=2"), (1.01, 0.9, "off"), (0.8, 0.7, "off")],
)
def test_the_measurement_decides(of_best: float, of_rival: float, expected: str) -> None:
    of = traffic(0.9)
    known = rates(of, CHEAP)
    shortlist = Shortlist(
        [CANDIDATE], hand_made(of.requests, CHEAP), known, of, make_plan(known, ["a"], LOADS)
    )
    best, rival = shortlist.settings_at(1)
    names = {best: "draft γ=4", rival: "draft γ=2"}
    assert best == Setting(0, 4)
    measured = [
        checked("off", None),
        checked("draft γ=4", of_best),
        checked(f"draft γ={rival.depth}", of_rival),
    ]
    advised = shortlist.decide(1, measured).setting
    assert advised == expected.replace(names[rival], f"draft γ={rival.depth}")


@pytest.mark.parametrize(
    ("of_best", "of_rival", "expected"),
    [
        # Three noisy pairs beside a prediction that says that it pays, and one that says that it does not.
        ((0.97, 1.20, 0.25), (0.9, 0.9, 0.02), 4),
        ((1.25, 0.92, 0.30), (0.9, 0.9, 0.02), None),
        # A rival that was lucky.
        ((1.10, 1.20, 0.10), (1.25, 1.02, 0.30), 4),
        # What is measured well decides against any prediction.
        ((0.97, 1.20, 0.01), (0.9, 0.9, 0.02), None),
        ((1.10, 1.30, 0.01), (1.25, 1.05, 0.01), 2),
    ],
)
def test_few_noisy_pairs_do_not_outweigh_the_prediction(
    of_best: tuple[float, float, float], of_rival: tuple[float, float, float], expected: int | None
) -> None:
    """Each is the measured speedup, the predicted one and the spread of the interval."""
    of = traffic(0.9)
    known = rates(of, CHEAP)
    shortlist = Shortlist(
        [CANDIDATE], hand_made(of.requests, CHEAP), known, of, make_plan(known, ["a"], LOADS)
    )
    best, rival = shortlist.settings_at(1)
    measured = [
        checked("off", None),
        checked(setting_name(best, [CANDIDATE]), *of_best),
        checked(setting_name(rival, [CANDIDATE]), *of_rival),
    ]
    advised = shortlist.decide(1, measured)
    wanted = {4: best, 2: rival, None: OFF}[expected]
    assert advised.setting == setting_name(wanted, [CANDIDATE])
    told = advised.as_json()["checked"]
    assert told[0]["weighed_speedup"] is None
    assert told[1]["weighed_speedup"] == measured[1].weighed_speedup


def test_weights_are_the_inverse_squares_of_the_errors() -> None:
    wide = checked("one", 1.3, 1.0, spread=0.2, pairs=3)
    bootstrap = math.log(1.2) / 1.96
    assert wide.measured_error == pytest.approx(bootstrap * math.sqrt(3 / 2) * 4.303 / 1.96, rel=1e-3)
    weights = wide.measured_error**-2, PREDICTION_ERROR**-2
    assert wide.weighed_speedup == pytest.approx(1.3 ** (weights[0] / sum(weights)))
    many = checked("one", 1.3, 1.0, spread=0.2, pairs=1000)
    assert many.measured_error == pytest.approx(bootstrap, rel=5e-3)
    assert checked("one", 1.3, 1.0, pairs=3).measured_error == LEAST_ERROR
    single = CheckedSetting("one", 1, 1.0, 1.0, 1.3, 1.0, None, 1)
    assert single.measured_error == UNKNOWN_ERROR
    assert single.weighed_speedup is not None
    assert 1.0 < single.weighed_speedup < 1.1


@pytest.mark.parametrize(
    ("of_best", "by_task", "kept"), [(1.01, 1.015, False), (1.2, 1.1, False), (1.2, 1.3, True)]
)
def test_settings_by_task_must_gain_as_much_as_any_other(of_best: float, by_task: float, kept: bool) -> None:
    of = traffic(0.9)
    known = rates(of, CHEAP)
    shortlist = Shortlist(
        [CANDIDATE], hand_made(of.requests, CHEAP), known, of, make_plan(known, ["a"], LOADS)
    )
    measured = [checked("off", None), checked("draft γ=4", of_best), checked("draft γ=2", 0.9)]
    shortlist.decide(1, [*measured, checked(BY_TASK, by_task)])
    assert shortlist.decisions.keeps_tasks is kept


def test_without_a_measurement_the_plan_is_what_is_told() -> None:
    of = traffic(0.9)
    known = rates(of, CHEAP)
    shortlist = Shortlist(
        [CANDIDATE], hand_made(of.requests, CHEAP), known, of, make_plan(known, ["a"], LOADS)
    )
    told = {load: shortlist.decide(load, []).setting for load in LOADS}
    plan = make_plan(known, ["a"], LOADS, shortlist.decisions.settings)
    assert {load: setting_name(plan.choose("a", load), [CANDIDATE]) for load in LOADS} == told
    assert shortlist.decisions.settings.keys() == set(LOADS)
    assert shortlist.decisions.keeps_tasks
