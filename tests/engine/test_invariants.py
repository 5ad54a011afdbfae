"""An idle engine holds nothing, and `integrity` says so of the drafter too; tenants share nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from slipstream import LLM, SamplingParams, Update
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.core.request import RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter
from slipstream.draft.lookup.ngram import NgramDrafter
from slipstream.draft.lookup.suffix import SuffixDrafter
from slipstream.draft.model.draft_model import DraftModelDrafter
from slipstream.kv.segments import SegmentAccounting
from tests.kit.engines import MakeLLM

DRAFT: dict[str, Any] = {"method": "draft_model", "model": EMBEDDED_DRAFT}
SPECS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "token-recycling": {"method": "token_recycling"},
    "siblings": {"method": "siblings", "share": "tenant"},
    "lookahead": {"method": "lookahead"},
    "jacobi": {"method": "jacobi"},
    "draft": DRAFT,
    "draft-tree": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 8},
}
KEEPS_NOTHING = ("token-recycling",)
"""Drafters without state of single sequences."""


def leaky(drafter: type[Drafter]) -> Any:
    """The drafter, but it forgets no sequence."""
    return type(f"Leaky{drafter.__name__}", (drafter,), {"release": lambda self, sequence: None})


LeakyNgram, LeakySuffix, LeakyDraft = map(leaky, (NgramDrafter, SuffixDrafter, DraftModelDrafter))


class HalfLeakyDraft(DraftModelDrafter):
    """Gives its slots back, but not the rest."""

    def release(self, sequence: Sequence) -> None:
        self.cache.accounting.close(sequence.id)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LeakyNgram", {}),
        ("LeakySuffix", {}),
        ("LeakyDraft", {"model": EMBEDDED_DRAFT}),
        ("HalfLeakyDraft", {"model": EMBEDDED_DRAFT}),
    ],
)
@pytest.mark.parametrize("way", ["finished", "aborted"])
def test_a_drafter_that_forgets_no_sequence_is_named(
    prompts: list[list[int]], name: str, options: dict[str, Any], way: str
) -> None:
    engine = LLM(
        speculative_config={"method": f"{__name__}:{name}", **options}, kv_cache_bytes=40 * 2**20
    ).engine
    for number in range(2):
        engine.add_request(str(number), prompts[number], SamplingParams(max_tokens=16, ignore_eos=True))
    engine.step()
    engine.step()
    assert not [fault for fault in engine.integrity() if "nothing runs" in fault], "still under way"
    if way == "finished":
        while engine.has_unfinished:
            engine.step()
    else:
        engine.abort("0")
        engine.abort("1")
    assert [fault for fault in engine.integrity() if "2 sequences of the drafter are held" in fault]


@pytest.mark.parametrize("name", SPECS)
def test_every_drafter_forgets_who_finished_was_aborted_or_preempted(
    plain: LLM, prompts: list[list[int]], name: str
) -> None:
    chosen = sorted(prompts, key=len)[:6]
    per_token = plain.engine.model.kv_bytes_per_token
    bounds = {"kv_cache_bytes": int(500 * 1.2) * per_token, "max_model_len": 220}
    engine = LLM(speculative_config=SPECS[name], **bounds).engine
    held: list[int] = []
    preempted: set[int] = set()
    for number, prompt in enumerate(chosen):
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=80, ignore_eos=True)
        engine.add_request(str(number), prompt, params)
    plan = engine.scheduler.plan

    def spy() -> Any:
        result = plan()
        preempted.update(sequence.id for sequence in result.preempted)
        return result

    engine.scheduler.plan = spy  # type: ignore[method-assign]
    while sum(engine.is_unfinished(str(number)) for number in range(6)) > 2:
        engine.step()
        running = engine.stats().num_running
        held.append(engine.drafter.num_held())
        assert held[-1] <= running, "the drafter keeps state only for those that run"
    assert preempted
    assert max(held) >= (0 if name in KEEPS_NOTHING else 2)
    for number in range(6):
        engine.abort(str(number))
    assert engine.drafter.num_held() == 0
    assert engine.integrity() == []


@pytest.mark.parametrize("name", [None, *SPECS])
def test_a_tenants_prefix_is_nobody_elses(
    make_llm: MakeLLM, prompts: list[list[int]], name: str | None
) -> None:
    llm = make_llm(SPECS[name] if name else None)
    prompt = max(prompts, key=len)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    reference = llm.generate(prompt, params, tenant="a")[0]
    assert reference.metrics.num_cached_tokens == 0
    for tenant, cached in (("b", False), ("a", True), ("", False), ("b", True), ("A", False)):
        output = llm.generate(prompt, params, tenant=tenant)[0]
        assert (output.metrics.num_cached_tokens > 0) == cached, tenant
        assert output.outputs[0].token_ids == reference.outputs[0].token_ids


def test_tenants_that_run_together_share_nothing(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    engine = make_llm(DRAFT).engine
    prompt = max(prompts, key=len)
    cached: dict[str, int] = {}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    def note(update: Update) -> None:
        if update.output is not None:
            cached[update.request_id] = update.output.metrics.num_cached_tokens

    for name, tenant in (("first", "a"), ("second", "b"), ("third", "a")):
        engine.add_request(name, prompt, params, RequestOptions(tenant=tenant), on_update=note)
        engine.step()
        engine.step()
        assert not cached, "all three run together"
    while engine.has_unfinished:
        engine.step()
    assert cached == {"first": 0, "second": 0, "third": len(prompt) - 1}


def test_the_draft_models_cache_keeps_tenants_apart(
    make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(DRAFT)
    drafter = llm.engine.drafter
    assert isinstance(drafter, DraftModelDrafter)
    opened: list[int | None] = []

    def spy(
        self: SegmentAccounting, owner: int, token_ids: Seq[int], tenant: str = "", reuse: bool = True
    ) -> int | None:
        cached = open_(self, owner, token_ids, tenant, reuse)
        if self is drafter.cache.accounting:
            opened.append(cached)
        return cached

    open_ = SegmentAccounting.open
    monkeypatch.setattr(SegmentAccounting, "open", spy)
    prompt = max(prompts, key=len)
    for tenant in ("a", "b", "a", "b", ""):
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), tenant=tenant)
    assert opened == [0, 0, len(prompt) - 1, len(prompt) - 1, 0]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_an_answer_is_proposed_to_its_own_tenant_only(
    make_llm: MakeLLM, prompts: list[list[int]], tree: bool
) -> None:
    llm = make_llm({"method": "suffix", "tree": tree})
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def drafted(tenant: str) -> list[tuple[int, int]]:
        outputs = [llm.generate(prompt, params, tenant=tenant)[0] for prompt in prompts[:6:3]]
        return [(o.metrics.num_draft_tokens, o.metrics.num_accepted_tokens) for o in outputs]

    cold = drafted("a")
    assert drafted("b") == cold, "what a was told is unknown to b"
    assert drafted("") == cold
    warm = drafted("a")
    assert all(now[1] > before[1] + 5 for now, before in zip(warm, cold, strict=True))
    assert drafted("b") == warm
