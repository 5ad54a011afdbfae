"""A verifier of somebody else's: registered, found by name, and put to the grid's check."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from exact_cases import BIASED, CLASSICAL_KINDS, DRAFTS, EXACT, SHAPES, TARGETS
from own_verifiers import DrawingVerifier, OneHotVerifier, TrustingVerifier

from slipstream.config import SpeculativeConfig
from slipstream.core.proposal import ProposalKind
from slipstream.draft.proposers.proposal_shape import ProposalShape, ShapeOptions
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.errors import ConfigError
from slipstream.testing.enumeration import exactness_gap
from slipstream.testing.stub_drafters import draft_context
from slipstream.testing.table_model import TableDrafter
from slipstream.verify.registry import VERIFIERS, create_verifier


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    own = (DrawingVerifier, OneHotVerifier, TrustingVerifier)
    for cls in own:
        VERIFIERS.register(cls.name, cls)
    yield
    for cls in own:
        VERIFIERS.unregister(cls.name)


def gap(verifier: str, kind: ProposalKind, shape: str, target: str, draft: str = "far") -> float:
    drafter = TableDrafter(DRAFTS[draft](TARGETS[target]), SHAPES[shape], kind)
    num_tokens = 2 if shape == "two_levels" else 3  # enough to reach its leaves
    return exactness_gap(TARGETS[target], drafter, create_verifier(verifier), num_tokens)


@pytest.mark.parametrize("target", ["plain", "wide", "top_k", "grammar"])
@pytest.mark.parametrize("shape", ["empty", "chain_2", "siblings_2", "two_levels"])
@pytest.mark.parametrize("kind", CLASSICAL_KINDS)
def test_a_registered_verifier_passes_the_grid(kind: ProposalKind, shape: str, target: str) -> None:
    assert gap("drawing", kind, shape, target) < EXACT


def test_the_check_sees_a_biased_one() -> None:
    assert gap("trusting", ProposalKind.ONE_HOT, "chain_1", "plain") > BIASED


def test_it_is_found_by_entry_point_and_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    VERIFIERS.unregister("drawing")
    with pytest.raises(ConfigError, match="unknown verifier 'drawing'"):
        create_verifier("drawing")
    place = "own_verifiers:DrawingVerifier"
    assert isinstance(create_verifier(place), DrawingVerifier)
    installed = EntryPoints(
        EntryPoint(name, place, "slipstream.verifiers") for name in ("drawing", "coupled")
    )
    monkeypatch.setattr("slipstream.registry.entry_points", lambda group: installed.select(group=group))
    assert isinstance(create_verifier("drawing"), DrawingVerifier)
    assert not isinstance(create_verifier("coupled"), DrawingVerifier)
    with pytest.raises(ConfigError, match="did you mean 'drawing'"):
        ParsedSpeculation.of(SpeculativeConfig("ngram", "drawign"))


def test_drafters_go_by_what_it_can_do() -> None:
    def method(verifier: str, asked: str = "auto", top_k: int = 1) -> str:
        options = ShapeOptions(num_speculative_tokens=2, tree_top_k=top_k, draft_sample_method=asked)
        return ProposalShape.of(options, draft_context(8, verifier=verifier).verifier).method

    assert (method("drawing"), method("drawing", top_k=2)) == ("probabilistic", "greedy")
    assert method("one_hot") == "greedy"
    assert method("coupled") == "coupled"
    with pytest.raises(
        ConfigError, match=r"'drawing' cannot judge coupled drafts.* probabilistic or greedy$"
    ):
        method("drawing", "coupled")
    with pytest.raises(ConfigError, match=r"'one_hot' cannot judge probabilistic drafts.* to greedy$"):
        method("one_hot", "probabilistic")
