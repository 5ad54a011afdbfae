"""Drafters by name: built-in, from a package, from nowhere."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.proposal import ProposalKind
from slipstream.draft import registry
from slipstream.draft.base import Drafter
from slipstream.draft.lookup.ngram import NgramDrafter
from slipstream.draft.off import OffDrafter
from slipstream.draft.traits import DrafterTraits
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.errors import ConfigError
from slipstream.models.outline import outline_model
from slipstream.testing.stub_drafters import OracleDrafter, OracleOptions, draft_context

CONTEXT = draft_context(vocab_size=50)


class CoupledOnlyDrafter(OracleDrafter):
    traits = DrafterTraits(kinds=frozenset({ProposalKind.COUPLED}))


class WithoutOptionsDrafter(OracleDrafter):
    Options = dict


class EitherWayDrafter(OracleDrafter):
    traits = DrafterTraits(kinds=frozenset({ProposalKind.COUPLED, ProposalKind.SAMPLED_IID}))


def config(method: str, verifier: str = "coupled", **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method, verifier, options)


def test_a_built_in_drafter_gets_its_options() -> None:
    drafter = registry.create_drafter(config("ngram", num_speculative_tokens=7), CONTEXT)
    assert isinstance(drafter, NgramDrafter)
    assert drafter.traits.max_nodes == 7
    assert drafter.context is CONTEXT


def test_a_drafter_of_the_old_contract_is_told_what_to_declare() -> None:
    old = {"max_nodes": lambda self: 4, "looks_up": True, "outline": None, "propose": OracleDrafter.propose}
    message = r"OldDrafter declares max_nodes, looks_up, outline, .* traits = DrafterTraits.* footprint"
    with pytest.raises(TypeError, match=message):
        type("OldDrafter", (Drafter,), old)


def test_traits_are_of_the_class_then_of_the_drafter() -> None:
    class TwoDrafter(OracleDrafter):
        traits = DrafterTraits(max_nodes=2)

    assert OracleDrafter(OracleOptions(num_speculative_tokens=7), CONTEXT).traits.max_nodes == 7
    assert TwoDrafter(OracleOptions(num_speculative_tokens=7), CONTEXT).traits.max_nodes == 2
    assert OracleDrafter.traits.max_nodes == 0


def test_off_is_a_drafter_that_proposes_nothing() -> None:
    drafter = registry.create_drafter(config("off"), CONTEXT)
    assert isinstance(drafter, OffDrafter)
    assert drafter.traits.max_nodes == 0


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("ngarm", {}, "unknown drafter 'ngarm'; did you mean 'ngram'?"),
        (
            "ngram",
            {"promt_lookup_max": 3},
            "unknown ngram key 'promt_lookup_max'; did you mean 'prompt_lookup_max'?",
        ),
        ("ngram", {"prompt_lookup_min": 5}, "prompt_lookup_min (5) must not be above prompt_lookup_max (4)"),
        ("ngram", {"num_speculative_tokens": 0}, "at least 1, got 0"),
        ("suffix", {"num_speculative_tokens": True}, "at least 1, got True"),
        ("suffix", {"suffix_decoding_min_token_prob": 1.5}, "between 0 and 1, got 1.5"),
        ("suffix", {"suffix_decoding_max_spec_factor": -1}, "at least 0, got -1"),
        ("suffix", {"suffix_decoding_max_cached_requests": -1}, "at least 0, got -1"),
        ("suffix", {"tree": "yes"}, "true or false, got 'yes'"),
        ("suffix", {"suffix_decoding_cache_file": "no/such/file"}, "cannot be read"),
        ("no_such_package.module:Drafter", {}, "cannot be loaded"),
        ("slipstream.core.proposal:NoSuchDrafter", {}, "cannot be loaded"),
        ("slipstream.core.proposal:Proposal", {}, "not a subclass of"),
        (f"{__name__}:WithoutOptionsDrafter", {}, "has no dataclass Options"),
    ],
)
def test_a_bad_configuration_is_one_clear_line(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.validate(config(method, **options))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_listed_without_importing_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slipstream.draft.lookup.suffix", raising=False)
    names = registry.drafter_names()
    assert names == sorted(names)
    assert {"draft_model", "eagle", "hydra", "medusa", "ngram", "off", "self", "suffix"} <= set(names)
    registry.validate(config("ngram"))
    assert "slipstream.draft.lookup.suffix" not in sys.modules


def test_a_package_adds_a_drafter_and_cannot_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = "slipstream.testing.stub_drafters:OracleDrafter"
    installed = EntryPoints(EntryPoint(name, stub, "slipstream.drafters") for name in ("oracle", "ngram"))
    monkeypatch.setattr("slipstream.registry.entry_points", lambda group: installed.select(group=group))
    assert "oracle" in registry.drafter_names()
    assert isinstance(registry.create_drafter(config("oracle", accuracy=0.5), CONTEXT), OracleDrafter)
    assert isinstance(registry.create_drafter(config("ngram"), CONTEXT), NgramDrafter)


@pytest.mark.parametrize("raised", ["RuntimeError('no GPU')", "SyntaxError('bad')", "KeyError('HOME')"])
def test_a_package_that_fails_while_it_is_imported_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str
) -> None:
    (tmp_path / "failing_package.py").write_text(f"raise {raised}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        registry.validate(config("failing_package:MyDrafter"))
    assert str(caught.value) == f"drafter 'failing_package:MyDrafter' cannot be loaded: {raised}"


def test_code_registers_a_drafter_and_cannot_replace_another() -> None:
    with pytest.raises(ConfigError, match="unknown drafter 'oracle'"):
        registry.validate(config("oracle"))
    registry.DRAFTERS.register("oracle", OracleDrafter)
    try:
        registry.DRAFTERS.register("oracle", OracleDrafter)  # the same again
        assert "oracle" in registry.drafter_names()
        assert isinstance(registry.create_drafter(config("oracle"), CONTEXT), OracleDrafter)
        for taken in ("oracle", "ngram"):
            with pytest.raises(ConfigError, match=f"{taken!r} exists already"):
                registry.DRAFTERS.register(taken, EitherWayDrafter)
        with pytest.raises(ConfigError, match="no colon"):
            registry.DRAFTERS.register("my:oracle", OracleDrafter)
        with pytest.raises(ConfigError, match="did you mean 'oracle'"):
            registry.validate(config("oracel"))
    finally:
        registry.DRAFTERS.unregister("oracle")
    assert "oracle" not in registry.drafter_names()


def test_a_class_can_be_named_by_its_place() -> None:
    texts = [[1, 2, 3]]
    drafter = registry.create_drafter(
        config("slipstream.testing.stub_drafters:OracleDrafter", texts=texts), CONTEXT
    )
    assert drafter.options.texts is texts


@dataclass(frozen=True)
class Case:
    cls: type[OracleDrafter]
    verifier: str
    allowed: bool


@pytest.mark.parametrize(
    "case",
    [
        Case(CoupledOnlyDrafter, "coupled", True),
        Case(CoupledOnlyDrafter, "rejection", False),
        Case(CoupledOnlyDrafter, "block", False),
        Case(EitherWayDrafter, "rejection", True),
        Case(OracleDrafter, "block", True),
    ],
)
def test_only_the_coupled_verifier_judges_coupled_proposals(case: Case) -> None:
    asked = config(f"{__name__}:{case.cls.__name__}", case.verifier)
    if case.allowed:
        assert ParsedSpeculation.of(asked).drafter is case.cls
    else:
        with pytest.raises(ConfigError, match="use verifier 'coupled'"):
            ParsedSpeculation.of(asked)


def test_every_drafter_says_what_it_would_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    target = outline_model(EMBEDDED_TARGET)
    engine = EngineConfig(EMBEDDED_TARGET)
    context = dataclasses.replace(CONTEXT, engine_config=engine, target_outline=target)
    found = {name: one for name, (_, one) in registry.footprints(context).items()}
    assert set(found) == set(registry.drafter_names())
    assert found["ngram"].traits.grows_with == "an index of each running text"
    assert (found["ngram"].missing, found["ngram"].weight_bytes) == ("", 0)
    assert (found["draft_model"].missing, found["draft_model"].is_known) == ("needs model", False)
    assert 0 < found["self"].weight_bytes < target.weight_bytes
    assert found["self"].traits.kv_bytes_per_token == target.kv_bytes_per_token
    int8 = dataclasses.replace(CONTEXT, engine_config=EngineConfig("stub", quantization="int8"))
    unknown = registry.footprints(int8)["self"][1]
    assert (unknown.missing, unknown.is_known) == ("cannot gain speed: the target is int8 already", False)
    broken = EntryPoints([EntryPoint("broken", "no.such.module:Class", "slipstream.drafters")])
    monkeypatch.setattr("slipstream.registry.entry_points", lambda group: broken.select(group=group))
    assert "no.such.module" in registry.footprints(CONTEXT)["broken"][1].missing
