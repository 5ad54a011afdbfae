"""Our own engine: certified with each kind of drafter, and not with a fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream import SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.assets.workload.reading import read_workload
from slipstream.config import SpeculativeConfig
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.errors import ConfigError
from slipstream.sampling.noise import derive_seed
from slipstream.tools.audit.decision import AuditDecision
from slipstream.tools.audit.journal import AuditJournal
from slipstream.tools.audit.local import LocalAudit, certify, run_local
from slipstream.tools.audit.mix import FULL, GREEDY, SAMPLED
from slipstream.tools.audit.replaying import Replayer
from slipstream.tools.audit.report import render_certificate
from slipstream.tools.audit.settings import AuditSettings

DRAFT = SpeculativeConfig("draft_model", options={"model": EMBEDDED_DRAFT, "num_speculative_tokens": 3})
MEMORY = {"kv_cache_bytes": 96 * 2**20}


def settings(num_answers: int = len(FULL), max_tokens: int = 8, **others: Any) -> AuditSettings:
    return AuditSettings(
        read_workload("sample"), num_answers=num_answers, max_tokens=max_tokens, num_prompts=7, **others
    )


@pytest.fixture(scope="module")
def off() -> Engine:
    return make_engine(None, None, {**MEMORY, "enable_prefix_caching": False})


@pytest.fixture(scope="module")
def with_speculation(off: Engine) -> Callable[[SpeculativeConfig], Engine]:
    return lambda speculative: make_engine(None, speculative, MEMORY, off)


DRAFTERS = {
    "draft model": DRAFT,
    "ngram": SpeculativeConfig("ngram", options={"prompt_lookup_min": 1}),
}
MORE_DRAFTERS = {
    "eagle3": SpeculativeConfig("eagle3", options={"model": EMBEDDED_EAGLE3}),
    "tree": replace(DRAFT, options={**DRAFT.options, "tree_top_k": 3}),
    "suffix": SpeculativeConfig("suffix"),
    "token recycling": SpeculativeConfig("token_recycling"),
    "lookahead": SpeculativeConfig("lookahead"),
    "self": SpeculativeConfig("self", options={"quantization": "int8"}),
    "layer skip": SpeculativeConfig("layer_skip", options={"quantization": "int8"}),
    "auto": SpeculativeConfig("auto"),
    "block": replace(DRAFT, verifier="block"),
}


def check_certified(speculative: SpeculativeConfig, plan: AuditSettings, on: Engine, off: Engine) -> None:
    found = certify(LocalAudit(plan, speculative), on, off)
    assert found.decision is AuditDecision.CERTIFIED, found.reasons
    assert set(found.data.profiles) == {profile.name for profile in FULL}
    assert {check.outcome for check in found.checks} == {"held"}
    assert on.integrity() == off.integrity() == []


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_kind_of_drafter_is_certified(
    drafter: str, with_speculation: Callable[[SpeculativeConfig], Engine], off: Engine
) -> None:
    check_certified(DRAFTERS[drafter], settings(), with_speculation(DRAFTERS[drafter]), off)


@pytest.mark.long
@pytest.mark.parametrize("drafter", MORE_DRAFTERS)
def test_the_other_drafters_are_certified(
    drafter: str, with_speculation: Callable[[SpeculativeConfig], Engine], off: Engine
) -> None:
    speculative = MORE_DRAFTERS[drafter]
    check_certified(speculative, settings(2 * len(FULL), 24), with_speculation(speculative), off)


def test_a_biased_verifier_is_found_at_once_under_seeds(
    with_speculation: Callable[[SpeculativeConfig], Engine], off: Engine
) -> None:
    speculative = replace(DRAFT, verifier="faulty_verifiers:TrustingCoupled")
    plan = LocalAudit(settings(14), speculative, profiles=(GREEDY, SAMPLED))
    found = certify(plan, with_speculation(speculative), off)
    assert found.decision is AuditDecision.NOT_CERTIFIED
    assert found.exit_code == 1
    [same] = [check for check in found.checks if check.name == "same tokens"]
    assert same.num_violations == len(found.differences) > 2
    assert all(one["margin"] > 0 and not one["is_tie"] for one in found.differences)
    assert "margin" in found.reasons[0]


@pytest.mark.long
def test_classical_verifiers_are_judged_by_distributions(
    with_speculation: Callable[[SpeculativeConfig], Engine], off: Engine
) -> None:
    honest, faulty = (
        certify(LocalAudit(settings(16, 16), one, profiles=(GREEDY, SAMPLED)), with_speculation(one), off)
        for one in (
            replace(DRAFT, verifier="rejection"),
            replace(DRAFT, verifier="faulty_verifiers:TrustingRejection"),
        )
    )
    assert honest.decision is AuditDecision.CERTIFIED, honest.reasons
    [test] = honest.tests
    assert test.name == "distribution"
    assert test.figures["num_tokens"] > 60
    assert faulty.decision is AuditDecision.NOT_CERTIFIED
    assert any(reason.startswith("distribution: p = ") for reason in faulty.reasons)


def test_an_engine_that_allows_loss_is_never_certified(off: Engine) -> None:
    """Requests may ask it for step-level speculation, so what it serves need not be the target's own."""
    lossy = make_engine(None, DRAFT, {**MEMORY, "allow_lossy": True}, off)
    found = certify(LocalAudit(settings(2), DRAFT), lossy, off)
    assert found.decision is AuditDecision.NOT_CERTIFIED
    [reason] = found.reasons
    assert reason.startswith("allow_lossy lets requests choose step-level speculation")


def test_a_lossy_verifier_is_never_certified(
    with_speculation: Callable[[SpeculativeConfig], Engine], off: Engine
) -> None:
    speculative = replace(DRAFT, verifier="faulty_verifiers:LossyCoupled")
    found = certify(LocalAudit(settings(2), speculative), with_speculation(speculative), off)
    assert found.decision is AuditDecision.NOT_CERTIFIED
    assert found.reasons == ["the verifier coupled is lossy: it does not keep the target's distribution"]


def test_without_draft_tokens_nothing_is_told(
    with_speculation: Callable[[SpeculativeConfig], Engine], off: Engine, tmp_path: Path
) -> None:
    speculative = SpeculativeConfig("ngram", options={"prompt_lookup_min": 40, "prompt_lookup_max": 41})
    file = tmp_path / "answers.jsonl"
    for resume in (False, True):
        plan = LocalAudit(settings(3), speculative, journal=AuditJournal(file, resume))
        found = certify(plan, with_speculation(speculative), off)
        assert found.decision is AuditDecision.COULD_NOT_TELL
        assert found.reasons == [
            "no draft token was checked, so nothing of speculation was seen; give other prompts"
        ]
    with pytest.raises(ConfigError, match="there is no speculation to audit"):
        run_local(LocalAudit(settings(), SpeculativeConfig()))


def test_the_certificate_and_its_page(
    with_speculation: Callable[[SpeculativeConfig], Engine], off: Engine
) -> None:
    found = certify(LocalAudit(settings(4), DRAFT), with_speculation(DRAFT), off)
    certificate = json.loads(json.dumps(found.as_json()))
    assert certificate["schema"] == 1
    assert certificate["kind"] == "audit"
    assert certificate["decision"] == "certified"
    assert len(certificate["data"]["sha256"]) == 64
    assert certificate["audited"]["files_sha256"]["config.json"]
    assert certificate["audited"]["method"] == "draft_model"
    assert certificate["compared_with"]["method"] == "off"
    assert certificate["provenance"]["versions"]["torch"]
    assert certificate["smallest_deviations"]["share_of_answers"] > 0.5
    assert {check["outcome"] for check in certificate["checks"]} <= {"held", "not checked"}
    page = render_certificate(found)
    assert "Certified. No deviation from the same engine without speculation" in page
    assert certificate["audited"]["files_sha256"]["config.json"] in page


def test_an_interrupted_audit_is_resumed(
    with_speculation: Callable[[SpeculativeConfig], Engine],
    off: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on, file = with_speculation(DRAFT), tmp_path / "answers.jsonl"
    plan = LocalAudit(settings(6), DRAFT, journal=AuditJournal(file))
    calls = []

    def advance(self: Any, note: str, num: int = 1) -> None:
        calls.append(note)
        if len(calls) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("slipstream.core.meter.Meter.advance", advance)
        broken = certify(plan, on, off)
    assert not broken.complete
    assert broken.interrupted
    assert broken.decision is AuditDecision.COULD_NOT_TELL
    assert on.integrity() == []
    again = LocalAudit(settings(6), DRAFT, journal=AuditJournal(file, resume=True))
    whole = certify(again, on, off)
    assert whole.complete
    assert not whole.interrupted
    assert again.journal.num_resumed == 4
    assert whole.decision is AuditDecision.CERTIFIED, whole.reasons
    assert whole.data.num_requests == 6
    deeper = replace(DRAFT, options={**DRAFT.options, "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match=r"the answers of another audit \(speculation differ"):
        certify(LocalAudit(settings(6), deeper, journal=AuditJournal(file, resume=True)), on, off)


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=12),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=12),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5, seed=6, max_tokens=12
    ),
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_replay_chooses_what_the_engine_chose(name: str, off: Engine) -> None:
    params = PARAMS[name]
    prompt = off.tokenizer("Tell me about the sea.").input_ids
    off.add_request(name, prompt, params)
    outputs = [update.output for update in iter_steps(off) if update.output is not None]
    [answer] = outputs[0].outputs
    replayer = Replayer(off)
    seed = derive_seed(params.seed or 0, 0)
    found = replayer.replay(prompt, answer.token_ids, params, seed)
    assert found.chosen == answer.token_ids
    assert (found.gaps > 0).all()
    place = int(np.argmin(found.gaps))
    other = 7 if answer.token_ids[place] != 7 else 8
    margin = replayer.margin(prompt, answer.token_ids[:place], answer.token_ids[place], other, params, seed)
    if np.isfinite(found.gaps[place]):  # else a filter leaves no second choice
        assert margin >= found.gaps[place] * (1 - 1e-3), "no other token is nearer than the second choice"
    assert not replayer.row_noise([*prompt, *answer.token_ids]).any(), "rows do not depend on each other"


def test_the_margin_of_the_second_choice_is_the_gap(off: Engine) -> None:
    prompt = off.tokenizer("Tell me about the sea.").input_ids
    logits = Replayer(off).logits(prompt, len(prompt) - 1)[0]
    first, second = logits.topk(2).indices.tolist()
    greedy = SamplingParams(temperature=0)
    margin = Replayer(off).margin(prompt, [], first, second, greedy, 0)
    assert margin == pytest.approx(float(logits[first] - logits[second]), rel=1e-3)
    excluded = SamplingParams(temperature=1.0, top_k=1)
    assert Replayer(off).margin(prompt, [], first, second, excluded, 0) == pytest.approx(margin, rel=1e-3)


def iter_steps(engine: Engine) -> Any:
    while engine.has_unfinished:
        yield from engine.step()
