"""A corrective layer on every kind of drafter with logits: what is scored, learned and served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.eagle_files import save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead
from slipstream.engine.async_engine import AsyncEngine
from slipstream.errors import ConfigError, LearnError
from slipstream.learn.decisions import by_hand
from slipstream.learn.learners.base_draft import BaseDraft
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.registry import check_learns, make_learner
from slipstream.learn.learners.scoring import replayed
from slipstream.learn.records.served import ServedRecord
from slipstream.learn.session import LearnSession, SessionSettings
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import read_ring
from slipstream.learn.storage.state import StateStore
from slipstream.learn.versions.store import Version, VersionStore

DEPTH = 2
CHAIN = {"num_speculative_tokens": DEPTH, "tree_top_k": 1, "num_draft_nodes": None}
BASES: dict[str, dict[str, Any]] = {
    "exit_layer": {"method": "layer_skip", "exit_layer": 3},
    "skip_layers": {"method": "layer_skip", "skip_layers": [2, 4]},
    "self": {"method": "self", "quantization": "int4"},
    "eagle3": {"method": "eagle3", "model": EMBEDDED_EAGLE3},
    "eagle": {"method": "eagle"},
}
OPTIONS = LearnerOptions(num_steps=20, batch_rows=4, row_length=128, learning_rate=0.05, depth=DEPTH)
IDLE = {"min_records": 10**9, "poll_s": 60.0}


class Served(NamedTuple):
    """What a server with one base kept, what it answered, and what a version of it answered."""

    base: BaseDraft
    records: list[ServedRecord]
    before: list[Any]
    after: list[Any]
    version: str
    tensors: Mapping[str, torch.Tensor]


def save_untrained_head(folder: Path) -> None:
    """An EAGLE-1 head of random weights."""
    torch.manual_seed(0)
    config = EagleConfig(
        version=1,
        hidden_size=320,
        target_hidden_size=320,
        vocab_size=4096,
        draft_vocab_size=4096,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=80,
        feature_layers=(6,),
    )
    save_eagle(EagleHead(config).requires_grad_(False), folder, target=EMBEDDED_TARGET, layout="eagle")


def answers(client: AsyncEngine, num: int) -> list[Any]:
    async def one(number: int) -> Any:
        params = SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=40, ignore_eos=True)
        last = None
        prompt = [200 + 7 * number + place for place in range(20)]
        async for update in client.stream(prompt, params, request_id=f"{number}-{time.monotonic_ns()}"):
            last = update
        assert last is not None
        return last.output

    async def every() -> list[Any]:
        return list(await asyncio.gather(*(one(number) for number in range(num))))

    return asyncio.run(every())


@pytest.fixture(scope="module", params=BASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("learn")
    drafter = {**BASES[request.param], **CHAIN}
    if request.param == "eagle":
        save_untrained_head(folder / "head")
        drafter["model"] = str(folder / "head")
    base = BaseDraft.of(SpeculativeConfig.from_mapping(drafter), EMBEDDED_TARGET)
    speculative = {"method": "versions", "drafter": drafter, "num_versions": 1}
    client = AsyncEngine(engine=LLM(speculative_config=speculative, dtype="float32").engine)
    settings = SessionSettings(folder / "ring", 2**26, learner="corrective", worker=IDLE, capture_share=None)
    session = LearnSession(client, settings)
    try:
        before = answers(client, 12)
        records = list[ServedRecord]()
        deadline_s = time.monotonic() + 280
        while (
            len(records) < len(before) and time.monotonic() < deadline_s
        ):  # they are written in the background
            records = sorted(read_ring(LearnFolder(settings.folder)), key=lambda one: one.number)
            time.sleep(0.05)
        learned = make_learner("corrective", base, OPTIONS).learn(records)
        identity = session.identity
        about = Version("corrective", identity.model_hash, identity.template_hash, base.digest())
        version = VersionStore(LearnFolder(settings.folder)).add(about, learned.tensors).id
        by_hand.freeze(LearnFolder(settings.folder), True)  # no requests of the base drafter for comparison
        by_hand.promote(LearnFolder(settings.folder), version)
        deadline_s = time.monotonic() + 280
        while version not in session.versions and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert session.status().faults == {}
        after = answers(client, 12)
    finally:
        session.close()
        client.close()
    return Served(base, records, before, after, version, learned.tensors)


def accepted(served: Served, tensors: Mapping[str, torch.Tensor] | None) -> list[int]:
    hits = make_learner("corrective", served.base, OPTIONS).scorer(tensors).hits(served.records)
    return [sum(replayed(one, DEPTH).accepted) for one in hits]


def test_what_is_scored_is_what_the_engine_accepted(served: Served) -> None:
    assert len(served.records) == 12
    told = [one.num_accepted for one in served.records]
    for found, known in zip(accepted(served, None), told, strict=True):
        assert abs(found - known) <= 4
    assert sum(accepted(served, None)) == pytest.approx(sum(told), rel=0.1, abs=2)


def test_the_layer_makes_drafts_better_and_they_are_scored_as_they_are_served(served: Served) -> None:
    base, better = sum(accepted(served, None)), sum(accepted(served, served.tensors))
    assert better > base
    kept = {
        one.seed: found for one, found in zip(served.records, accepted(served, served.tensors), strict=True)
    }
    outputs = dict(enumerate(served.after))
    for seed, found in kept.items():
        assert abs(found - outputs[seed].metrics.num_accepted_tokens) <= 5


def test_a_version_serves_and_no_text_changes(served: Served) -> None:
    assert {one.metrics.draft_version for one in served.before} == {""}
    assert {one.metrics.draft_version for one in served.after} == {served.version}
    texts = [[one.outputs[0].token_ids for one in found] for found in (served.before, served.after)]
    assert texts[0] == texts[1]


def test_bases_that_draft_otherwise_have_other_digests() -> None:
    told = [
        BaseDraft.of(SpeculativeConfig.from_mapping(one), EMBEDDED_TARGET) for one in list(BASES.values())[:4]
    ]
    digests = {base.digest() for base in told}
    assert len(digests) == len(told)
    assert BaseDraft(**asdict(told[0])).digest() == told[0].digest()


def learning(folder: Path, exit_layer: int) -> tuple[AsyncEngine, LearnSession, BaseDraft]:
    """A server that drafts with so many layers and learns in a folder."""
    drafter = {"method": "layer_skip", "exit_layer": exit_layer, **CHAIN}
    speculative = {"method": "versions", "drafter": drafter, "num_versions": 1}
    client = AsyncEngine(engine=LLM(speculative_config=speculative, dtype="float32").engine)
    base = BaseDraft.of(SpeculativeConfig.from_mapping(drafter), EMBEDDED_TARGET)
    return client, LearnSession(client, SessionSettings(folder, 2**24, worker=IDLE)), base


def test_a_version_waits_until_its_own_drafter_serves_again(tmp_path: Path) -> None:
    client, session, base = learning(tmp_path, 4)
    try:
        learner = make_learner("corrective", base, OPTIONS)
        tensors = learner.tensors(learner.begin(None)[0])
        identity = session.identity
        about = Version("corrective", identity.model_hash, identity.template_hash, base.digest())
        version = VersionStore(LearnFolder(tmp_path)).add(about, tensors).id
        by_hand.promote(LearnFolder(tmp_path), version)
        deadline_s = time.monotonic() + 280
        while version not in session.versions and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert session.versions == ["", version]
    finally:
        session.close()
        client.close()
    for exit_layer, names in ((3, [""]), (4, ["", version])):
        client, session, _ = learning(tmp_path, exit_layer)
        try:
            assert session.versions == names
            assert session.status().faults == {}
            assert session.status().serving == names[-1]
            told = [one["event"] for one in session.status().events]
            assert told == (["waits"] if exit_layer == 3 else [])
            assert StateStore(LearnFolder(tmp_path)).read().retired == {}
        finally:
            session.close()
            client.close()


def test_what_does_not_learn_is_one_line() -> None:
    def told(method: str, **options: Any) -> SpeculativeConfig:
        return SpeculativeConfig(method, options=options)

    check_learns(told("self"))
    check_learns(told("layer_skip", exit_layer=2), "corrective")
    check_learns(told("eagle", model="head"))
    with pytest.raises(LearnError, match="give exit_layer or skip_layers"):
        check_learns(told("layer_skip"))
    with pytest.raises(LearnError, match="omit its quantization"):
        check_learns(told("layer_skip", exit_layer=2, quantization="int8"))
    with pytest.raises(ConfigError, match="'self' learns by corrective, not by 'whole'"):
        check_learns(told("self"), "whole")
    with pytest.raises(ConfigError, match="'eagle' learns by corrective, not by 'eagle'"):
        make_learner("eagle", BaseDraft("head", "eagle", EMBEDDED_TARGET), OPTIONS)
    with pytest.raises(LearnError, match="cannot draft with layers"):
        replace(
            BaseDraft(EMBEDDED_TARGET, "layer_skip"), options={"skip_layers": list(range(6))}
        ).causal_model()
    with pytest.raises(LearnError, match="need more than a text"):
        BaseDraft(EMBEDDED_DRAFT, "eagle3", EMBEDDED_TARGET).causal_model()
