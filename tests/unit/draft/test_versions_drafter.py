"""Versions side by side: one version a request, swaps between steps, tenants apart, and always the same text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.config import SpeculativeConfig
from slipstream.core.request import RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft import registry
from slipstream.draft.combine.versions import BASE, VersionsDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError

pytestmark = pytest.mark.usefixtures("drafts_loaded_once")

VOCAB = 4096
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}
ORACLE = "slipstream.testing.stub_drafters:OracleDrafter"


def oracle(accuracy: float) -> dict[str, Any]:
    return {"method": ORACLE, "texts": TEXTS, "accuracy": accuracy}


PROMPTS = [[7 + number, 11, 13 + number] for number in range(6)]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
TEXTS: list[list[int]] = []


@pytest.fixture(scope="module", autouse=True)
def texts() -> None:
    """The oracle knows what the target says without any draft."""
    outputs = LLM().generate([list(prompt) for prompt in PROMPTS], PARAMS)
    TEXTS[:] = [[*prompt, *out.outputs[0].token_ids] for prompt, out in zip(PROMPTS, outputs, strict=True)]
    return


def engine_of(base: dict[str, Any], **options: Any) -> tuple[Engine, VersionsDrafter]:
    engine = LLM(speculative_config={"method": "versions", "drafter": base, **options}).engine
    return engine, engine.drafter_as(VersionsDrafter)


def add_all(engine: Engine, tenants: tuple[str, ...] = ("",)) -> None:
    for number, prompt in enumerate(PROMPTS):
        options = RequestOptions(tenant=tenants[number % len(tenants)])
        engine.add_request(f"r{number}", prompt, PARAMS, options)


def finish(engine: Engine, between: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """Each request's output; `between` is called between steps."""
    found: dict[str, Any] = {}
    step = 0
    while engine.has_unfinished:
        for update in engine.step():
            if update.output is not None:
                found[update.request_id] = update.output
        step += 1
        between(step)
        assert engine.integrity() == []
    return found


def is_right(found: dict[str, Any]) -> bool:
    texts = [[*PROMPTS[n], *found[f"r{n}"].outputs[0].token_ids] for n in range(len(PROMPTS))]
    return texts == TEXTS


def test_a_request_keeps_its_version_and_new_ones_get_the_new_version() -> None:
    engine, versions = engine_of(oracle(0.2))
    add_all(engine)
    engine.step()
    loaded = versions.prepare("v1", SpeculativeConfig.from_mapping(oracle(1.0)))
    versions.change([loaded], ["v1"], lambda sequence: "v1")
    found = finish(engine)
    assert is_right(found)
    assert {out.metrics.draft_version for out in found.values()} == {BASE}
    slow = sum(out.metrics.num_steps for out in found.values())
    add_all(engine)
    found = finish(engine)
    assert is_right(found)
    assert {out.metrics.draft_version for out in found.values()} == {"v1"}
    assert sum(out.metrics.num_steps for out in found.values()) < slow * 0.6, "the new version drafts better"


def test_a_revoked_version_gives_its_requests_back_to_the_base() -> None:
    engine, versions = engine_of(oracle(1.0), versions={"v1": oracle(0.0)})
    versions.change([], ["v1"], lambda sequence: "v1")
    add_all(engine)

    def between(step: int) -> None:
        if step == 3:
            assert versions.change([], [], lambda sequence: BASE, revoke=["v1"]) == ["v1"]
            assert versions.names == [BASE]

    found = finish(engine, between)
    assert is_right(found)
    assert {out.metrics.draft_version for out in found.values()} == {BASE}


def test_a_version_that_is_kept_no_more_goes_with_its_last_request() -> None:
    engine, versions = engine_of(oracle(0.5), versions={"v1": oracle(0.5)})
    versions.change([], ["v1"], lambda sequence: "v1")
    add_all(engine)
    engine.step()
    assert versions.change([], [], lambda sequence: BASE) == []
    assert versions.names == [BASE, "v1"], "its requests run"
    assert is_right(finish(engine))
    assert versions.names == [BASE]


def test_a_tenants_version_never_drafts_for_another_tenant_whatever_the_choice() -> None:
    engine, versions = engine_of(oracle(0.0))
    loaded = versions.prepare("a1", SpeculativeConfig.from_mapping(oracle(1.0)), tenant="a")
    versions.change([loaded], ["a1"], lambda sequence: "a1")
    add_all(engine, ("a", "b", "a/user", "ab"))
    found = finish(engine)
    assert is_right(found)
    drafted = {name: out.metrics.draft_version for name, out in found.items()}
    assert drafted == {"r0": "a1", "r1": BASE, "r2": "a1", "r3": BASE, "r4": "a1", "r5": BASE}


def test_room_is_made_by_the_version_that_drains() -> None:
    engine, versions = engine_of(oracle(0.5), num_versions=1)
    config = SpeculativeConfig.from_mapping(oracle(0.5))
    versions.change([versions.prepare("v1", config)], ["v1"], lambda sequence: "v1")
    add_all(engine)
    engine.step()
    assert versions.change([versions.prepare("v2", config)], ["v2"], lambda sequence: "v2") == ["v1"]
    assert versions.names == [BASE, "v2"]
    with pytest.raises(ConfigError, match="no room"):
        versions.change([versions.prepare("v3", config)], ["v2", "v3"], lambda sequence: "v2")
    assert is_right(finish(engine))


def test_the_embedded_draft_is_swapped_under_way() -> None:
    """Its keys and values are computed anew by the version that takes over."""
    engine, versions = engine_of(DRAFT, versions={"v1": DRAFT})
    versions.change([], ["v1"], lambda sequence: "v1" if sequence.id % 2 else BASE)
    add_all(engine)

    def between(step: int) -> None:
        if step == 4:
            versions.change([], [], lambda sequence: BASE, revoke=["v1"])

    found = finish(engine, between)
    assert is_right(found)
    assert engine.stats().num_draft_failures == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": {"method": "off"}}, "cannot hold 'off'"),
        ({"drafter": DRAFT, "versions": {"": DRAFT}}, "empty name"),
        ({"drafter": DRAFT, "versions": {"a": DRAFT, "b": DRAFT}, "num_versions": 1}, "raise num_versions"),
        ({"drafter": {**DRAFT, "verifier": "block"}}, "share its verifier"),
        ({"drafter": DRAFT, "num_versions": 0}, "num_versions"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.validate(SpeculativeConfig("versions", options=options))


def test_a_version_that_drafts_in_another_way_is_refused() -> None:
    _, versions = engine_of(oracle(0.5))
    config = SpeculativeConfig.from_mapping({**oracle(0.5), "num_speculative_tokens": 9})
    with pytest.raises(ConfigError, match="in another way"):
        versions.prepare("v1", config)


def test_a_version_stays_the_same_while_a_sequence_lives() -> None:
    _, versions = engine_of(oracle(0.5), versions={"v1": oracle(0.5), "v2": oracle(0.5)})
    sequences = [
        Sequence(number, f"r{number}", 0, [1, 2, 3], 3, SamplingParams(), 0, RequestOptions())
        for number in range(60)
    ]
    versions.propose(sequences, [2] * 60)
    first = [versions.version_of(each) for each in sequences]
    assert set(first) == {BASE, "v1", "v2"}
    versions.propose(sequences, [2] * 60)
    assert [versions.version_of(each) for each in sequences] == first


def test_the_keys_of_the_release_before_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    _, options = registry.validate(SpeculativeConfig("versions", options={"drafter": DRAFT, "num_lanes": 2}))
    assert options.num_versions == 2
    registry.validate(SpeculativeConfig("versions", options={"drafter": DRAFT, "num_lanes": 2}))
    assert caplog.messages == ["versions key 'num_lanes' is now called 'num_versions'"]
