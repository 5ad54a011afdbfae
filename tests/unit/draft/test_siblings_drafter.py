"""Samples that draft for each other keep the drafter's contract, and draft what the other's noise picks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.core.proposal import Proposal, ProposalKind
from slipstream.core.request import RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Observation
from slipstream.draft.lookup.ngram_rows import NgramRow, NgramRows
from slipstream.draft.lookup.siblings import SiblingsDrafter, SiblingsOptions
from slipstream.errors import ConfigError
from slipstream.sampling.noise import Noise, gumbel, gumbel_at
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import draft_context

VOCAB = 50
SEVERAL = SamplingParams(n=2, temperature=0.8)


def make(**options: Any) -> SiblingsDrafter:
    return SiblingsDrafter(SiblingsOptions(**options), draft_context(VOCAB))


def answer(
    token_ids: list[int],
    number: int = 0,
    request: str = "a",
    tenant: str = "",
    params: SamplingParams = SEVERAL,
) -> Sequence:
    options = RequestOptions(tenant=tenant)
    return Sequence(number, request, number, list(token_ids), 1, params, seed=number, options=options)


def teach(drafter: SiblingsDrafter, by: Sequence, row: torch.Tensor) -> None:
    """A step without drafts that has added the last token of `by`."""
    drafter.observe([Observation(by, Proposal(), 0, row[None])])


def test_the_noise_of_one_token_is_that_of_its_row() -> None:
    for key in (0, 1, 2**63 + 5, Noise(7, 3).key(11)):
        row = gumbel([key], VOCAB)[0]
        assert all(abs(gumbel_at(key, token) - row[token].item()) < 1e-12 for token in range(VOCAB))


def test_a_sibling_gets_the_token_that_its_own_noise_picks() -> None:
    """The logits are exactly those that it will meet, so its best child is always the target's token."""
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    drafter = make(num_successors=VOCAB, min_path_prob=0.01)
    teach(drafter, answer([1, 2, 3, 4, 5]), row)
    picked = set()
    for number in range(1, 30):
        sibling = answer([9, 1, 2, 3, 4], number)
        [proposal] = drafter.propose([sibling], [1])
        assert proposal.kind is ProposalKind.COUPLED
        log_probs = torch.log_softmax(row.double() / 0.8, -1)[None]
        assert proposal.token_ids[0] == Noise(number, 5).choose(log_probs, [5]).item()
        picked.add(proposal.token_ids[0])
    assert len(picked) > 5


def test_who_shares_with_whom() -> None:
    row = torch.zeros(VOCAB)
    row[7] = 30.0
    text = [1, 2, 3, 4]
    for share, served in (("request", {"sibling"}), ("tenant", {"sibling", "other request", "lone"})):
        drafter = make(share=share)
        teach(drafter, answer([*text, 5]), row)
        asked = {
            "sibling": answer(text, 1),
            "other request": answer(text, 2, request="b"),
            "other tenant": answer(text, 3, tenant="red"),
            "lone": answer(text, 4, request="c", params=SamplingParams()),
        }
        proposals = drafter.propose(list(asked.values()), [4] * len(asked))
        assert {name for name, one in zip(asked, proposals, strict=True) if len(one)} == served
        drafter.release(answer([*text, 5]))
        assert bool(drafter.memory_bytes()) == (share == "tenant")


def test_without_coupling_the_most_probable_token_is_one_hot() -> None:
    context = draft_context(VOCAB, verifier="rejection")
    drafter = SiblingsDrafter(SiblingsOptions(min_path_prob=0.01), context)
    row = torch.arange(VOCAB).float()
    teach(drafter, answer([1, 2, 3, 4, 5]), row)
    for number in range(1, 10):
        [proposal] = drafter.propose([answer([1, 2, 3, 4], number)], [3])
        assert proposal.kind is ProposalKind.ONE_HOT
        assert proposal.token_ids[0] == VOCAB - 1


def test_the_store_is_bounded_and_the_longest_ngram_counts() -> None:
    rows = NgramRows(max_entries=8)
    first, second = NgramRow((1,), (0.0,)), NgramRow((2,), (0.0,))
    rows.add([1, 2, 3, 4], first)
    rows.add([9, 9, 3, 4], second)
    assert rows.find([1, 2, 3, 4]) == (first, 4)
    assert rows.find([5, 5, 3, 4]) == (second, 2)
    assert rows.find([4]) == (second, 1)
    assert rows.find([6]) is None
    for token in range(100):
        rows.add([token, token, token, token], first)
    assert len(rows) == 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"share": "everyone"}, "share must be 'request' or 'tenant', got 'everyone'"),
        ({"min_path_prob": 0.0}, "min_path_prob must be above 0 and at most 1"),
        ({"max_entries": 0}, "max_entries"),
    ],
)
def test_bad_options_cost_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**options)


def test_the_likeliest_nodes_of_all_samples_are_drafted() -> None:
    """Four rows a step: the sample whose row is sure gets more of them than the one whose row is not."""
    sure, unsure = torch.zeros(VOCAB), torch.zeros(VOCAB)
    sure[7] = 30.0
    unsure[8:11] = 1.0
    greedy = SamplingParams(n=2, temperature=0)
    drafter = make(max_draft_rows=4, min_path_prob=0.01)
    for end in ([1, 2, 3, 4], [2, 3, 4, 7], [3, 4, 7, 7], [4, 7, 7, 7], [7, 7, 7, 7]):
        teach(drafter, answer([*end, 7], params=greedy), sure)
    teach(drafter, answer([9, 9, 9, 9, 8], params=greedy), unsure)
    proposals = drafter.propose(
        [answer([9, 9, 9, 9], 1, params=greedy), answer([1, 2, 3, 4], 2, params=greedy)], [9, 9]
    )
    assert [len(proposal) for proposal in proposals] == [0, 4]
    assert set(proposals[1].token_ids) == {7}


def test_what_was_promised_in_vain_is_trusted_less_until_it_comes_true_again() -> None:
    row = torch.zeros(VOCAB)
    row[7] = 30.0
    text, greedy = [1, 2, 3, 4], SamplingParams(n=2, temperature=0)
    drafter = make(num_speculative_tokens=1, num_draft_nodes=1)
    teach(drafter, answer([*text, 7], params=greedy), row)

    def drafts_while(token: int) -> list[bool]:
        """Whether it drafts, in steps in which the target chooses `token`."""
        drafted = []
        for _ in range(200):
            [proposal] = drafter.propose([answer(text, 1, params=greedy)], [4])
            drafted.append(len(proposal) > 0)
            came = answer([*text, token], 1, params=greedy)
            accepted = int(drafted[-1] and token == 7)
            rows = row.repeat(1 + len(proposal), 1)
            drafter.observe([Observation(came, proposal, accepted, rows, num_before=len(text))])
        return drafted

    in_vain, again = drafts_while(20), drafts_while(7)
    assert all(in_vain[:5])
    assert not any(in_vain[-5:])
    assert not again[0]
    assert all(again[-5:])


@pytest.mark.parametrize(
    ("rules", "token"),
    [({}, 3), ({"logit_bias": {2: 9.0}}, 2), ({"top_k": 1}, 1), ({"top_p": 0.5}, 1), ({"min_p": 0.9}, 1)],
)
def test_a_requests_rules_on_tokens_are_kept(rules: dict[str, Any], token: int) -> None:
    """The noise of this sample picks token 3 of those that are about as likely, and may pick what the rules leave."""
    row = torch.full((VOCAB,), -40.0)
    row[1], row[2], row[3] = 1.0, 0.0, 0.2
    drafter = make(min_path_prob=0.01, num_draft_nodes=1)
    params = SamplingParams(n=2, temperature=1.0, **rules)
    teach(drafter, answer([1, 2, 3, 4, 5], params=params), row)
    seed = next(
        seed
        for seed in range(1, 200)
        if Noise(seed, 4).choose(torch.log_softmax(row.double(), -1)[None], [4]).item() == 3
        and gumbel_at(Noise(seed, 4).key(4), 2) > gumbel_at(Noise(seed, 4).key(4), 1) - 5
    )
    [proposal] = drafter.propose([answer([1, 2, 3, 4], seed, params=params)], [1])
    assert proposal.token_ids == (token,)
