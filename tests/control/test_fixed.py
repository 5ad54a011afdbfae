"""A plan that is given: by task and load, on the policy and on the engine."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.control.fixed import FixedPlan
from slipstream.control.policy import Policy
from slipstream.control.types import NOTHING, Choice, PolicyDrafter, StepRequest
from slipstream.core.request import RequestOptions
from slipstream.draft.combine.auto import AutoOptions
from slipstream.draft.combine.rules import PlanRule
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

CHAIN, LOOKUP = PolicyDrafter("draft_model", 6, True), PolicyDrafter("suffix", 16, False, looks_up=True)
RULES = (
    PlanRule(drafter=0, num_speculative_tokens=2, max_requests=8),
    PlanRule(drafter=0, num_speculative_tokens=4, max_requests=2),
    PlanRule(drafter=1, task="code"),
    PlanRule(task="chat"),
)


def test_the_tightest_rule_holds() -> None:
    plan = FixedPlan(RULES, [CHAIN, LOOKUP])
    assert plan.choice("", 1) == plan.choice("sql", 2) == Choice(0, 4)
    assert plan.choice("", 3) == plan.choice("", 8) == Choice(0, 2)
    assert plan.choice("", 9) == NOTHING
    assert plan.choice("code", 100) == Choice(lookup=1, min_tokens=1)
    assert plan.choice("chat", 1) == NOTHING


def test_a_drafter_goes_no_deeper_than_it_can() -> None:
    plan = FixedPlan([PlanRule(drafter=0, num_speculative_tokens=9)], [CHAIN])
    assert plan.choice("", 1) == Choice(0, 6)


def test_the_policy_follows_the_plan() -> None:
    policy = Policy(
        [CHAIN, LOOKUP],
        adaptive=False,
        probe_share=0.0,
        pass_s=lambda rows: 0.01,
        fixed=FixedPlan(RULES, [CHAIN, LOOKUP]),
    )

    def choices(*tasks: str, limit: int = 16) -> list[Choice]:
        return policy.choose([StepRequest(i, task, limit) for i, task in enumerate(tasks)], 0)

    assert choices("", "chat") == [Choice(0, 4), NOTHING]
    assert choices("", "code", "sql") == [Choice(0, 2), Choice(lookup=1, min_tokens=1), Choice(0, 2)]
    assert choices("", limit=1) == [Choice(0, 1)]
    assert policy.announce(StepRequest(9, "sql", 0), 5, 5, 10) == 0
    assert policy.announce(StepRequest(9, "chat", 0), 5, 5, 10) < 0, "no drafter computes its prompt"


def test_rules_hold_for_tasks_that_statistics_keep_apart() -> None:
    """A server with keys keeps the statistics of each account's tasks under names of their own."""
    policy = Policy(
        [CHAIN, LOOKUP],
        adaptive=False,
        probe_share=0.0,
        pass_s=lambda rows: 0.01,
        fixed=FixedPlan(RULES, [CHAIN, LOOKUP]),
    )
    policy.read_tasks_by(lambda name: name.partition("/")[2])
    requests = [
        StepRequest(0, "team/chat", 16),
        StepRequest(1, "team/code", 16),
        StepRequest(2, "team/x", 16),
    ]
    assert policy.choose(requests, 0) == [NOTHING, Choice(lookup=1, min_tokens=1), Choice(0, 2)]
    assert policy.announce(StepRequest(9, "team/chat", 0), 5, 5, 10) < 0


def test_the_engine_drafts_as_the_plan_says(drafts_loaded_once: None) -> None:
    drafters = [{"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}]
    plan = [
        {"drafter": 0, "num_speculative_tokens": 3, "max_requests": 1},
        {"drafter": 0, "num_speculative_tokens": 1, "max_requests": 2},
        {"task": "plain"},
    ]
    config = {"method": "auto", "drafters": drafters, "plan": plan, "probe_share": 0.0}
    engine = make_engine(None, config, {"num_threads": 1, "kv_cache_bytes": 2**27, "max_num_seqs": 4})

    def depths(*tasks: str) -> list[int]:
        """The most draft tokens that each request had in a step."""
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        for number, task in enumerate(tasks):
            engine.add_request(str(number), [5, 6, 7, 8], params, RequestOptions(task=task))
        found: dict[str, int] = {}
        while engine.has_unfinished:
            for update in engine.step():
                if update.output is not None:
                    metrics = update.output.outputs[0].metrics
                    found[update.request_id] = len(metrics.proposed_per_position)
        return [found[str(number)] for number in range(len(tasks))]

    assert depths("") == [3]
    assert depths("plain") == [0]
    assert depths("", "") == [1, 1], "both run from the first step to the last"
    assert engine.integrity() == []


def test_the_text_is_the_targets_own_whatever_the_plan(drafts_loaded_once: None) -> None:
    """Requests end one after another, so rules change in the middle of answers."""
    drafters = [
        {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4},
        {"method": "suffix"},
    ]
    plan = [{"drafter": 0, "num_speculative_tokens": 3, "max_requests": 2}, {"drafter": 1}, {"task": "plain"}]
    options = {"num_threads": 1, "kv_cache_bytes": 2**27, "max_num_seqs": 4}
    engine = make_engine(None, {"method": "auto", "drafters": drafters, "plan": plan}, options)

    def texts(engine: Engine) -> dict[str, list[int]]:
        for number, task in enumerate(("", "plain", "", "code")):
            params = SamplingParams(temperature=0.8, max_tokens=6 + 6 * number, seed=number, ignore_eos=True)
            engine.add_request(str(number), [5, 6, 7, 8] * 4, params, RequestOptions(task=task))
        found: dict[str, list[int]] = {}
        while engine.has_unfinished:
            for update in engine.step():
                found.setdefault(update.request_id, []).extend(update.token_ids)
        return found

    off = make_engine(None, {"method": "off"}, options, engine)
    assert texts(engine) == texts(off)
    used = {each.name: each.num_steps for each in engine.control_report().methods}
    assert min(used.values()) > 0, used


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([], "plan is empty"),
        (["off"], "a plan is a list of rules"),
        ([{"drafter": 2}], "there are 1, counted from 0"),
        ([{"drafter": 0, "max_requests": 0}], "at least 1"),
        ([{"drafter": 0, "depth": 2}], "unknown plan rule key 'depth'"),
        ([{"drafter": 0}, {"max_requests": 4}, {}], "two plan rules are for any number of requests"),
        ([{"num_speculative_tokens": 2}], "no drafter; name one"),
    ],
)
def test_plans_that_are_none(plan: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoOptions(drafters=[{"method": "suffix"}], plan=plan)


def test_a_plan_needs_drafters() -> None:
    with pytest.raises(ConfigError, match="list them as drafters"):
        AutoOptions(plan=[{"drafter": 0}])
