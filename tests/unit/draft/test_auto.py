"""The drafter that others are chosen from: who is asked, who is told what, and what its configuration may be."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.control.types import NOBODY, NOTHING, Choice
from slipstream.core.proposal import ROOT, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.combine.auto import AutoDrafter, AutoOptions
from slipstream.engine.drafters import Drafters
from slipstream.errors import ConfigError
from slipstream.models import load_model, load_tokenizer
from slipstream.sampling.params import SamplingParams
from slipstream.testing.conformance import check_drafter
from slipstream.testing.stub_drafters import OracleOptions, draft_context

VOCAB = 64
SAYS = f"{__name__}:SaysDrafter"


class SaysDrafter(Drafter):
    """Proposes the chain that it is told to, and keeps what it is asked and told."""

    Options = OracleOptions
    looks_up = True

    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self.says: tuple[int, ...] = ()
        self.asked: list[tuple[int, int]] = []
        self.seen: list[Observation] = []

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        self.asked += [(sequence.id, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        return [Proposal.chain(list(self.says[:budget])) for budget in budgets]

    def max_nodes(self) -> int:
        return 8

    def observe(self, observations: Seq[Observation]) -> None:
        self.seen += observations


class ForgetfulDrafter(SaysDrafter):
    """Learns nothing from what others guessed."""

    observes_all = False


class CoupledDrafter(SaysDrafter):
    """Says of its draft tokens that they were drawn with the target's noise, whatever the verifier is."""

    kinds = frozenset(ProposalKind)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        return [replace(made, kind=ProposalKind.COUPLED) for made in super().propose(sequences, budgets)]


def make_auto(*methods: str, verifier: str = "coupled") -> tuple[AutoDrafter, list[SaysDrafter]]:
    options = AutoOptions(drafters=[{"method": f"{__name__}:{method}", "texts": [[1]]} for method in methods])
    auto = AutoDrafter(options, draft_context(VOCAB, verifier=verifier))
    drafters = [member.drafter for member in auto.members]
    assert all(isinstance(drafter, SaysDrafter) for drafter in drafters)
    return auto, drafters  # type: ignore[return-value]


def make(*methods: str, verifier: str = "coupled") -> tuple[Drafters, list[SaysDrafter]]:
    auto, drafters = make_auto(*methods, verifier=verifier)
    return Drafters(auto, "auto"), drafters


def text(number: int, *token_ids: int) -> Sequence:
    return Sequence(number, "r", 0, list(token_ids) or [1, 2, 3], 1, SamplingParams(), 0)


def test_each_sequence_gets_the_drafter_that_was_chosen_for_it() -> None:
    drafting, (left, right) = make("SaysDrafter", "SaysDrafter")
    left.says, right.says = (1, 2, 3), (4, 5, 6)
    proposals = drafting.ask(
        [
            (text(0), 8, Choice(0, 8)),
            (text(1), 8, Choice(1, 2)),
            (text(2), 8, NOTHING),
            (text(3), 1, Choice(0, 8)),
        ]
    )
    assert {key: proposal.token_ids for key, proposal in proposals.items()} == {
        0: (1, 2, 3),
        1: (4, 5),
        3: (1,),
    }
    assert (left.asked, right.asked) == ([(0, 8), (3, 1)], [(1, 2)])
    assert [(call.drafter, call.drafted.num_sequences) for call in drafting.calls] == [(0, 2), (1, 1)]


def test_a_lookup_is_asked_first_and_its_guess_is_taken_when_it_is_long_enough() -> None:
    drafting, (lookup, draft) = make("SaysDrafter", "SaysDrafter")
    lookup.says, draft.says = (1, 2, 3), (4, 5, 6)
    taken, short = Choice(1, 2, lookup=0, min_tokens=3), Choice(1, 2, lookup=0, min_tokens=4)
    nothing_else = Choice(lookup=0, min_tokens=4)
    proposals = drafting.ask([(text(0), 8, taken), (text(1), 8, short), (text(2), 8, nothing_else)])
    assert {key: proposal.token_ids for key, proposal in proposals.items()} == {0: (1, 2, 3), 1: (4, 5)}
    assert lookup.asked == [(0, 8), (1, 8), (2, 8)]
    assert draft.asked == [(1, 2)], "the other one has its guess already, or wants none"
    assert {key: len(found) for key, found in drafting.found.items()} == {0: 3, 1: 3, 2: 3}
    assert [drafting.drafted_by(text(number)) for number in range(3)] == [0, 1, NOBODY]


def test_a_drafter_that_was_asked_for_a_prompt_has_not_drafted_in_the_step_after_it() -> None:
    drafting, (asked, other) = make("SaysDrafter", "SaysDrafter")
    asked.says = other.says = (7,)
    drafting.ask([(text(0), 0, Choice(0))])
    assert drafting.drafted_by(text(0)) == 0
    drafting.ask([(text(1), 8, Choice(1, 8)), (text(0), 0, NOTHING)])
    assert [drafting.drafted_by(text(number)) for number in range(2)] == [NOBODY, 1]


def test_a_drafter_is_told_of_its_own_guesses_and_of_the_text() -> None:
    drafting, (left, right) = make("SaysDrafter", "ForgetfulDrafter")
    left.says, right.says = (7, 8), (9,)
    sequences = [text(0, 1, 2), text(1, 1, 2)]
    answers = drafting.ask([(sequences[0], 8, Choice(0, 8)), (sequences[1], 8, Choice(1, 8))])
    proposals = [answers[0], answers[1]]
    for sequence, proposal in zip(sequences, proposals, strict=True):
        sequence.token_ids += [*proposal.token_ids, 5]
    drafting.observe(
        [
            Observation(sequence, proposal, len(proposal), torch.zeros(1 + len(proposal), VOCAB), 2)
            for sequence, proposal in zip(sequences, proposals, strict=True)
        ]
    )
    assert [(seen.sequence.id, seen.proposal.token_ids, seen.num_accepted) for seen in left.seen] == [
        (0, (7, 8), 2),
        (1, (), 0),
    ]
    assert [seen.logits.shape[0] for seen in left.seen] == [3, 1]
    assert [(seen.sequence.id, seen.proposal.token_ids) for seen in right.seen] == [(1, (9,))]
    assert drafting.num_held() == 0


@pytest.mark.parametrize("was_cut", [False, True])
def test_each_drafter_learns_whether_the_answer_was_cut(was_cut: bool) -> None:
    """Also one that was not asked, and the author of what another tree held."""
    drafting, (asked, other) = make("SaysDrafter", "SaysDrafter")
    asked.says = (7, 8)
    sequence = text(0, 1, 2)
    drafting.ask([(sequence, 8, Choice(0, 8))])
    sequence.token_ids += [7]
    checked = Proposal((7,), (ROOT,))
    drafting.observe([Observation(sequence, checked, 1, torch.zeros(2, VOCAB), 2, was_cut)])
    assert [seen.was_cut for seen in (*asked.seen, *other.seen)] == [was_cut, was_cut]


def test_what_a_grammar_took_away_is_not_told() -> None:
    """The engine may check another tree than the drafter's own: that with which it shares nodes."""
    drafting, (only,) = make("SaysDrafter")
    only.says = (7, 8)
    sequence = text(0, 1, 2)
    drafting.ask([(sequence, 8, Choice(0, 8))])
    sequence.token_ids += [7, 5]
    checked = Proposal((7,), (ROOT,))
    drafting.observe([Observation(sequence, checked, 1, torch.zeros(2, VOCAB), 2)])
    assert [(seen.proposal.token_ids, seen.num_accepted) for seen in only.seen] == [((7,), 1)]


def test_a_failing_member_leaves_the_others_alone() -> None:
    drafting, (left, right) = make("SaysDrafter", "SaysDrafter")
    left.says, right.says = (99999,), (4,)
    proposals = drafting.ask([(text(0), 8, Choice(0, 8)), (text(1), 8, Choice(1, 8))])
    assert {key: proposal.token_ids for key, proposal in proposals.items()} == {0: (), 1: (4,)}
    assert drafting.num_failures == 1
    assert not drafting.guards[0].serves(text(0))
    assert drafting.guards[1].serves(text(0))


@pytest.mark.parametrize(("verifier", "judged"), [("coupled", True), ("rejection", False)])
def test_only_what_the_verifier_judges_is_proposed(verifier: str, judged: bool) -> None:
    """The guards of the members are the only ones that the proposals of `auto` go through."""
    drafting, (only,) = make("CoupledDrafter", verifier=verifier)
    only.says = (7,)
    answers = drafting.ask([(text(0), 8, Choice(0, 8))])
    assert [len(proposal) for proposal in answers.values()] == [int(judged)]
    assert drafting.num_failures == (not judged)


def test_released_sequences_are_forgotten() -> None:
    drafting, (only,) = make("SaysDrafter")
    only.says = (7,)
    drafting.ask([(text(0), 8, Choice(0, 8))])
    assert drafting.num_held() == 1
    drafting.release(text(0))
    assert drafting.num_held() == 0
    assert drafting.drafted_by(text(0)) == NOBODY


@pytest.mark.parametrize(
    ("drafters", "says"),
    [
        ([], "auto drafters is empty"),
        ([{"method": "off"}], "not drafting is always a choice"),
        ([{"method": "auto"}], "auto drafters has 'auto'"),
        ([{"method": "sufix"}], "did you mean 'suffix'"),
        ([{"method": "suffix", "verifier": "block"}], "share its verifier"),
        ([{"method": "suffix", "depth": 1}], "unknown suffix key 'depth'"),
        (["suffix"], "must be a mapping"),
    ],
)
def test_bad_configurations_are_refused(drafters: list[Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        AutoOptions(drafters=drafters)
    assert "\n" not in str(caught.value)


def test_it_keeps_the_contract() -> None:
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    target = load_model(EMBEDDED_TARGET, dtype="float32", device="cpu")

    def fresh() -> AutoDrafter:
        options = AutoOptions(
            drafters=[{"method": "draft_model", "model": EMBEDDED_DRAFT}, {"method": "suffix"}]
        )
        context = replace(draft_context(4096, tokenizer=tokenizer), target=target)
        auto = AutoDrafter(options, context)
        auto.allocate(2048)
        return auto

    check_drafter(fresh, 4096, shares_across_requests=True, num_sequences=4, max_len=48)


def test_where_nobody_chooses_the_first_is_asked() -> None:
    auto, (first, second) = make_auto("SaysDrafter", "SaysDrafter")
    first.says, second.says = (7,), (8,)
    assert auto.propose([text(0)], [8]) == [Proposal.chain([7])]
    assert second.asked == []


def test_an_eagle_head_drafts_chains_unless_its_entry_has_a_tree() -> None:
    """What `auto` chooses is the depth of chains; by itself a head would draft trees."""
    head = {"method": "eagle3", "model": EMBEDDED_EAGLE3}
    wide = {**head, "tree_top_k": 2}
    fixed = {**head, "tree_top_k": 1, "num_draft_nodes": None, "tree_choices": [[0], [1]]}
    llm = LLM(
        speculative_config={"method": "auto", "drafters": [head, wide, fixed]}, kv_cache_bytes=64 * 2**20
    )
    drafters = [member.drafter for member in llm.engine.drafter_as(AutoDrafter).members]
    assert [drafter.chain_length() for drafter in drafters] == [5, None, None]
    assert [drafter.max_nodes() for drafter in drafters] == [5, 16, 2]
