"""A drafter that learns in the engine's own process: captured there, steered by the folder, shown by the server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOptions, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.config import SpeculativeConfig
from slipstream.errors import ConfigError
from slipstream.learn.decisions import by_hand
from slipstream.learn.learners.base_draft import BaseDraft
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.registry import make_learner
from slipstream.learn.records.privacy import PrivacyRules
from slipstream.learn.server_status import ServerLearnStatus
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import read_ring, ring_identity
from slipstream.learn.versions.store import Version, VersionStore
from slipstream.rpc.frames import LENGTH_BYTES
from slipstream.serve.auth import digest
from slipstream.serve.config import ServeConfig
from slipstream.serve.learning import Learning, privacy_rules
from slipstream.serve.process.protocol import CODEC, Load
from slipstream.serve.process.remote import RemoteEngine
from slipstream.serve.process.start import load_message, make_remote_engine
from slipstream.text.prompts import encode_chat

TENANTS = ("acme", "quiet", "acme", "quiet", "other")


def a_version(folder: LearnFolder) -> str:
    """The draft itself as a version."""
    learner = make_learner("whole", BaseDraft(EMBEDDED_DRAFT), LearnerOptions())
    model, _ = learner.begin(None)
    tensors: dict[str, torch.Tensor] = {name: one.half() for name, one in learner.tensors(model).items()}
    identity = ring_identity(folder)
    assert identity is not None
    version = Version("whole", identity.model_hash, identity.template_hash, base_hash=learner.base.digest())
    return VersionStore(folder).add(version, tensors).id


async def answers(engine: RemoteEngine, prompts: list[list[int]], first: int) -> list[Any]:
    async def one(number: int) -> Any:
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=12)
        options = RequestOptions(tenant=TENANTS[number % len(TENANTS)])
        last = None
        async for update in engine.stream(
            prompts[number], params, request_id=f"r{first + number}", options=options
        ):
            last = update
        assert last is not None
        return last.output

    return await asyncio.gather(*(one(number) for number in range(len(prompts))))


async def until(engine: RemoteEngine, what: Any) -> ServerLearnStatus:
    for _ in range(2400):
        await engine.read(lambda stats, report: None)
        status = engine.learn_status()
        if what(status):
            return status
        await asyncio.sleep(0.05)
    raise AssertionError(status)


def test_the_engines_process_learns_and_follows_the_folder(plain: LLM, tmp_path: Path) -> None:
    folder = LearnFolder(tmp_path / "learn")
    config = ServeConfig(learn=str(folder.path), learn_tenant=["acme", "other"], one_process=False)
    base = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}
    speculative = SpeculativeConfig.from_mapping({"method": "versions", "drafter": base})
    engine = make_remote_engine(None, speculative, {"kv_cache_bytes": 48 * 2**20}, config)
    learning = Learning(engine, config)
    prompts = [encode_chat(plain.engine.tokenizer, row["messages"][:1]) for row in sample_prompts()[:5]]
    expected = plain.generate(
        prompts, [SamplingParams(temperature=0.8, seed=number, max_tokens=12) for number in range(5)]
    )

    async def ask() -> None:
        found = await answers(engine, prompts, 0)
        status = await until(
            engine, lambda status: status.capture is not None and status.capture.num_records == 3
        )
        assert status.serving == ""
        version = a_version(folder)
        by_hand.promote(folder, version)
        await until(engine, lambda status: status.serving == version)
        while not any(one.metrics.draft_version for one in found):  # it is loaded beside serving
            found += await answers(engine, prompts, len(found))
        assert learning.as_json()["serving"] == version
        assert learning.as_json()["versions"][0]["version"] == "floor", "as earlier releases said"
        assert {one.metrics.draft_version for one in found} == {"", version}
        for number, output in enumerate(found):
            assert output.outputs[0].token_ids == expected[number % 5].outputs[0].token_ids

    try:
        asyncio.run(ask())
    finally:
        learning.close()
        engine.close()
    assert {record.tenant for record in read_ring(folder)} == {"acme", "other"}


def test_a_tenant_that_is_left_out_is_that_user_of_every_key() -> None:
    config = ServeConfig(api_key=["one", "two"], no_learn_key=["two"], no_learn_tenant=["acme"])
    rules = privacy_rules(config)
    one, two = digest("one"), digest("two")
    kept = [
        tenant
        for tenant in ("", "acme", f"{one}/", f"{one}/acme", f"{one}/ann", f"{two}/ann")
        if may(rules, tenant)
    ]
    assert kept == ["", f"{one}/", f"{one}/ann"]


def test_only_those_who_are_named_are_learned_from() -> None:
    keys = ["one", "two", "three"]
    one, two, three = map(digest, keys)
    names = ["", "acme", *(f"{key}/{user}" for key in (one, two, three) for user in ("acme", "ann"))]

    def kept(**given: list[str]) -> list[str]:
        rules = privacy_rules(ServeConfig(learn="folder", api_key=keys, **given))  # type: ignore[arg-type]
        return [name for name in names if may(rules, name)]

    assert kept() == names
    assert kept(learn_tenant=["acme"]) == ["acme", f"{one}/acme", f"{two}/acme", f"{three}/acme"]
    assert kept(learn_key=["two"]) == [f"{two}/acme", f"{two}/ann"]
    assert kept(learn_key=["two"], no_learn_tenant=["acme"]) == [f"{two}/ann"]
    assert kept(learn_tenant=["acme"], learn_key=["two"]) == [
        *("acme", f"{one}/acme", f"{two}/acme", f"{two}/ann", f"{three}/acme")
    ]
    assert kept(learn_tenant=["acme"], no_learn_key=["one"]) == ["acme", f"{two}/acme", f"{three}/acme"]


def test_rules_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="learn_key has a key that is no api_key"):
        ServeConfig(learn="folder", api_key=["one"], learn_key=["two"])
    with pytest.raises(ConfigError, match="learn_tenant and no_learn_tenant name the same tenant"):
        ServeConfig(learn="folder", learn_tenant=["acme"], no_learn_tenant=["acme", "b"])


def test_the_engines_process_is_told_all_rules() -> None:
    config = ServeConfig(
        learn="folder", learn_tenant=["acme"], no_learn_tenant=["ann"], learn_max_age="2d", learn_share=0.5
    )
    load = load_message(None, SpeculativeConfig("off"), {}, config)
    told = CODEC.read(CODEC.frame(load)[LENGTH_BYTES:])
    assert isinstance(told, Load)
    assert told == load
    assert told.learn is not None
    assert told.learn.rules == PrivacyRules.of(["acme"], ["ann"], by_default=False)
    assert (told.learn.max_age_s, told.learn.beside_share) == (172800.0, 0.5)
    assert told.learn.folder == Path("folder").resolve()


def may(rules: PrivacyRules, tenant: str) -> bool:
    return rules.may_learn(RequestOptions(tenant=tenant))
