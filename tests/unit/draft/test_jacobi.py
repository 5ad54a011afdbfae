"""Jacobi decoding keeps the drafter's contract and drafts what the target last said for the same places."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Observation
from slipstream.draft.parallel.lookahead import JacobiDrafter, JacobiOptions, initial_token
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import draft_context

VOCAB = 200


def make(num_speculative_tokens: int = 4) -> JacobiDrafter:
    return JacobiDrafter(JacobiOptions(num_speculative_tokens=num_speculative_tokens), draft_context(VOCAB))


def sequence(token_ids: list[int]) -> Sequence:
    return Sequence(0, "0", 0, list(token_ids), 1, SamplingParams(), seed=0)


def step(drafter: JacobiDrafter, text: Sequence, budget: int, said: list[int], num_accepted: int) -> Proposal:
    """One step in which the target says `said` behind the text and each draft token."""
    proposal = drafter.propose([text], [budget])[0]
    text.token_ids += [*proposal.token_ids[:num_accepted], said[num_accepted]]
    logits = torch.nn.functional.one_hot(torch.tensor(said), VOCAB).float()
    drafter.observe([Observation(text, proposal, num_accepted, logits)])
    return proposal


def test_the_first_draft_is_made_of_the_text() -> None:
    text = [11, 12, 13]
    proposal = make().propose([sequence(text)], [4])[0]
    assert proposal.is_chain
    assert list(proposal.token_ids) == [initial_token(text, position) for position in range(3, 7)]
    assert set(proposal.token_ids) <= set(text)


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 4])
def test_the_target_s_tokens_beyond_the_accepted_are_the_next_draft(num_accepted: int) -> None:
    drafter, text = make(), sequence([1, 2, 3])
    said = [100, 101, 102, 103, 104]
    step(drafter, text, 4, said, num_accepted)
    start = len(text.token_ids)
    expected = said[num_accepted + 1 :]
    expected += [initial_token(text.token_ids, start + i) for i in range(len(expected), 4)]
    assert list(drafter.propose([text], [4])[0].token_ids) == expected


def test_in_an_ensemble_others_guesses_are_committed_too() -> None:
    drafter, text = make(), sequence([1, 2, 3])
    proposal = drafter.propose([text], [4])[0]
    text.token_ids += [40, 41, 42]  # none of them its own
    logits = torch.nn.functional.one_hot(torch.tensor([90, 91, 92, 93, 94]), VOCAB).float()
    drafter.observe([Observation(text, proposal, 0, logits, num_before=3)])
    assert list(drafter.propose([text], [2])[0].token_ids) == [93, 94]  # said of the places behind 42


def test_guesses_that_were_not_checked_keep_their_places() -> None:
    drafter, text = make(), sequence([1, 2, 3])
    step(drafter, text, 4, [100, 101, 102, 103, 104], 0)
    assert step(drafter, text, 2, [110, 111, 112], 0).token_ids == (101, 102)
    assert drafter.propose([text], [3])[0].token_ids[:3] == (111, 112, 104)
    drafter.observe([Observation(text, Proposal(), 0, torch.zeros(1, VOCAB))])  # a token without us
    assert drafter.propose([text], [2])[0].token_ids == (112, 104)


def test_text_that_needs_no_context_is_guessed_after_one_pass() -> None:
    """A target whose token depends on the place alone: what was computed beyond the accepted block is right."""
    drafter, text = make(), sequence([100])
    lengths = []
    for _ in range(4):
        start = len(text.token_ids)
        said = [100 + start + i for i in range(5)]
        draft = drafter.propose([text], [4])[0].token_ids
        num_accepted = next((i for i in range(4) if draft[i] != said[i]), 4)
        step(drafter, text, 4, said, num_accepted)
        lengths.append(num_accepted)
    assert lengths == [0, 4, 0, 4]
    drafter.release(text)
    assert (drafter.num_held(), drafter.memory_bytes()) == (0, 0)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="jacobi num_speculative_tokens must be"):
        JacobiOptions(num_speculative_tokens=0)
