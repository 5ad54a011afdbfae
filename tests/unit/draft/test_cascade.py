"""A cascade proposes what its draft model alone would propose, whatever the inner drafter guesses."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.proposal import Proposal
from slipstream.core.request import RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.combine.cascade import CascadeDrafter, CascadeOptions
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions
from slipstream.draft.model.layer_skip import LayerSkipDrafter, LayerSkipOptions
from slipstream.draft.registry import create_drafter, validate
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.models import CausalLM, RowGroup, load_model, load_tokenizer
from slipstream.testing.replay_engine import same_proposal
from slipstream.testing.stub_drafters import draft_context

VOCAB = 4096
STUBS = "slipstream.testing.stub_drafters"
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
RIGHT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}
INNER: dict[str, dict[str, Any]] = {
    "ngram": NGRAM,
    "suffix tree": {"method": "suffix", "tree": True},
    "wrong trees": {"method": f"{STUBS}:RandomTreeDrafter"},
    "right": RIGHT,
    "right trees": {**RIGHT, "tree_choices": [[0], [1], [0, 0], [1, 0]]},
    "part of the layers": {"method": "layer_skip", "exit_layer": 1},
    "cascade": {"method": "cascade", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3, "draft": NGRAM},
}


def context(verifier: str = "coupled") -> Any:
    return draft_context(VOCAB, 512, verifier, tokenizer=load_tokenizer(EMBEDDED_TARGET))


def make(inner: dict[str, Any], verifier: str = "coupled", **options: Any) -> CascadeDrafter:
    options = {"model": EMBEDDED_DRAFT, "num_speculative_tokens": 5, "draft": inner, **options}
    drafter = CascadeDrafter(CascadeOptions(**options), context(verifier))
    drafter.allocate(4096)
    return drafter


def alone(verifier: str = "coupled", **options: Any) -> DraftModelDrafter:
    options = {"model": EMBEDDED_DRAFT, "num_speculative_tokens": 5, **options}
    drafter = DraftModelDrafter(DraftModelOptions(**options), context(verifier))
    drafter.allocate(4096)
    return drafter


def sequence(number: int, length: int, temperature: float) -> Sequence:
    """A text that repeats itself, so that there is something to look up."""
    rng = random.Random(number)
    words = [rng.randrange(6, VOCAB) for _ in range(7)]
    token_ids = [rng.choice(words) for _ in range(length)]
    params = SamplingParams(temperature=temperature, repetition_penalty=1.1, max_tokens=100)
    return Sequence(number, str(number), 0, token_ids, length, params, number)


def step(drafters: list[Any], sequences: list[Sequence], rng: random.Random) -> list[list[Proposal]]:
    """Ask all for the same, then commit a part of the first one's guesses and something else."""
    budgets = [rng.randint(0, 5) for _ in sequences]
    proposals = [drafter.propose(sequences, budgets) for drafter in drafters]
    accepted = [rng.randint(0, len(proposal)) for proposal in proposals[0]]
    for seq, proposal, num in zip(sequences, proposals[0], accepted, strict=True):
        seq.token_ids += [*proposal.token_ids[:num], rng.choice(seq.token_ids)]
    for drafter, made in zip(drafters, proposals, strict=True):
        seen = zip(sequences, made, accepted, strict=True)
        drafter.observe([Observation(s, p, n, torch.empty(0)) for s, p, n in seen])
    if rng.random() < 0.3:
        sequences[0].token_ids += sequences[0].token_ids[3:9]  # decoded without us
    return proposals


@pytest.mark.parametrize(
    ("temperature", "verifier", "method"),
    [
        (0.0, "coupled", "auto"),
        (0.8, "coupled", "auto"),
        (0.8, "coupled", "greedy"),
        (0.8, "rejection", "auto"),
    ],
)
@pytest.mark.parametrize("inner", INNER)
def test_proposes_what_the_draft_model_alone_proposes(
    inner: str, temperature: float, verifier: str, method: str
) -> None:
    cascade = make(INNER[inner], verifier, draft_sample_method=method)
    expected = alone(verifier, draft_sample_method=method)
    sequences = [sequence(number, length, temperature) for number, length in enumerate((1, 30, 8))]
    rng = random.Random(2)
    for _ in range(7):
        ours, theirs = step([cascade, expected], sequences, rng)
        for mine, other in zip(ours, theirs, strict=True):
            assert same_proposal(mine, other)
            assert mine.draft_probs is None or torch.equal(mine.draft_probs, other.draft_probs)
        assert cascade.integrity() == []
    for seq in sequences:
        cascade.release(seq)
    assert cascade.num_held() == cascade.inner.num_held() == 0


def count_passes(drafter: DraftModelDrafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass of the draft model from now on."""
    rows: list[int] = []
    forward = drafter.model.forward

    def counted(groups: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(sum(len(group.token_ids) for group in groups))
        return forward(groups, *args, **kwargs)

    monkeypatch.setattr(drafter.model, "forward", counted)
    return rows


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_right_guesses_save_passes(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three right guesses a pass yields four tokens; what was accepted is not computed again."""
    cascade = make(RIGHT, num_speculative_tokens=8)
    seq = sequence(1, 30, temperature)
    cascade.propose([seq], [0])
    rows = count_passes(cascade, monkeypatch)
    proposal = cascade.propose([seq], [8])[0]
    assert rows == [4, 4]
    seq.token_ids += [*proposal.token_ids[:6], 17]
    cascade.observe([Observation(seq, proposal, 6, torch.empty(0))])
    rows.clear()
    cascade.propose([seq], [8])
    assert rows == [4, 4]


class Recorder(Drafter):
    """Guesses token 9 and keeps every text that it is shown."""

    Options = dict
    traits = DrafterTraits(max_nodes=2)

    def __init__(self) -> None:
        super().__init__(None, draft_context(VOCAB))
        self.known: list[int] = []
        self.calls: list[str] = []
        self.cuts: list[bool] = []
        self.options_seen: list[RequestOptions] = []

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        (seq,), (budget,) = sequences, budgets
        self.options_seen.append(seq.options)
        self._extend(seq, "propose")
        return [Proposal.chain([9] * min(budget, 2))]

    def observe(self, observations: Seq[Observation]) -> None:
        for seen in observations:
            before = len(self.known)
            self._extend(seen.sequence, "observe")
            assert seen.length_before == before
            assert len(self.known) == before + seen.num_accepted + (not seen.was_cut)
            assert self.known[before : before + seen.num_accepted] == [9] * seen.num_accepted
            assert seen.logits.shape == (1 + len(seen.proposal), VOCAB)
            self.cuts.append(seen.was_cut)
            if not seen.was_cut:
                assert self.known[-1] == int(seen.logits[seen.num_accepted].argmax())

    def rewind(self, sequence: Sequence) -> None:
        assert self.known[: len(sequence.token_ids)] == sequence.token_ids
        assert len(self.known) > len(sequence.token_ids)
        self.known = list(sequence.token_ids)
        self.calls.append("rewind")

    def release(self, sequence: Sequence) -> None:
        self._extend(sequence, "release")

    def _extend(self, sequence: Sequence, call: str) -> None:
        assert sequence.token_ids[: len(self.known)] == self.known
        self.known = list(sequence.token_ids)
        self.calls.append(call)


@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_the_inner_drafter_sees_one_text_that_is_taken_back_only_by_rewinding(threshold: float) -> None:
    cascade = make({"method": "off"}, num_speculative_tokens=4, confidence_threshold=threshold)
    cascade.guard.drafter = recorder = Recorder()
    seq = sequence(1, 30, 0.0)
    seq.params = SamplingParams(temperature=0.0)
    seq.options = RequestOptions(tenant="a", task="chat")
    rng = random.Random(3)
    for _ in range(8):
        proposal = cascade.propose([seq], [4])[0]
        assert recorder.known == [*seq.token_ids, *proposal.token_ids]
        num = rng.randint(0, len(proposal))
        seq.token_ids += [*proposal.token_ids[:num], rng.randrange(6, VOCAB)]
        cascade.observe([Observation(seq, proposal, num, torch.empty(0))])
    cascade.propose([seq], [4])
    cascade.propose([seq], [4])  # asked again
    cascade.release(seq)
    assert recorder.known == seq.token_ids
    assert set(recorder.options_seen) == {seq.options}, "its memory must not mix tenants"
    assert set(recorder.cuts) == ({False} if threshold == 0 else {False, True})
    assert {"propose", "observe", "rewind", "release"} == set(recorder.calls)


def test_a_draft_model_that_is_rewound_drafts_as_a_new_one() -> None:
    drafter, new = alone(), alone()
    seq = sequence(1, 40, 0.0)
    drafter.propose([seq], [5])
    del seq.token_ids[25:]
    drafter.rewind(seq)
    assert drafter.cache.accounting.num_valid(seq.id) == 25
    seq.token_ids += [11, 12]
    assert drafter.propose([seq], [5])[0].token_ids == new.propose([seq], [5])[0].token_ids


# --- over the target's own keys and values ----------------------------------------------------------------

LAST = 5  # the embedded target's last layer
MIDDLES: dict[str, dict[str, Any]] = {
    "int8": {},
    "first layers": {"exit_layer": 4},
    "int8, some layers": {"skip_layers": [2], "quantization": "int8"},
}
INSIDE: dict[str, dict[str, Any]] = {
    "ngram": NGRAM,
    "wrong trees": INNER["wrong trees"],
    "right": RIGHT,
    "fewer layers": {"method": "layer_skip", "exit_layer": 2, "num_speculative_tokens": 3},
    "cascade": {"method": "cascade", "exit_layer": 3, "num_speculative_tokens": 3, "draft": NGRAM},
}


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return load_model(EMBEDDED_TARGET)


def over(target: CausalLM, verifier: str = "coupled") -> Any:
    return dataclasses.replace(
        context(verifier), target=target, engine_config=EngineConfig(EMBEDDED_TARGET), dtype=target.dtype
    )


def cascade_of(
    target: CausalLM, middle: dict[str, Any], inner: dict[str, Any], verifier: str = "coupled", **more: Any
) -> CascadeDrafter:
    options = {"num_speculative_tokens": 5, "draft": inner, **middle, **more}
    drafter = create_drafter(SpeculativeConfig("cascade", options=options), over(target, verifier))
    assert isinstance(drafter, CascadeDrafter)
    drafter.allocate(4096)
    return drafter


def attached(drafter: Any, target: CausalLM) -> KVCache:
    """The target's cache; entries that were not written are NaN."""
    cache = target.new_cache(512)
    cache.pool.fill(float("nan"))
    drafter.attach(cache)
    return cache


def compute(target: CausalLM, cache: KVCache, sequences: list[Sequence], budgets: list[int]) -> None:
    """The target's passes over all tokens but the last, and the slots that an engine reserves for a step."""
    for seq, budget in zip(sequences, budgets, strict=True):
        if seq.id not in cache.accounting:
            cache.accounting.open(seq.id, seq.token_ids)
        cache.accounting.reserve(seq.id, len(seq.token_ids) + budget)
    for seq in sequences:
        past = cache.accounting.num_valid(seq.id)
        token_ids = seq.token_ids[past:-1]
        if token_ids:
            target.forward([RowGroup(cache.accounting.slots(seq.id), past, token_ids, [])], cache.pool)
        cache.accounting.commit(seq.id, token_ids)
        seq.num_computed = len(seq.token_ids) - 1


@pytest.mark.parametrize(
    ("temperature", "verifier", "method"),
    [(0.0, "coupled", "auto"), (0.8, "coupled", "greedy"), (0.8, "rejection", "auto")],
)
@pytest.mark.parametrize("inside", INSIDE)
def test_over_the_targets_entries_it_proposes_what_the_layers_alone_propose(
    target: CausalLM, inside: str, temperature: float, verifier: str, method: str
) -> None:
    """Full, partial and no acceptance: what a draft left in the cache is never seen again."""
    middle = MIDDLES["first layers"]
    cascade = cascade_of(target, middle, INSIDE[inside], verifier, draft_sample_method=method)
    options = LayerSkipOptions(num_speculative_tokens=5, draft_sample_method=method, **middle)
    expected = LayerSkipDrafter(options, over(target, verifier))
    caches = [attached(drafter, target) for drafter in (cascade, expected)]
    sequences = [sequence(number, length, temperature) for number, length in enumerate((1, 30, 8))]
    rng = random.Random(2)
    drafted = 0
    for _ in range(7):
        for cache in caches:
            compute(target, cache, sequences, [5, 5, 5])
        ours, theirs = step([cascade, expected], sequences, rng)
        for mine, other in zip(ours, theirs, strict=True):
            assert same_proposal(mine, other)
            assert mine.draft_probs is None or torch.equal(mine.draft_probs, other.draft_probs)
            drafted += len(mine)
        assert cascade.integrity() == []
    assert drafted > 20
    assert cascade.num_failures == 0
    for seq in sequences:
        cascade.release(seq)
    assert cascade.num_held() == cascade.inner.num_held() == 0


@pytest.mark.parametrize("budget", [1, 3, 5])
@pytest.mark.parametrize("inside", ["wrong trees", "fewer layers"])
def test_no_slot_is_written_behind_the_reserved_ones(target: CausalLM, inside: str, budget: int) -> None:
    cascade = cascade_of(target, MIDDLES["first layers"], INSIDE[inside])
    cache = attached(cascade, target)
    seq = sequence(1, 20, 0.0)
    compute(target, cache, [seq], [budget])
    before = [keys.clone() for keys in cache.pool.keys]
    assert len(cascade.propose([seq], [budget])[0]) == budget
    slots = cache.accounting.slots(seq.id)
    first, end = slots[seq.num_computed], slots[seq.num_computed + budget]
    for keys, earlier in zip(cache.pool.keys, before, strict=True):
        assert bool(keys[:, end:].isnan().all())
        assert torch.equal(keys[:, :first], earlier[:, :first]), "the text's entries are the target's"
    assert not bool(cache.pool.keys[0][:, first:end].isnan().any())
    assert bool(cache.pool.keys[LAST][:, first:].isnan().all())


@pytest.mark.parametrize("middle", MIDDLES)
def test_no_prompt_is_computed_twice(middle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's passes are of its draft tokens alone: also behind prompts that share a beginning, in batches,
    and where memory runs out."""
    text = "The quick brown fox jumps over the lazy dog. " * 4
    prompts = [text + end for end in ("Again:", "And then", "SELECT name FROM", "def add(a, b):")]
    params = [SamplingParams(temperature=t, max_tokens=100, seed=1, ignore_eos=True) for t in (0.0, 0.8) * 2]
    spec = {"method": "cascade", "num_speculative_tokens": 5, "draft": NGRAM, **MIDDLES[middle]}
    plain = LLM()
    llm = LLM(
        speculative_config=spec,
        kv_cache_bytes=280 * plain.engine.model.kv_bytes_per_token,
        max_model_len=192,
        max_num_batched_tokens=48,
    )
    cascade = llm.engine.drafter
    assert isinstance(cascade, CascadeDrafter)
    assert cascade.traits.kv_bytes_per_token == 0
    rows: list[int] = []
    forward = CausalLM.forward

    def counted(self: CausalLM, groups: Any, pool: Any, *args: Any, **named: Any) -> Any:
        if "layers" in named:  # a pass of the draft model
            rows.extend(len(group.token_ids) for group in groups)
        return forward(self, groups, pool, *args, **named)

    monkeypatch.setattr(CausalLM, "forward", counted)
    outputs = [llm.generate(prompts, params) for _ in range(2)][1]
    assert rows
    assert max(rows) <= 5
    assert any(output.metrics.num_cached_tokens > 16 for output in outputs)
    assert llm.engine.stats().num_preemptions > 0
    assert llm.engine.stats().num_draft_failures == 0
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 20
    expected = plain.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert llm.engine.integrity() == []


def test_without_a_model_the_target_in_int8_drafts() -> None:
    prompts = ["The quick brown fox", "def add(a, b):"]
    params = SamplingParams(temperature=0.8, max_tokens=40, seed=1, ignore_eos=True)
    spec = {"method": "cascade", "draft": {"method": "draft_model", "model": EMBEDDED_DRAFT}}
    llm = LLM(speculative_config=spec)
    outputs = llm.generate(prompts, params)
    plain = LLM().generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert all(output.metrics.acceptance_rate > 0.7 for output in outputs)
    assert llm.engine.integrity() == []
    cascade = llm.engine.drafter
    assert isinstance(cascade, CascadeDrafter)
    assert cascade.model.quantization == "int8"
    assert cascade.traits.kv_bytes_per_token == cascade.inner.traits.kv_bytes_per_token > 0
    assert cascade.memory_bytes() > cascade.inner.memory_bytes() > 0


def test_a_copy_that_computes_in_another_type_keeps_a_cache_of_its_own() -> None:
    """An int8 copy computes float32, which is not how the keys and values of a bfloat16 target are read."""
    llm = LLM(dtype="bfloat16", cpu_kernels="torch", speculative_config={"method": "cascade", "draft": NGRAM})
    cascade = llm.engine.drafter
    assert isinstance(cascade, CascadeDrafter)
    assert isinstance(cascade, DraftModelDrafter)
    assert cascade.traits.kv_bytes_per_token == cascade.model.kv_bytes_per_token
    params = SamplingParams(temperature=0, max_tokens=12)
    [output] = llm.generate(["one two three one two three one"], params)
    assert output.metrics.num_draft_tokens > 0
    assert llm.engine.integrity() == []


@pytest.mark.parametrize(
    ("middle", "inner", "message"),
    [
        ({"exit_layer": 6}, NGRAM, "cascade exit_layer must be from 1 to 5"),
        (
            {"exit_layer": 3},
            {"method": "layer_skip", "exit_layer": 4},
            "runs layers 0, 1, 2 only; set layer_",
        ),
        ({"exit_layer": 3}, {"method": "layer_skip"}, "runs layers 0, 1, 2 only"),
        ({"skip_layers": [1]}, {"method": "cascade", "draft": NGRAM}, "runs layers 0, 2, 3, 4, 5 only"),
    ],
)
def test_layers_without_entries_are_refused(
    target: CausalLM, middle: dict[str, Any], inner: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cascade_of(target, middle, inner)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "cascade needs 'draft'"),
        ({"draft": "ngram"}, "cascade draft must be Mapping"),
        ({"draft": {"method": "ngrams"}}, "unknown drafter 'ngrams'; did you mean 'ngram'"),
        ({"draft": {"method": "ngram", "depth": 3}}, "unknown ngram key 'depth'"),
        ({"draft": {"method": "ngram", "verifier": "block"}}, "cascade draft has a verifier"),
        ({"draft": NGRAM, "tree_top_k": 2}, "cascade drafts are chains"),
        ({"draft": NGRAM, "tree_choices": [[0]]}, "cascade drafts are chains"),
        ({"draft": NGRAM, "quantization": "int3"}, "unknown cascade quantization"),
        ({"draft": NGRAM, "exit_layer": 2, "skip_layers": [1]}, "cascade has skip_layers and exit_layer"),
        ({"draft": NGRAM, "skip_layers": []}, "cascade skip_layers is empty"),
        ({"draft": NGRAM, "exit_layer": 2, "model": EMBEDDED_DRAFT}, "the target's own layers; omit model"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(SpeculativeConfig("cascade", options=options))


def test_an_inner_drafter_that_reads_hidden_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "slipstream.draft.lookup.ngram.NgramDrafter.traits", DrafterTraits(feature_layers=(1,))
    )
    with pytest.raises(ConfigError, match="'ngram' reads hidden states"):
        make(NGRAM)
