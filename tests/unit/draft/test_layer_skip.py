"""Drafting with some of the target's layers: over the target's own entries, within the slots that are reserved."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.proposal import EMPTY_PROPOSAL
from slipstream.core.request import RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Observation
from slipstream.draft.model.layer_search import LayerSearch, evenly_spread
from slipstream.draft.model.layer_skip import LayerSkipDrafter, LayerSkipOptions
from slipstream.draft.registry import validate
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.testing.stub_drafters import draft_context

VOCAB = 4096
LAST = 5  # the embedded target's last layer


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return load_model(EMBEDDED_TARGET)


def make(target: CausalLM, verifier: str = "coupled", **options: Any) -> LayerSkipDrafter:
    context = dataclasses.replace(
        draft_context(VOCAB, 512, verifier), target=target, engine_config=EngineConfig(EMBEDDED_TARGET)
    )
    return LayerSkipDrafter(LayerSkipOptions(**options), context)


def attached(drafter: LayerSkipDrafter, target: CausalLM) -> KVCache:
    """The target's cache; entries that were not written are NaN."""
    cache = target.new_cache(512)
    cache.pool.fill(float("nan"))
    drafter.attach(cache)
    return cache


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, VOCAB) for _ in range(length)]


def sequence(token_ids: list[int], temperature: float = 0.0, tenant: str = "") -> Sequence:
    params = SamplingParams(temperature=temperature, max_tokens=100)
    return Sequence(0, "0", 0, list(token_ids), len(token_ids), params, 0, RequestOptions(tenant=tenant))


def compute(target: CausalLM, cache: KVCache, seq: Sequence) -> None:
    """The target's pass over all tokens but the last, as the engine would have made it by now."""
    if seq.id not in cache.accounting:
        cache.accounting.open(seq.id, seq.token_ids)
    cache.accounting.reserve(seq.id, len(seq.token_ids) + 9)
    past = cache.accounting.num_valid(seq.id)
    token_ids = seq.token_ids[past:-1]
    target.forward([RowGroup(cache.accounting.slots(seq.id), past, token_ids, [])], cache.pool)
    cache.accounting.commit(seq.id, token_ids)
    seq.num_computed = len(seq.token_ids) - 1


def test_guesses_are_those_of_the_layers_over_the_targets_entries(target: CausalLM) -> None:
    """Full, partial and no acceptance: what a draft left in the cache is never seen again."""
    drafter = make(target, skip_layers=[1, 4])
    cache = attached(drafter, target)
    rng = random.Random(1)
    seq = sequence(text(40))
    for _ in range(6):
        compute(target, cache, seq)
        proposal = drafter.propose([seq], [4])[0]
        assert list(proposal.token_ids) == greedy_chain(target, seq.token_ids, [0, 2, 3, 5], 4)
        accepted = rng.randint(0, 4)
        seq.token_ids += [*proposal.token_ids[:accepted], rng.randrange(6, VOCAB)]
        drafter.observe([Observation(seq, proposal, accepted, torch.empty(0))])


def greedy_chain(target: CausalLM, token_ids: list[int], layers: list[int], length: int) -> list[int]:
    """What the layers say, one row at a time, over entries of a whole pass over all tokens but the last."""
    cache = target.new_cache(512)
    out = list(token_ids)
    target.forward([RowGroup(cache.pool.slots, 0, out[:-1], [])], cache.pool)
    for _ in range(length):
        rows = RowGroup(cache.pool.slots, len(out) - 1, out[-1:], [0])
        out.append(int(target.forward([rows], cache.pool, layers=layers).logits[0].argmax()))
    return out[len(token_ids) :]


@pytest.mark.parametrize("budget", [1, 3, 5])
def test_no_slot_is_written_behind_the_reserved_ones(target: CausalLM, budget: int) -> None:
    """A wide tree wants more entries than it may propose nodes."""
    drafter = make(target, exit_layer=2, tree_top_k=4, num_draft_nodes=5, num_speculative_tokens=4)
    cache = attached(drafter, target)
    seq = sequence(text(20))
    compute(target, cache, seq)
    assert len(drafter.propose([seq], [budget])[0]) == budget
    end = cache.accounting.slots(seq.id)[seq.num_computed + 1 + budget]
    assert all(bool(keys[:, end:].isnan().all()) for keys in cache.pool.keys)
    assert not bool(cache.pool.keys[0][:, end - budget - 1].isnan().any())
    assert bool(cache.pool.keys[LAST][:, end - budget - 1].isnan().all())


def test_while_the_prompt_is_computed_it_proposes_nothing(target: CausalLM) -> None:
    drafter = make(target, exit_layer=2)
    cache = attached(drafter, target)
    seq = sequence(text(20))
    cache.accounting.open(seq.id, seq.token_ids)
    assert drafter.propose([seq], [0]) == [EMPTY_PROPOSAL]
    seq.num_computed = 10
    assert drafter.propose([seq], [4]) == [EMPTY_PROPOSAL]


@pytest.mark.parametrize("options", [{"skip_layers": [2, 3], "tree_top_k": 2}, {"drafts_per_trial": 4}])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_text_is_the_targets(options: dict[str, Any], quantization: str | None) -> None:
    params = [SamplingParams(temperature=t, max_tokens=40, seed=1, ignore_eos=True) for t in (0.0, 0.8, 1.0)]
    prompts = ["The quick brown fox", "def add(a, b):", "SELECT name FROM"]
    spec = {"method": "layer_skip", "quantization": quantization, **options}
    llm = LLM(speculative_config=spec)
    outputs = llm.generate(prompts, params)
    plain = LLM().generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert llm.engine.stats().num_draft_failures == 0
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 10
    weights = llm.engine.drafter.memory_bytes() / llm.engine.model.weight_bytes
    assert weights == 0 if quantization is None else 0.4 < weights < 0.6


def test_each_tenant_has_a_search_of_its_own(target: CausalLM) -> None:
    drafter = make(target, drafts_per_trial=1)
    cache = attached(drafter, target)
    red, blue = sequence(text(20), tenant="red"), sequence(text(20), tenant="blue")
    before = drafter.search("blue").layers
    compute(target, cache, red)
    proposal = drafter.propose([red], [4])[0]
    red.token_ids.append(9)
    drafter.observe([Observation(red, proposal, 0, torch.empty(0))])
    assert drafter.search("red").layers != before
    assert drafter.search(blue.tenant).layers == before
    drafter.reset()
    assert drafter.search("red").layers == before


def test_drafting_ends_with_a_search_that_found_nothing_that_pays(target: CausalLM) -> None:
    drafter = make(target, drafts_per_trial=1, patience=1)
    cache = attached(drafter, target)
    seq = sequence(text(20))
    searching = drafter.search("")
    while not searching.done:
        compute(target, cache, seq)
        proposal = drafter.propose([seq], [4])[0]
        assert len(proposal) == 4
        seq.token_ids.append(9)
        drafter.observe([Observation(seq, proposal, 0, torch.empty(0))])
    compute(target, cache, seq)
    assert not searching.pays
    assert drafter.propose([seq], [4]) == [EMPTY_PROPOSAL]
    drafter.reset()
    assert len(drafter.propose([seq], [4])[0]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_layers": [1], "exit_layer": 2}, "skip_layers and exit_layer; give one"),
        ({"skip_layers": []}, "skip_layers is empty"),
        ({"skip_layers": [-1]}, "skip_layers item must be a whole number of at least 0"),
        ({"skip_layers": 3}, "skip_layers must be list or null"),
        ({"skip_layers": ["one"]}, "skip_layers item must be a whole number"),
        ({"skip_ratio": 1.0}, "skip_ratio must be at least 0 and below 1"),
        ({"patience": 0}, "patience must be a whole number of at least 1"),
        ({"quantization": "int3"}, "unknown layer_skip quantization 'int3'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(SpeculativeConfig("layer_skip", options=options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 6}, "exit_layer must be from 1 to 5"),
        ({"skip_layers": [6]}, "cannot skip layer 6: the target's last one is 5"),
        ({"skip_layers": [0, 1, 2, 3, 4, 5]}, "leaves no layer"),
    ],
)
def test_layers_that_the_target_lacks_are_named(
    target: CausalLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(target, **options)


def test_a_quantised_target_has_no_cheaper_copy() -> None:
    with pytest.raises(ConfigError, match="the target is int8 already"):
        LLM(speculative_config={"method": "layer_skip", "quantization": "int8"}, quantization="int8")


# --- the search -------------------------------------------------------------------------------------------


def search(**changes: Any) -> LayerSearch:
    settings = {"skip_ratio": 0.5, "drafts_per_trial": 4, "patience": 40, **changes}
    return LayerSearch(12, lambda layers: len(layers) / 12, **settings)


def run(searching: LayerSearch) -> list[tuple[int, ...]]:
    """Traffic on which a draft of four loses a token for each layer that matters and is left out."""
    tried = []
    while not searching.done:
        tried.append(searching.layers)
        missing = len({3, 4, 8} - set(searching.layers))
        searching.record(searching.layers, 4, 4 - missing)
    return tried


def test_the_search_finds_the_layers_that_matter() -> None:
    searching = search()
    tried = run(searching)
    assert searching.layers == searching.best == (0, 3, 4, 8, 11)
    assert searching.best_score == pytest.approx(5 / (1 + 4 * 5 / 12))
    assert all(layers[0] == 0 and layers[-1] == 11 for layers in tried)
    assert tried == run(search())


def test_the_search_ends_when_nothing_better_comes() -> None:
    searching = search(patience=3)
    while not searching.done:
        searching.record(searching.layers, 4, 0 if searching.num_trials else 4)
    assert searching.num_trials == 4
    assert searching.layers == evenly_spread(12, 1)
    searching.record(searching.layers, 4, 0)
    assert searching.layers == evenly_spread(12, 1)


def test_a_verdict_on_other_layers_does_not_count() -> None:
    searching = search(drafts_per_trial=1)
    searching.record((0, 11), 4, 4)
    assert searching.num_trials == 0


def test_layers_are_left_out_evenly() -> None:
    assert evenly_spread(12, 6) == (0, 2, 4, 7, 9, 11)
    assert evenly_spread(6, 0) == (0, 1, 2, 3, 4, 5)
    assert evenly_spread(6, 4) == (0, 5)


@pytest.mark.parametrize(("price", "first"), [(1.0, [1, 2, 4]), (0.3, [0, 1, 2, 4])])
def test_the_search_begins_with_few_layers_left_out(price: float, first: list[int]) -> None:
    """With all of them only where they cost less than the target's."""
    searching = LayerSearch(12, lambda layers: price * len(layers) / 12, 0.5, 1, 5)
    for number in first:
        assert searching.layers == evenly_spread(12, number)
        searching.record(searching.layers, 4, 2)
    assert len(searching.best) == 8
    assert len(set(searching.layers) ^ set(searching.best)) in (1, 2)


@pytest.mark.parametrize(("num_layers", "skip_ratio"), [(1, 0.5), (2, 0.9), (3, 0.0)])
def test_where_nothing_is_to_be_left_out_all_layers_run(num_layers: int, skip_ratio: float) -> None:
    searching = LayerSearch(num_layers, lambda _: 1.0, skip_ratio, 1, 5)
    everything = tuple(range(num_layers))
    assert searching.layers == everything
    searching.record(everything, 4, 4)
    assert searching.best == everything
    assert searching.done or num_layers == 3
