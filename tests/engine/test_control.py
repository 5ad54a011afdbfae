"""Control in the real engine: whatever is chosen the text stays, and a drafter that misbehaves harms nobody."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.control.policy import Policy
from slipstream.control.types import NO_DRAFTER, NOTHING, Choice, StepRequest
from slipstream.core.proposal import Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter
from slipstream.draft.guarded.guard import FIRST_PAUSE_S
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError, RequestError
from slipstream.testing.stub_drafters import OracleOptions
from tests.kit.engines import MakeLLM

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 5}
AUTO = {"method": "auto", "drafters": [{"method": "suffix"}, DRAFT]}
PARAMS = SamplingParams(temperature=0, max_tokens=24)
HANGS = f"{__name__}:HangingDrafter"
release_all = threading.Event()


class HangingDrafter(Drafter):
    """Never answers from its third call on, unless the test is over."""

    Options = OracleOptions
    traits = DrafterTraits(max_nodes=2)

    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self.calls = 0

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        self.calls += 1
        if self.calls >= 3:
            release_all.wait(250)
        return [Proposal.chain([7] * min(budget, 2)) for budget in budgets]


class BusyDrafter(HangingDrafter):
    """Computes for ever."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        while not release_all.is_set():
            pass
        return [Proposal()] * len(sequences)


PROBS = torch.full((2, 4096), 1 / 4096)
GARBAGE: dict[str, Any] = {
    "no proposal": (5, 6),
    "nothing": None,
    "float parents": Proposal((5, 6), (-1, 0.0)),  # type: ignore[arg-type]
    "bool tokens": Proposal((True, 6), (-1, 0)),
    "huge token": Proposal((5, 2**40), (-1, 0)),
    "kind by name": Proposal((5, 6), (-1, 0), "one_hot"),  # type: ignore[arg-type]
    "numpy probs": Proposal((5, 6), (-1, 0), ProposalKind.SAMPLED_IID, PROBS.numpy()),  # type: ignore[arg-type]
    "short probs": Proposal((5, 6), (-1, 0), ProposalKind.SAMPLED_IID, PROBS[:, :0]),
    "negative probs": Proposal((5, 6), (-1, 0), ProposalKind.SAMPLED_IID, -PROBS),
    "unnormalised probs": Proposal((5, 6), (-1, 0), ProposalKind.SAMPLED_IID, 2 * PROBS),
    "probs of nothing": Proposal((5, 6), (-1, 0), ProposalKind.SAMPLED_IID, PROBS * float("nan")),
}
what_to_say: list[str] = []


class GarbageDrafter(HangingDrafter):
    """Says what it is told to."""

    traits = DrafterTraits(max_nodes=2, kinds=frozenset(ProposalKind))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        return [GARBAGE[what_to_say[0]]] * len(sequences)


class RaisesOnceDrafter(HangingDrafter):
    """Fails to learn, once."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        return [Proposal.chain([7] * min(budget, 1)) for budget in budgets]

    def observe(self, observations: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("once")


@pytest.fixture(autouse=True)
def let_go() -> Any:
    release_all.clear()
    yield
    release_all.set()


def texts(
    llm: LLM, prompts: Seq[list[int]], params: SamplingParams = PARAMS, **options: Any
) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params, **options)]


def random_choices(seed: int) -> Any:
    """In the place of the policy's own choice: anything that the contract allows, anew in every step."""
    rng = random.Random(seed)

    def chosen_now(self: Policy, requests: Seq[StepRequest], num_prompt_rows: int) -> list[Choice]:
        choices = []
        for request in requests:
            member = rng.choice([NO_DRAFTER, *range(len(self.drafters))])
            lookup = rng.choice([NO_DRAFTER, 0])
            depth = rng.randint(1, max(request.limit, 1))
            chain = member != NO_DRAFTER and request.limit > 0
            choices.append(
                Choice(member if chain else NO_DRAFTER, depth if chain else 0, lookup, rng.randint(1, 4))
                if request.limit
                else Choice(NO_DRAFTER, 0)
            )
        return choices

    return chosen_now


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_any_choice_gives_the_same_text(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members change from step to step, drafts have to catch up, and a request may rest for a while."""
    monkeypatch.setattr(Policy, "choose", random_choices(3))
    third = {**DRAFT, "tree_top_k": 2, "num_draft_nodes": 5}
    config = {"method": "auto", "drafters": [{"method": "suffix"}, DRAFT, third], "verifier": verifier}
    llm = make_llm(config, max_num_seqs=6)
    drafted: set[str] = set()
    llm.engine.on_observe = lambda seen: drafted.update(one.method for one in seen if len(one.proposal))
    expected = texts(plain, prompts[:12])
    assert texts(llm, prompts[:6], task="left") + texts(llm, prompts[6:12], task="right") == expected
    assert llm.engine.stats().num_draft_failures == 0
    assert drafted == {"suffix", "draft_model-1", "draft_model-2"}
    assert {task.task for task in llm.engine.control_report().tasks} == {"left", "right"}
    if verifier == "coupled":
        seeded = SamplingParams(temperature=0.9, max_tokens=24, seed=5)
        assert texts(llm, prompts[:12], seeded) == texts(plain, prompts[:12], seeded)


def test_auto_says_the_same_and_learns(make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]) -> None:
    llm = make_llm(AUTO, max_num_seqs=4)
    expected = texts(plain, prompts[:8])
    for _ in range(2):
        for task in ("left", "right"):
            assert texts(llm, prompts[:8], task=task) == expected
    report = llm.engine.control_report()
    assert report.adaptive
    assert [method.name for method in report.methods] == ["suffix", "draft_model"]
    assert sum(method.num_steps for method in report.methods) > 0
    # Whose drafts are tried is decided by times, which differ from run to run.
    assert {task.task for task in report.tasks} <= {"left", "right"}
    assert 0 <= report.probe_share < 0.2
    assert llm.engine.stats().num_drafted_sequences == 0


def test_steps_by_a_cached_plan_say_the_same(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are short here, so a plan holds for many; whoever is drafted for stays so."""
    searches: Counter[bool] = Counter()
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    llm = make_llm(AUTO, max_num_seqs=3)
    policy = llm.engine.drafting.policy
    assert policy is not None
    llm.engine.on_step = lambda step: searches.update([policy.planning_s > 0])
    for _ in range(2):
        assert texts(llm, prompts[:6], params) == texts(plain, prompts[:6], params)
    assert searches[False] > searches[True] > 0
    assert any(method.num_steps for method in llm.engine.control_report().methods)
    assert llm.engine.integrity() == []


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_a_request_may_name_its_drafter(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(AUTO)
    used: Counter[str] = Counter()
    llm.engine.on_observe = lambda seen: used.update(one.method for one in seen)
    monkeypatch.setattr(Policy, "choose", lambda self, requests, rows: [NOTHING] * len(requests))
    assert texts(llm, prompts[:6], draft_method=method) == texts(plain, prompts[:6])
    assert used.keys() <= {method, "off"}
    assert used[method] > 5 * used["off"], "even where it does not pay"


@pytest.mark.parametrize(("wanted", "members"), [("draft_model", {0, 1}), ("draft_model-2", {1})])
def test_of_two_drafters_of_one_method_either_or_one_may_be_asked_for(
    make_llm: MakeLLM,
    prompts: list[list[int]],
    wanted: str,
    members: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_draft: list[frozenset[int] | None] = []
    choose = Policy.choose

    def recorded(self: Policy, requests: Seq[StepRequest], num_prompt_rows: int) -> list[Choice]:
        may_draft.extend(request.allowed for request in requests)
        return choose(self, requests, num_prompt_rows)

    monkeypatch.setattr(Policy, "choose", recorded)
    llm = make_llm({"method": "auto", "drafters": [DRAFT, {**DRAFT, "num_speculative_tokens": 2}]})
    assert llm.engine.draft_methods == ["draft_model-1", "draft_model-2", "draft_model"]
    used: set[str] = set()
    llm.engine.on_observe = lambda seen: used.update(one.method for one in seen)
    llm.generate(prompts[:6], PARAMS, draft_method=wanted)
    assert set(may_draft) == {frozenset(members)}
    assert used <= {"off", *(f"draft_model-{member + 1}" for member in members)}


def test_a_request_may_forbid_drafts(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    llm = make_llm(AUTO)
    outputs = llm.generate(prompts[:4], PARAMS, max_draft_tokens=0)
    assert all(output.metrics.num_draft_tokens == 0 for output in outputs)


def test_an_unknown_drafter_is_refused(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    with pytest.raises(RequestError, match="draft_method must be 'suffix' or 'draft_model' on this engine"):
        make_llm(AUTO).generate(prompts[0], PARAMS, draft_method="eagle3")


@pytest.mark.parametrize("share", [-0.1, 0.6, "much"])
def test_a_share_that_cannot_be_is_refused(make_llm: MakeLLM, share: Any) -> None:
    with pytest.raises(ConfigError, match="probe_share must be"):
        make_llm({**DRAFT, "probe_share": share})


def test_probes_measure_what_a_fixed_drafter_gains(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]
) -> None:
    """A few steps go without drafts; the text does not show it, the report does."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    llm = make_llm({**DRAFT, "probe_share": 0.5})
    rests: list[bool] = []
    llm.engine.on_step = lambda step: rests.append(step.only_decodes and step.num_draft_tokens == 0)
    expected = texts(plain, prompts[:3], params)
    for _ in range(5):
        assert texts(llm, prompts[:3], params) == expected
    report = llm.engine.control_report()
    assert not report.adaptive
    assert report.realised is not None
    assert report.realised.low <= report.realised.ratio <= report.realised.high
    assert sum(rests) >= 4 * report.realised.num_pairs
    assert 0 < report.probe_share < 0.5
    assert [method.name for method in report.methods] == ["draft_model"]


def test_without_a_share_nothing_is_probed(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    llm = make_llm(DRAFT)
    assert llm.engine.drafting.policy is None
    llm.generate(prompts[0], PARAMS)
    report = llm.engine.control_report()
    assert (report.adaptive, report.speculating, report.realised) == (False, True, None)
    assert make_llm().engine.control_report().methods == ()


@pytest.mark.parametrize("drafter", ["HangingDrafter", "BusyDrafter"])
def test_a_drafter_that_hangs_is_left(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], drafter: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm({"method": f"{__name__}:{drafter}", "texts": [[1]], "draft_timeout_s": 0.3})
    assert texts(llm, prompts[:4]) == texts(plain, prompts[:4])
    assert not release_all.is_set(), "the drafter has not come back, and the answers are there"
    [method] = llm.engine.control_report().methods
    assert method.retired
    assert method.num_failures >= 1
    assert sum("is not called for 30 s" in record.message for record in caplog.records) == 1
    assert texts(llm, prompts[4:6]) == texts(plain, prompts[4:6]), "and later requests come without it"


def test_one_member_that_hangs_leaves_the_others(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]
) -> None:
    hangs = {"method": HANGS, "texts": [[1]]}
    llm = make_llm({"method": "auto", "drafters": [hangs, DRAFT]})
    llm.engine.drafting.guards[0].timeout_s = 0.3  # the other one may take its time
    for _ in range(3):
        assert texts(llm, prompts[:6]) == texts(plain, prompts[:6])
    bad, good = llm.engine.control_report().methods
    assert (bad.retired, good.retired) == (True, False)
    assert good.num_steps > 0


def test_a_drafter_that_always_fails_is_asked_no_more(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]
) -> None:
    llm = make_llm({"method": "slipstream.testing.stub_drafters:RaisingDrafter", "texts": [], "at_call": 1})
    for _ in range(2):
        assert texts(llm, prompts[:20]) == texts(plain, prompts[:20])
    [method] = llm.engine.control_report().methods
    assert method.retired
    assert method.num_failures == 16


def test_a_late_answer_retires_even_our_own_drafters_for_a_while(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]
) -> None:
    llm = make_llm({"method": "ngram", "draft_timeout_s": 1e-9})
    assert texts(llm, prompts[:2]) == texts(plain, prompts[:2])
    assert llm.engine.control_report().methods[0].retired
    guard = llm.engine.drafting.guards[0]
    guard.timeout_s, guard.clock = 120.0, lambda: time.monotonic() + FIRST_PAUSE_S
    assert texts(llm, prompts[:2]) == texts(plain, prompts[:2])
    assert not llm.engine.control_report().methods[0].retired, "the pause is over"


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_not_used(make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], what: str) -> None:
    what_to_say[:] = [what]
    spec = {"method": f"{__name__}:GarbageDrafter", "texts": [[1]], "verifier": "rejection"}
    llm = make_llm(spec)
    assert texts(llm, prompts[:4]) == texts(plain, prompts[:4])
    assert llm.engine.stats().num_draft_failures >= 4
    assert sum(output.metrics.num_draft_tokens for output in llm.generate(prompts[:2], PARAMS)) == 0


def test_one_failure_of_a_large_batch_is_one_failure(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]
) -> None:
    llm = make_llm({"method": f"{__name__}:RaisesOnceDrafter", "texts": [[1]]})
    assert texts(llm, prompts[:20]) == texts(plain, prompts[:20])
    assert llm.engine.stats().num_draft_failures >= 16
    assert not llm.engine.control_report().methods[0].retired
    assert llm.generate(prompts[0], PARAMS)[0].metrics.num_draft_tokens > 0


@pytest.mark.parametrize("spec", [AUTO, {**DRAFT, "probe_share": 0.1}], ids=["auto", "probed"])
def test_a_repeated_seed_meets_other_coins(
    make_llm: MakeLLM, prompts: list[list[int]], spec: dict[str, Any]
) -> None:
    """What the controller learned of an earlier request hangs on the coins of its seed, and decides what is drafted."""
    llm = make_llm({**spec, "verifier": "rejection"})
    nonces: set[int] = set()
    llm.engine.on_observe = lambda seen: nonces.update(one.sequence.nonce for one in seen)
    for _ in range(3):
        llm.generate(prompts[0], SamplingParams(temperature=1.0, max_tokens=3, seed=7))
    assert len(nonces) == 3
    assert 0 not in nonces
