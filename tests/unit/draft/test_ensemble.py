"""Ensembles: united trees, turns, routes; every member learns what became of its own guesses and of no others."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.config import SpeculativeConfig
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal, ProposalKind
from slipstream.core.request import RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft import registry
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.combine.ensemble import EnsembleDrafter, EnsembleOptions
from slipstream.draft.combine.merging import AcceptanceRecord, merge, part_of
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.kv.pool import KVPool, LayerShape
from slipstream.models import load_tokenizer
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import OracleOptions, draft_context

pytestmark = pytest.mark.usefixtures("drafts_loaded_once")

VOCAB = 4096
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "tree_top_k": 2, "num_draft_nodes": 6}


class SaysDrafter(Drafter):
    """Proposes the trees that it is told to, and keeps what it observes."""

    Options = OracleOptions
    traits = DrafterTraits(max_nodes=8)

    def __init__(self, options: Any, context: DraftContext) -> None:
        super().__init__(options, context)
        self.says = EMPTY_PROPOSAL
        self.asked: list[int] = []
        self.seen: list[Observation] = []
        self.cache: KVCache | None = None

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        self.asked += [sequence.id for sequence in sequences]
        assert all(0 <= budget <= self.traits.max_nodes for budget in budgets)
        return [self._within(budget) for budget in budgets]

    def _within(self, budget: int) -> Proposal:
        if len(self.says) <= budget:
            return self.says
        return Proposal(self.says.token_ids[:budget], self.says.parents[:budget])

    def observe(self, observations: Seq[Observation]) -> None:
        self.seen += observations

    def attach(self, cache: KVCache) -> None:
        self.cache = cache


class LateReader(SaysDrafter):
    """Reads two of the target's states."""

    traits = replace(SaysDrafter.traits, feature_layers=(2, 5))


class EarlyReader(SaysDrafter):
    """Reads one of the same, and one before it."""

    traits = replace(SaysDrafter.traits, feature_layers=(5, 1))


class RaisingDrafter(SaysDrafter):
    """Fails sequence 1."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        if any(sequence.id == 1 for sequence in sequences):
            raise RuntimeError("no")
        return super().propose(sequences, budgets)


def sequence(number: int = 0, task: str = "", length: int = 5) -> Sequence:
    return Sequence(
        number, str(number), 0, list(range(length)), 1, SamplingParams(), 0, RequestOptions(task=task)
    )


def ensemble(
    says: Seq[Proposal], methods: Seq[str] | None = None, verifier: str = "coupled", **options: Any
) -> tuple[EnsembleDrafter, list[SaysDrafter]]:
    members = [{"method": f"{__name__}:{name}"} for name in methods or ["SaysDrafter"] * len(says)]
    made = EnsembleDrafter(EnsembleOptions(members=members, **options), draft_context(50, verifier=verifier))
    drafters = [guard.drafter for guard in made.members]
    for drafter, proposal in zip(drafters, says, strict=True):
        assert isinstance(drafter, SaysDrafter)
        drafter.says = proposal
    return made, drafters  # type: ignore[return-value]


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    return {tuple(proposal.token_ids[at] for at in proposal.path(node)) for node in range(len(proposal))}


def logits(num_nodes: int) -> torch.Tensor:
    """Row i is full of i."""
    return torch.arange(num_nodes + 1.0)[:, None].expand(-1, 50)


# --- the contract ---------------------------------------------------------------------------------------------


# --- one tree of many -----------------------------------------------------------------------------------------


def random_tree(rng: random.Random, num_nodes: int, vocab: int = 3) -> Proposal:
    token_ids: list[int] = []
    parents: list[int] = []
    for node in range(num_nodes):
        parent = rng.randint(ROOT, node - 1)
        taken = {t for t, p in zip(token_ids, parents, strict=True) if p == parent}
        free = [token for token in range(vocab) if token not in taken]
        if free:
            token_ids.append(rng.choice(free))
            parents.append(parent)
        else:
            break
    return Proposal(tuple(token_ids), tuple(parents))


def test_a_union_holds_every_guess_once_and_comes_apart_again() -> None:
    rng = random.Random(0)
    for _ in range(200):
        members = {number: random_tree(rng, rng.randint(0, 7)) for number in range(3)}
        united = merge(members, AcceptanceRecord(), 100)
        assert paths(united) == set().union(*map(paths, members.values()))
        assert len(united) == len(paths(united))
        cut = merge(members, AcceptanceRecord(), rng.randint(0, 6))
        assert paths(cut) <= paths(united)
        for own in members.values():
            part, rows = part_of(cut, own)
            assert paths(part) == paths(cut) & paths(own)
            assert rows[0] == 0
            for node, row in enumerate(rows[1:]):
                mine = [part.token_ids[at] for at in part.path(node)]
                assert mine == [cut.token_ids[at] for at in cut.path(row - 1)]


def test_votes_come_before_chances() -> None:
    members = {0: Proposal.chain([1, 2, 3]), 1: Proposal((9, 1), (ROOT, ROOT)), 2: Proposal.chain([8])}
    assert paths(merge(members, AcceptanceRecord(), 1)) == {(1,)}  # two say so
    record = AcceptanceRecord()
    for _ in range(30):
        record.learn(2, Proposal.chain([8]), [8, 0])
        record.learn(0, Proposal.chain([1]), [0])
        record.learn(1, Proposal((9, 1), (ROOT, ROOT)), [0])
    assert paths(merge(members, record, 1)) == {(8,)}
    assert paths(merge(members, record, 1, by_votes=True)) == {(1,)}


def test_the_record_of_a_member_decides_who_keeps_nodes() -> None:
    record = AcceptanceRecord()
    for _ in range(20):
        record.learn(0, Proposal.chain([1, 2]), [1, 2, 5])
        record.learn(1, Proposal.chain([3, 4]), [1, 2, 5])
    kept = merge({0: Proposal.chain([10, 11, 12]), 1: Proposal.chain([20, 21])}, record, 3)
    assert paths(kept) == {(10,), (10, 11), (10, 11, 12)}
    assert record.chance(0, 1, 0) > 0.9 > 0.1 > record.chance(1, 1, 0)


def test_mixed_kinds_are_coupled_and_chosen_ones_stay_chosen() -> None:
    chosen, coupled = Proposal.chain([1]), Proposal.chain([2], ProposalKind.COUPLED)
    assert merge({0: chosen, 1: chosen}, AcceptanceRecord(), 9).kind is ProposalKind.ONE_HOT
    assert merge({0: chosen, 1: coupled}, AcceptanceRecord(), 9).kind is ProposalKind.COUPLED


def test_members_observe_their_own_nodes() -> None:
    """The accepted path 1, 2, 3 is the first member's to depth 3 and the second's to depth 1."""
    made, (first, second, third) = ensemble(
        [Proposal.chain([1, 2, 3, 4]), Proposal((7, 1, 5), (ROOT, ROOT, 1)), Proposal()], num_draft_nodes=8
    )
    seq = sequence()
    united = made.propose([seq], [8])[0]
    assert paths(united) == {(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (7,), (1, 5)}
    seq.token_ids += [1, 2, 3, 40]
    made.observe([Observation(seq, united, 3, logits(len(united)))])
    for drafter, num_accepted in ((first, 3), (second, 1), (third, 0)):
        [seen] = drafter.seen
        assert seen.proposal == drafter.says
        assert (seen.num_accepted, seen.num_before) == (num_accepted, 5)
        assert seen.logits.shape == (1 + len(drafter.says), 50)
        for node in range(len(seen.proposal)):
            path = [seen.proposal.token_ids[at] for at in seen.proposal.path(node)]
            row = int(seen.logits[node + 1, 0]) - 1
            assert path == [united.token_ids[at] for at in united.path(row)]
    made.release(seq)
    assert made.num_held() == 0


def test_what_the_budget_cut_off_was_not_seen() -> None:
    made, (first, _) = ensemble([Proposal.chain([1, 2, 3]), Proposal.chain([1, 9, 8])], num_draft_nodes=2)
    seq = sequence()
    united = made.propose([seq], [8])[0]
    assert len(united) == 2
    seq.token_ids += [1, 40]
    made.observe([Observation(seq, united, 1, logits(2))])
    assert first.seen[0].proposal.token_ids in ((1,), (1, 2))
    assert first.seen[0].num_accepted == 1


def test_a_stop_inside_the_accepted_block_is_no_rejection() -> None:
    """All committed tokens are the member's: nothing is said about the guesses behind them."""
    made, (only,) = ensemble([Proposal.chain([1, 2, 3])])
    seq = sequence()
    united = made.propose([seq], [3])[0]
    seq.token_ids += [1, 2]
    made.observe([Observation(seq, united, 2, logits(3))])
    assert only.seen[0].num_accepted == 2
    record = made.record(seq)
    assert record is not None
    assert record.chance(0, 3, 0) == pytest.approx(record.chance(0, 2, 0))


# --- one of many ----------------------------------------------------------------------------------------------


def test_later_members_are_asked_only_where_earlier_ones_have_too_little() -> None:
    made, (_, second) = ensemble([Proposal.chain([1]), Proposal.chain([2, 3])], mode="first")
    assert made.propose([sequence(0)], [4])[0].token_ids == (1,)
    assert second.asked == []
    made, _ = ensemble([Proposal.chain([1]), Proposal.chain([2, 3])], mode="first", min_tokens=2)
    assert made.propose([sequence(0)], [4])[0].token_ids == (2, 3)
    made, _ = ensemble([Proposal.chain([1]), Proposal()], mode="first", min_tokens=2)
    assert made.propose([sequence(0)], [4])[0].token_ids == (1,)
    made, _ = ensemble([Proposal.chain([1, 2]), Proposal.chain([4])], mode="first", min_tokens=5)
    assert made.propose([sequence(0)], [4])[0].token_ids == (1, 2)


def test_a_drawn_guess_is_never_passed_over() -> None:
    """Its length may depend on what was drawn, so dropping it would bias a classical verifier."""
    drawn = Proposal.chain([1], ProposalKind.SAMPLED_IID, torch.full((1, 50), 1 / 50))
    made, _ = ensemble([drawn, Proposal.chain([2, 3])], mode="first", min_tokens=2, verifier="rejection")
    [proposal] = made.propose([sequence()], [4])
    assert (proposal.token_ids, proposal.kind) == (drawn.token_ids, drawn.kind)


def test_requests_go_to_the_member_of_their_task() -> None:
    made, (first, second) = ensemble(
        [Proposal.chain([1]), Proposal.chain([2])], mode="route", routes={"code": 0}, default_route=1
    )
    sequences = [sequence(0, "code"), sequence(1, "chat"), sequence(2)]
    assert [p.token_ids for p in made.propose(sequences, [4] * 3)] == [(1,), (2,), (2,)]
    assert (first.asked, second.asked) == ([0], [1, 2])


def test_the_task_travels_from_the_caller_to_the_ensemble(shared_engines: None) -> None:
    import slipstream.engine.llm

    members = [{"method": "off"}, NGRAM]
    speculative = {"method": "ensemble", "mode": "route", "members": members, "routes": {"loop": "ngram"}}
    llm = slipstream.engine.llm.LLM(speculative_config=speculative)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6]] * 2
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6), task=["loop", "other"])
    assert [output.metrics.num_draft_tokens > 0 for output in outputs] == [True, False]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert llm.engine.integrity() == []


# --- faults, features, configuration --------------------------------------------------------------------------


def test_a_member_that_raises_is_retired_for_that_sequence_alone() -> None:
    made, _ = ensemble([Proposal.chain([1]), Proposal.chain([2])], methods=["RaisingDrafter", "SaysDrafter"])
    one, two = sequence(1), sequence(2)
    for _ in range(2):
        assert [paths(p) for p in made.propose([one, two], [4, 4])] == [{(2,)}, {(1,), (2,)}]
    assert made.num_failures == 1
    one.finish_reason = two.finish_reason = "stop"  # type: ignore[assignment]
    made.release(one)
    made.release(two)
    assert made.num_held() == 0


def test_each_member_sees_its_own_features() -> None:
    made, drafters = ensemble([Proposal()] * 3, ["LateReader", "EarlyReader", "SaysDrafter"])
    assert made.traits.feature_layers == (2, 5, 1)
    cache = KVCache(KVPool([LayerShape(1, 2, 2)], 64, torch.float32, torch.device("cpu"), 3 * 4), False)
    cache.accounting.open(7, [1, 2, 3], "")
    cache.accounting.reserve(7, 3)
    cache.keep_features(
        cache.accounting.slots(7)[:3], torch.tensor([2.0, 5.0, 1.0]).repeat_interleave(4).expand(3, -1)
    )
    made.attach(cache)
    found = []
    for drafter in drafters:
        assert drafter.cache is not None
        found.append(drafter.cache.features(7, 1, 3)[:, ::4].tolist())
        assert drafter.cache.feature_width == 4 * len(drafter.traits.feature_layers)
    assert found == [[[2, 5]] * 2, [[5, 1]] * 2, [[]] * 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": []}, "members is empty"),
        ({"members": [{"method": "ngarm"}]}, "did you mean 'ngram'?"),
        ({"members": ["ngram"]}, "must be a mapping"),
        ({"members": [{"method": "ngram", "verifier": "block"}]}, "share its verifier"),
        ({"members": [NGRAM], "mode": "frist"}, "did you mean 'first'?"),
        ({"members": [NGRAM], "routes": {"code": 0}}, "routes are for mode 'route'"),
        ({"members": [NGRAM], "mode": "route", "routes": {"code": 1}}, "names no single member"),
        ({"members": [NGRAM, NGRAM], "mode": "route", "routes": {"a": "ngram"}}, "names no single member"),
        ({"members": [NGRAM], "min_tokens": 0}, "at least 1, got 0"),
        ({"members": [NGRAM], "num_draft_nodes": 0}, "at least 1, got 0"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as caught:
        registry.validate(SpeculativeConfig("ensemble", options=options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["merge", "vote"])
def test_classical_verifiers_verify_no_union_of_sampled_drafts(mode: str) -> None:
    chain = {"method": "draft_model", "model": EMBEDDED_DRAFT}
    config = SpeculativeConfig("ensemble", "rejection", {"members": [NGRAM, chain], "mode": mode})
    context = draft_context(VOCAB, 512, "rejection", load_tokenizer(EMBEDDED_TARGET))
    with pytest.raises(ConfigError, match="cannot verify sampled tokens"):
        registry.create_drafter(config, context)
    greedy = [NGRAM, {**chain, "draft_sample_method": "greedy"}]
    config = SpeculativeConfig("ensemble", "rejection", {"members": greedy, "mode": mode})
    assert registry.create_drafter(config, context).traits.kinds == {ProposalKind.ONE_HOT}


def test_memory_is_the_members_together() -> None:
    context = draft_context(VOCAB, 512, tokenizer=load_tokenizer(EMBEDDED_TARGET))
    one = registry.create_drafter(SpeculativeConfig.from_mapping(DRAFT), context)
    two = EnsembleDrafter(EnsembleOptions(members=[DRAFT, NGRAM, DRAFT]), context)
    for drafter in (one, two):
        drafter.allocate(100)
    assert two.memory_bytes() == 2 * one.memory_bytes() > 0
    assert two.traits.kv_bytes_per_token == 2 * one.traits.kv_bytes_per_token > 0
