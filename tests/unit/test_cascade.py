"""A cascade proposes what its draft model alone would propose, whatever the inner drafter guesses."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.config import SpeculativeConfig
from slipstream.core import Proposal, RequestOptions, Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.combine.cascade import CascadeDrafter, CascadeOptions
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions
from slipstream.draft.registry import validate
from slipstream.errors import ConfigError
from slipstream.models import load_tokenizer
from slipstream.testing.conformance import check_drafter
from slipstream.testing.rehearsal import same_proposal
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


@pytest.mark.parametrize(
    ("inner", "temperature", "verifier"),
    [("ngram", 0.9, "rejection"), ("right trees", 0.9, "coupled"), ("cascade", 0.0, "coupled")],
)
def test_conforms(inner: str, temperature: float, verifier: str) -> None:
    params = [SamplingParams(temperature=temperature, seed=3)]
    check_drafter(
        lambda: make(INNER[inner], verifier),
        VOCAB,
        verifier=verifier,
        params=params,
        max_len=60,
        num_sequences=3,
    )


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

    def __init__(self) -> None:
        self.known: list[int] = []
        self.calls: list[str] = []
        self.cuts: list[bool] = []
        self.options_seen: list[RequestOptions] = []

    def max_nodes(self) -> int:
        return 2

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
    assert cascade.kv_bytes_per_token() > cascade.model.kv_bytes_per_token
    assert cascade.memory_bytes() > cascade.inner.memory_bytes() > 0


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
        ({"draft": NGRAM, "quantization": "int4"}, "unknown cascade quantization"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(SpeculativeConfig("cascade", options=options))


def test_an_inner_drafter_that_reads_hidden_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.draft.lookup.ngram.NgramDrafter.feature_layers", lambda _: (1,))
    with pytest.raises(ConfigError, match="'ngram' reads hidden states"):
        make(NGRAM)
