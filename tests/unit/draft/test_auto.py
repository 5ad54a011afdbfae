"""The drafter that others are chosen from: who is asked, who is told what, and what its configuration may be."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.assets import EMBEDDED_EAGLE3
from slipstream.control.types import NOTHING, Choice
from slipstream.core.proposal import ROOT, Proposal, ProposalKind, Verdict
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.combine.auto import AutoDrafter, AutoOptions
from slipstream.draft.combine.merging import depth_along
from slipstream.draft.traits import DrafterTraits
from slipstream.engine.drafting import Drafting
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import OracleOptions, draft_context

VOCAB = 64


class SaysDrafter(Drafter):
    """Proposes the chain that it is told to, and keeps what it is asked and told."""

    Options = OracleOptions
    traits = DrafterTraits(looks_up=True, max_nodes=8)

    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self.says: tuple[int, ...] = ()
        self.asked: list[tuple[int, int]] = []
        self.held: set[int] = set()
        self.seen: list[Observation] = []

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        self.asked += [(sequence.id, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        self.held |= {sequence.id for sequence in sequences}
        return [Proposal.chain(list(self.says[:budget])) for budget in budgets]

    def observe(self, observations: Seq[Observation]) -> None:
        self.seen += observations

    def release(self, sequence: Sequence) -> None:
        self.held.discard(sequence.id)

    def num_held(self) -> int:
        return len(self.held)


class ForgetfulDrafter(SaysDrafter):
    """Learns nothing from what others guessed."""

    traits = replace(SaysDrafter.traits, observes_all=False)


class CoupledDrafter(SaysDrafter):
    """Says of its draft tokens that they were drawn with the target's noise, whatever the verifier is."""

    traits = replace(SaysDrafter.traits, kinds=frozenset(ProposalKind))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        return [replace(made, kind=ProposalKind.COUPLED) for made in super().propose(sequences, budgets)]


def make_auto(*methods: str, verifier: str = "coupled") -> tuple[AutoDrafter, list[SaysDrafter]]:
    options = AutoOptions(drafters=[{"method": f"{__name__}:{method}", "texts": [[1]]} for method in methods])
    auto = AutoDrafter(options, draft_context(VOCAB, verifier=verifier))
    drafters = [member.drafter for member in auto.members]
    assert all(isinstance(drafter, SaysDrafter) for drafter in drafters)
    return auto, drafters  # type: ignore[return-value]


def make(*methods: str, verifier: str = "coupled") -> tuple[Drafting, list[SaysDrafter]]:
    auto, drafters = make_auto(*methods, verifier=verifier)
    return Drafting(auto, "auto"), drafters


def item(sequence: Sequence, max_draft_tokens: int = 8) -> StepItem:
    """Its place in a step that decodes."""
    return StepItem(sequence, sequence.num_pending, max_draft_tokens)


def verified(drafted: StepItem, proposal: Proposal, *emitted: int) -> StepItem:
    """The item once a `proposal` was checked of which some tokens were `emitted`, the accepted ones first."""
    drafted.proposal = proposal
    drafted.logits = torch.zeros(1 + len(proposal), VOCAB)
    num_accepted = depth_along(proposal, emitted)
    drafted.verdict = Verdict(tuple(range(num_accepted)), emitted[-1])
    drafted.sequence.token_ids += emitted
    drafted.record_emitted(len(emitted))
    return drafted


def text(number: int, *token_ids: int) -> Sequence:
    return Sequence(number, "r", 0, list(token_ids) or [1, 2, 3], 1, SamplingParams(), 0)


def test_each_sequence_gets_the_drafter_that_was_chosen_for_it() -> None:
    drafting, (left, right) = make("SaysDrafter", "SaysDrafter")
    left.says, right.says = (1, 2, 3), (4, 5, 6)
    items = [item(text(number), 1 if number == 3 else 8) for number in range(4)]
    drafting.call_drafters(list(zip(items, [Choice(0, 8), Choice(1, 2), NOTHING, Choice(0, 8)], strict=True)))
    assert [each.proposal.token_ids for each in items] == [(1, 2, 3), (4, 5), (), (1,)]
    assert (left.asked, right.asked) == ([(0, 8), (3, 1)], [(1, 2)])
    assert [(call.drafter, call.num_sequences) for call in drafting.record.calls] == [(0, 2), (1, 1)]


def test_a_lookup_is_asked_first_and_its_guess_is_taken_when_it_is_long_enough() -> None:
    drafting, (lookup, draft) = make("SaysDrafter", "SaysDrafter")
    lookup.says, draft.says = (1, 2, 3), (4, 5, 6)
    taken, short = Choice(1, 2, lookup=0, min_tokens=3), Choice(1, 2, lookup=0, min_tokens=4)
    nothing_else = Choice(lookup=0, min_tokens=4)
    items = [item(text(number)) for number in range(3)]
    drafting.call_drafters(list(zip(items, [taken, short, nothing_else], strict=True)))
    assert [each.proposal.token_ids for each in items] == [(1, 2, 3), (4, 5), ()]
    assert lookup.asked == [(0, 8), (1, 8), (2, 8)]
    assert draft.asked == [(1, 2)], "the other one has its guess already, or wants none"
    assert [len(each.found) for each in items] == [3, 3, 3]
    assert [each.drafter for each in items] == [0, 1, None]


def test_a_drafter_that_was_asked_for_a_prompt_has_not_drafted_in_the_step_after_it() -> None:
    drafting, (asked, other) = make("SaysDrafter", "SaysDrafter")
    asked.says = other.says = (7,)
    prompt = item(text(0), 0)
    drafting.call_drafters([(prompt, Choice(0))])
    assert prompt.drafter == 0
    items = [item(text(0)), item(text(1))]
    drafting.call_drafters([(items[1], Choice(1, 8)), (items[0], NOTHING)])
    assert [each.drafter for each in items] == [None, 1]


def test_a_drafter_is_told_of_its_own_guesses_and_of_the_text() -> None:
    drafting, (left, right) = make("SaysDrafter", "ForgetfulDrafter")
    left.says, right.says = (7, 8), (9,)
    items = [item(text(0, 1, 2)), item(text(1, 1, 2))]
    drafting.call_drafters([(items[0], Choice(0, 8)), (items[1], Choice(1, 8))])
    drafting.observe(
        [verified(each, each.proposal, *each.proposal.token_ids, 5) for each in items], drafting.record
    )
    assert [(seen.sequence.id, seen.proposal.token_ids, seen.num_accepted) for seen in left.seen] == [
        (0, (7, 8), 2),
        (1, (), 0),
    ]
    assert [seen.logits.shape[0] for seen in left.seen] == [3, 1]
    assert [(seen.sequence.id, seen.proposal.token_ids) for seen in right.seen] == [(1, (9,))]


@pytest.mark.parametrize("was_cut", [False, True])
def test_each_drafter_learns_whether_the_answer_was_cut(was_cut: bool) -> None:
    """Also one that was not asked, and the author of what another tree held."""
    drafting, (asked, other) = make("SaysDrafter", "SaysDrafter")
    asked.says = (7, 8)
    only = item(text(0, 1, 2))
    drafting.call_drafters([(only, Choice(0, 8))])
    drafting.observe(
        [verified(only, Proposal((7,), (ROOT,)), *((7,) if was_cut else (7, 5)))], drafting.record
    )
    assert [seen.was_cut for seen in (*asked.seen, *other.seen)] == [was_cut, was_cut]


def test_what_a_grammar_took_away_is_not_told() -> None:
    """The engine may check another tree than the drafter's own: that with which it shares nodes."""
    drafting, (only,) = make("SaysDrafter")
    only.says = (7, 8)
    step = item(text(0, 1, 2))
    drafting.call_drafters([(step, Choice(0, 8))])
    drafting.observe([verified(step, Proposal((7,), (ROOT,)), 7, 5)], drafting.record)
    assert [(seen.proposal.token_ids, seen.num_accepted) for seen in only.seen] == [((7,), 1)]


def test_a_failing_member_leaves_the_others_alone() -> None:
    drafting, (left, right) = make("SaysDrafter", "SaysDrafter")
    left.says, right.says = (99999,), (4,)
    items = [item(text(0)), item(text(1))]
    drafting.call_drafters([(items[0], Choice(0, 8)), (items[1], Choice(1, 8))])
    assert [each.proposal.token_ids for each in items] == [(), (4,)]
    assert drafting.num_failures == 1
    assert not drafting.guards[0].serves(text(0))
    assert drafting.guards[1].serves(text(0))


@pytest.mark.parametrize(("verifier", "judged"), [("coupled", True), ("rejection", False)])
def test_only_what_the_verifier_judges_is_proposed(verifier: str, judged: bool) -> None:
    """The guards of the members are the only ones that the proposals of `auto` go through."""
    drafting, (only,) = make("CoupledDrafter", verifier=verifier)
    only.says = (7,)
    step = item(text(0))
    drafting.call_drafters([(step, Choice(0, 8))])
    assert len(step.proposal) == int(judged)
    assert drafting.num_failures == (not judged)


def test_released_sequences_are_forgotten() -> None:
    drafting, (only,) = make("SaysDrafter")
    only.says = (7,)
    drafting.call_drafters([(item(text(0)), Choice(0, 8))])
    assert drafting.num_held() == 1
    drafting.release(text(0))
    assert drafting.num_held() == 0


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
    assert [drafter.traits.chain_length for drafter in drafters] == [5, None, None]
    assert [drafter.traits.max_nodes for drafter in drafters] == [5, 16, 2]
