"""Every drafter of the package keeps the contract, with the options and verifiers under which it drafts otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from test_correction import layer
from test_eagle import HEADS, random_head, save

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.registry import DRAFTERS, create_drafter
from slipstream.models import load_model, load_tokenizer
from slipstream.sampling.params import SamplingParams
from slipstream.testing.conformance import check_drafter
from slipstream.testing.stub_drafters import draft_context
from tests.kit.block_heads import block_head
from tests.kit.folders import kept_folder
from tests.kit.head_drafters import CHOICES, random_heads
from tests.kit.mtp_targets import random_mtp
from tests.kit.pard_models import pard2_folder, pard_folder
from tests.kit.peagle_heads import peagle_folder
from tests.kit.tokenizer_families import FAMILIES, PAIRS, save_model

pytestmark = pytest.mark.usefixtures("drafts_loaded_once")

Options = dict[str, Any]
MODEL = {"model": EMBEDDED_DRAFT}
CHAIN = {**MODEL, "num_speculative_tokens": 3}
SHARES = {"shares_across_requests": True}
DRAFT = {"method": "draft_model", **CHAIN}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "tree": True, "num_draft_nodes": 6}
TREE = {"method": "draft_model", **MODEL, "tree_top_k": 2, "num_draft_nodes": 6}
FOUR_NODES = [[0], [1], [0, 0], [1, 0]]
SHAPES: list[tuple[Options, str]] = [
    ({}, "coupled"),
    ({"draft_sample_method": "greedy"}, "coupled"),
    ({"tree_top_k": 3, "num_draft_nodes": 7}, "coupled"),
    ({"num_speculative_tokens": 1}, "coupled"),
    ({}, "rejection"),
    ({"tree_top_k": 2}, "block"),
    ({"tree_choices": CHOICES}, "coupled"),
    ({"tree_choices": CHOICES}, "rejection"),
]
ENSEMBLES: list[tuple[list[Options], str]] = [
    ([NGRAM, SUFFIX], "coupled"),
    ([NGRAM, SUFFIX], "rejection"),
    ([SUFFIX, TREE], "coupled"),
    ([SUFFIX, {**TREE, "draft_sample_method": "greedy"}], "block"),
]
MODES: dict[str, Options] = {
    "merge": {"num_draft_nodes": 7},
    "vote": {},
    "first": {"min_tokens": 2},
    "route": {"routes": {"code": 0, "chat": 1}, "default_route": 1},
}
LOOKAHEADS: list[Options] = [
    {},
    {"window_size": 1, "ngram_size": 2, "max_guesses": 1},
    {"window_size": 3, "ngram_size": 5, "max_guesses": 2, "pool_from_prompt": False},
]
SUCCESSORS: list[Options] = [{}, {"num_draft_nodes": 5, "num_speculative_tokens": 2}, {"num_successors": 1}]
LAYERS: list[tuple[Options, str]] = [
    ({"skip_layers": [2, 3]}, "coupled"),
    ({"exit_layer": 3, "tree_top_k": 3, "num_draft_nodes": 7}, "coupled"),
    ({"skip_layers": [4]}, "rejection"),
    ({"exit_layer": 4, "tree_choices": FOUR_NODES}, "rejection"),
    ({"drafts_per_trial": 2}, "coupled"),
]
CASCADES: list[tuple[Options, float, str]] = [
    (NGRAM, 0.9, "rejection"),
    ({**DRAFT, "tree_choices": FOUR_NODES}, 0.9, "coupled"),
    ({**DRAFT, "method": "cascade", "draft": NGRAM}, 0.0, "coupled"),
]
OVER_THE_TARGET: list[Options] = [
    {"draft": NGRAM},
    {"exit_layer": 4, "draft": {"method": "layer_skip", "exit_layer": 2, "num_speculative_tokens": 3}},
]
"""Cascades whose middle is the target, or some of its layers."""
SEVERAL = SamplingParams(n=2, temperature=0.8)
ELSEWHERE = {"off", "remote", "self"}
"""Nothing is drafted; test_remote_drafting.py; an int8 copy of the target, which is a draft model."""


def with_model(*temperatures: float) -> Options:
    """A scene that is short enough for a drafter with a model."""
    params = [SamplingParams(temperature=temperature, seed=3) for temperature in temperatures or (0.0, 0.9)]
    return {"params": params, "max_len": 24, "num_sequences": 3}


@dataclass(frozen=True)
class Case:
    """A drafter and the scene in which it is tried."""

    method: str
    options: Options
    verifier: str = "coupled"
    scene: Options | None = None
    vocab_size: int = 4096
    has_target: bool = False
    """Whether it reads the embedded target's states, layers or entries."""
    made: Callable[[], Options] = dict
    """Options with files that are written when they are needed."""
    family: str = ""
    """The target's family of tokenizers, where it is not the embedded target's tokenizer."""

    def context(self) -> DraftContext:
        tokenizer = FAMILIES[self.family]() if self.family else load_tokenizer(EMBEDDED_TARGET)
        vocab_size = len(tokenizer) if self.family else self.vocab_size
        context = draft_context(vocab_size, 512, self.verifier, tokenizer)
        if not self.has_target:
            return context
        target = load_model(EMBEDDED_TARGET)
        return replace(
            context, target=target, dtype=target.dtype, engine_config=EngineConfig(EMBEDDED_TARGET)
        )

    def __str__(self) -> str:
        options = {name: value for name, value in self.options.items() if name != "model"}
        return f"{self.method}, {options}, {self.verifier}, {self.vocab_size}, {self.family}"[:80]


def block(layout: str) -> Options:
    return {"model": block_head(layout)}


def heads(method: str) -> Options:
    return {"model": random_heads(method)}


@functools.cache
def eagle(kind: str) -> Options:
    return {"model": save(random_head(**HEADS[kind]), kept_folder())}


def peagle(layout: str) -> Options:
    return {"model": peagle_folder(layout)}


@functools.cache
def mtp() -> Options:
    return {"model": random_mtp(EMBEDDED_TARGET)}


@functools.cache
def model_of(family: str) -> Options:
    return {"model": save_model(FAMILIES[family](), kept_folder())}


@functools.cache
def correction() -> Options:
    return {"correction": layer(kept_folder() / "layer")}


DEALT: dict[str, tuple[list[int], Callable[[], Options]]] = {
    "pard": ([0, 1, 4, 5], lambda: {"model": pard_folder()}),
    "pard2": ([2, 7], lambda: {"model": pard2_folder()}),
    "peagle": ([0, 3, 5, 7], partial(peagle, "eagle3")),
    "hydra": ([1, 2, 4, 6], partial(heads, "hydra")),
    "medusa": ([0, 2, 3, 7], partial(heads, "medusa")),
    "mtp": ([0, 1, 4, 5, 6], mtp),
}
"""Of every drafter some of the shapes, a chain and a tree at least; a draft model has all of them."""


def cases() -> Iterator[Case]:
    for vocab in (3, 50):
        yield Case("ngram", {}, vocab_size=vocab)
        yield Case("suffix", {}, scene=SHARES, vocab_size=vocab)
        yield from (Case("lookahead", options, vocab_size=vocab) for options in LOOKAHEADS)
    for vocab in (3, 50, 200):
        yield from (Case("token_recycling", each, scene=SHARES, vocab_size=vocab) for each in SUCCESSORS)
    yield from (Case("jacobi", {"num_speculative_tokens": n}, vocab_size=200) for n in (1, 4, 9))
    for params in (SEVERAL, SamplingParams(n=2, temperature=0)):
        yield Case("siblings", {"share": "request"}, scene={"params": [params]}, vocab_size=50)
        yield Case("siblings", {"share": "tenant"}, scene={"params": [params], **SHARES}, vocab_size=50)
    for options, verifier in SHAPES:
        yield Case("draft_model", {**MODEL, **options}, verifier, with_model())
    for method, (shapes, made) in DEALT.items():
        for options, verifier in (SHAPES[number] for number in shapes):
            has_target = method != "pard"
            yield Case(method.rstrip("2"), options, verifier, with_model(), has_target=has_target, made=made)
    for layout, (options, verifier) in (("mask", SHAPES[0]), ("rnn", SHAPES[2]), ("markov", SHAPES[4])):
        yield Case("dflash", options, verifier, with_model(), has_target=True, made=partial(block, layout))
    for options, verifier in LAYERS:
        scene = with_model() | {"shares_across_requests": "drafts_per_trial" in options}
        yield Case("layer_skip", options, verifier, scene, has_target=True)
    for verifier in ("coupled", "rejection"):
        bare = {"num_sequences": 3, "max_len": 24}
        yield Case("draft_model", CHAIN, verifier, bare, made=correction)
        yield Case("versions", {"drafter": DRAFT, "versions": {"v1": DRAFT}}, verifier, bare)
        for kind, facts in list(HEADS.items())[:: 1 if verifier == "coupled" else 2]:
            method = "eagle" if facts["version"] == 1 else "eagle3"
            options = {"num_speculative_tokens": 3, "tree_top_k": 2, "num_draft_nodes": 5}
            made = partial(eagle, kind)
            yield Case(method, options, verifier, with_model(), has_target=True, made=made)
    for inner, temperature, verifier in CASCADES:
        options = {**MODEL, "num_speculative_tokens": 5, "draft": inner}
        yield Case("cascade", options, verifier, with_model(temperature))
    for options in OVER_THE_TARGET:
        options = {"num_speculative_tokens": 5, **options}
        yield Case("cascade", options, "rejection", with_model(0.9), has_target=True)
    tasks = {**SHARES, "tasks": ["code", "chat", "other"]}
    for mode, given in MODES.items():
        for members, verifier in ENSEMBLES if mode == "merge" else ENSEMBLES[1::2]:
            options = {"members": members, "mode": mode, **given}
            yield Case("ensemble", options, verifier, with_model() | tasks)
    yield Case(
        "ensemble",
        {"members": [NGRAM, {"method": "draft_model", **MODEL}], "mode": "first"},
        "rejection",
        with_model(),
    )
    auto = {"drafters": [{"method": "draft_model", **MODEL}, {"method": "suffix"}]}
    yield Case("auto", auto, scene=with_model() | SHARES, has_target=True)
    for ours, theirs in PAIRS:
        made = partial(model_of, theirs)
        for temperature, verifier in ((0.0, "coupled"), (0.9, "coupled"), (0.9, "rejection")):
            options = {"draft_temperature": temperature}
            yield Case("slem", options, verifier, with_model(temperature), made=made, family=ours)
        for options, verifier in (SHAPES[0], SHAPES[2], SHAPES[4]):
            yield Case("tli", options, verifier, with_model(), made=made, family=ours)


CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_conforms(case: Case) -> None:
    config = SpeculativeConfig(case.method, case.verifier, {**case.options, **case.made()})
    context = case.context()

    def make() -> Drafter:
        return create_drafter(config, context)

    check_drafter(make, context.vocab_size, verifier=case.verifier, **case.scene or {})


def test_every_drafter_is_tried() -> None:
    assert {case.method for case in CASES} | ELSEWHERE == set(DRAFTERS.names())
