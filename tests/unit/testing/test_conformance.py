"""The conformance kit passes the drafters that keep the contract and names what is wrong with the others."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any, ClassVar

import pytest
import torch

from slipstream.core.proposal import ROOT, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter, Observation
from slipstream.draft.lookup.ngram import NgramDrafter, NgramOptions
from slipstream.draft.lookup.suffix import SuffixDrafter, SuffixOptions
from slipstream.draft.off import OffDrafter, OffOptions
from slipstream.draft.traits import DrafterTraits
from slipstream.sampling.params import SamplingParams
from slipstream.testing.conformance import check_drafter
from slipstream.testing.stub_drafters import (
    OracleDrafter,
    OracleOptions,
    OverBudgetDrafter,
    OverBudgetOptions,
    RaisingDrafter,
    RaisingOptions,
    RandomTreeDrafter,
    RandomTreeOptions,
    SlowDrafter,
    SlowOptions,
    draft_context,
)

VOCAB_SIZE = 12
CONTEXT = draft_context(VOCAB_SIZE)


# --- drafters that keep the contract ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "drafter",
    [
        lambda: OffDrafter(OffOptions(), CONTEXT),
        lambda: NgramDrafter(NgramOptions(), CONTEXT),
        lambda: NgramDrafter(NgramOptions(9, 1, 6), CONTEXT),
        lambda: SuffixDrafter(SuffixOptions(suffix_decoding_max_cached_requests=0), CONTEXT),
        lambda: SuffixDrafter(SuffixOptions(suffix_decoding_max_cached_requests=0, tree=True), CONTEXT),
    ],
)
def test_drafters_without_memory_keep_the_contract(drafter: Any, seed: int) -> None:
    check_drafter(drafter, VOCAB_SIZE, depends_on_text_only=True, seed=seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "options",
    [SuffixOptions(), SuffixOptions(tree=True, num_draft_nodes=9, suffix_decoding_max_spec_factor=2.0)],
)
def test_suffix_decoding_keeps_the_contract(options: SuffixOptions, seed: int) -> None:
    check_drafter(lambda: SuffixDrafter(options, CONTEXT), VOCAB_SIZE, shares_across_requests=True, seed=seed)


@pytest.mark.parametrize(
    "drafter",
    [
        lambda: OracleDrafter(OracleOptions([[i % VOCAB_SIZE] * 96 for i in range(12)], 0.5), CONTEXT),
        lambda: RandomTreeDrafter(RandomTreeOptions(num_draft_nodes=20), CONTEXT),
        lambda: SlowDrafter(SlowOptions(delay_s=0.0), CONTEXT),
    ],
)
def test_the_stubs_that_should_keep_the_contract_do(drafter: Any) -> None:
    check_drafter(drafter, VOCAB_SIZE, params=[SamplingParams(temperature=0), SamplingParams(seed=3)])


# --- drafters that break it -------------------------------------------------------------------------------


class Trees(RandomTreeDrafter):
    """What the mutants below start from."""

    def __init__(self) -> None:
        super().__init__(RandomTreeOptions(), CONTEXT)
        self.seen: dict[int, int] = {}
        self.num_calls = 0

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        self.num_calls += 1
        for sequence in sequences:
            self.seen.setdefault(sequence.id, len(sequence.token_ids))
        return super().propose(sequences, budgets)

    def release(self, sequence: Sequence) -> None:
        self.seen.pop(sequence.id, None)

    def chains(self, token: int, budgets: Seq[int]) -> list[Proposal]:
        return [Proposal.chain([token % VOCAB_SIZE] * min(budget, 1)) for budget in budgets]


class ProposesForTooFew(Trees):
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        return super().propose(sequences, budgets)[1:]


class LeavesTheVocabulary(Trees):
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        return [Proposal.chain([VOCAB_SIZE] * min(budget, 1)) for budget in budgets]


class HidesItsKind(Trees):
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        return [
            Proposal(p.token_ids, p.parents, ProposalKind.COUPLED)
            for p in super().propose(sequences, budgets)
        ]


class RepeatsSiblings(Trees):
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        return [Proposal((1,) * min(budget, 2), (ROOT,) * min(budget, 2)) for budget in budgets]


class WritesIntoTheText(Trees):
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        sequences[0].token_ids.append(1)
        return super().propose(sequences, budgets)


class CountsItsCalls(Trees):
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        self.num_calls += 1
        return self.chains(self.num_calls, budgets)


class LooksAtItsBatch(Trees):
    """The first token of each chain is how many sequences it was met with."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        super().propose(sequences, budgets)
        return self.chains(len(self.seen), budgets)


class ForgetsNobody(Trees):
    def release(self, sequence: Sequence) -> None:
        pass

    def memory_bytes(self) -> int:
        return len(self.seen)


class HidesWhatItKeeps(ForgetsNobody):
    """As before, and untrue about it."""

    def memory_bytes(self) -> int:
        return 0


class KeepsSequences(Trees):
    def release(self, sequence: Sequence) -> None:
        self.seen.pop(sequence.id, None)
        self.released = sequence


class KeepsTheirNames(Trees):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[tuple[str, int]] = set()

    def observe(self, observations: Seq[Observation]) -> None:
        self.names.update((seen.sequence.request_id, len(seen.proposal)) for seen in observations)


class KeepsTexts(Trees):
    """Neither by id nor in the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[int, ...]] = []

    def release(self, sequence: Sequence) -> None:
        self.seen.pop(sequence.id, None)
        self.texts.append(tuple(sequence.token_ids))


class KeepsTextsInItsClass(Trees):
    texts: ClassVar[list[tuple[int, ...]]] = []

    def release(self, sequence: Sequence) -> None:
        self.seen.pop(sequence.id, None)
        self.texts.append(tuple(sequence.token_ids))


class KeepsTextsInAClosure(Trees):
    def __init__(self) -> None:
        super().__init__()
        texts: list[torch.Tensor] = []
        self.keep = lambda sequence: texts.append(torch.tensor(sequence.token_ids))

    def release(self, sequence: Sequence) -> None:
        self.seen.pop(sequence.id, None)
        self.keep(sequence)


class CannotForgetAStranger(Trees):
    def release(self, sequence: Sequence) -> None:
        del self.seen[sequence.id]


class RemembersWhatCameBefore(Trees):
    """Not forgotten at release, though of constant size: a finished sequence's id decides for its successor."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        super().propose(sequences, budgets)
        return [self.chains(self.seen[s.id], [b])[0] for s, b in zip(sequences, budgets, strict=True)]

    def release(self, sequence: Sequence) -> None:
        pass


class DependsOnWhenItWasMet(RemembersWhatCameBefore):
    """Within the contract, but no function of the text alone."""

    def release(self, sequence: Sequence) -> None:
        self.seen.pop(sequence.id, None)


class AnswersOnlyOnce(Trees):
    def __init__(self) -> None:
        super().__init__()
        self.answered: set[tuple[int, int]] = set()

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        keys = [(sequence.id, len(sequence.token_ids)) for sequence in sequences]
        new = [budget if key not in self.answered else 0 for key, budget in zip(keys, budgets, strict=True)]
        self.answered.update(keys)
        return self.chains(3, new)


class SwapsItsSequences(Trees):
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        heads = [
            [sequence.token_ids[-1]] * min(budget, 1)
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        if len(heads) > 1 and len(heads[0]) == len(heads[1]):
            heads[:2] = heads[1::-1]
        return [Proposal.chain(head) for head in heads]


class KnowsItIsBroken(Trees):
    def integrity(self) -> list[str]:
        return ["a slot is held by nobody"]


class FailsToObserve(Trees):
    def observe(self, observations: Seq[Observation]) -> None:
        if any(seen.sequence.finished for seen in observations):
            raise KeyError("finished")


class MisstatesItsDraws(Trees):
    traits = DrafterTraits(kinds=frozenset({ProposalKind.SAMPLED_IID}))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        import torch

        probs = torch.full((1, VOCAB_SIZE), 0.5)
        return [
            Proposal.chain([1], ProposalKind.SAMPLED_IID, probs) if budget else Proposal()
            for budget in budgets
        ]


@pytest.mark.parametrize(
    ("drafter", "complaint"),
    [
        (lambda: OverBudgetDrafter(OverBudgetOptions(), CONTEXT), "exceed the budget"),
        (lambda: RaisingDrafter(RaisingOptions(at_call=5), CONTEXT), "propose raised RuntimeError.*call 5"),
        (
            lambda: RaisingDrafter(RaisingOptions(sequence_id=3), CONTEXT),
            "propose raised RuntimeError.*sequence 3",
        ),
        (ProposesForTooFew, "for 1 sequences"),
        (LeavesTheVocabulary, "is not an id below 12"),
        (HidesItsKind, "its traits declare"),
        (RepeatsSiblings, "siblings repeat a token"),
        (WritesIntoTheText, "propose changed the sequences"),
        (CountsItsCalls, "called again|drafts differently"),
        (LooksAtItsBatch, "other sequences of the batch"),
        (ForgetsNobody, "memory grows"),
        (HidesWhatItKeeps, "is not forgotten: the drafter still holds the id .* in seen"),
        (KeepsSequences, "is not forgotten: the drafter still holds sequence .* itself, in released"),
        (KeepsTheirNames, "is not forgotten: the drafter still holds the request id .* in names"),
        (KeepsTexts, "keeps more and more"),
        (KeepsTextsInItsClass, "keeps more and more"),
        (KeepsTextsInAClosure, "keeps more and more"),
        (CannotForgetAStranger, "release raised KeyError"),
        (RemembersWhatCameBefore, "from a new one"),
        (AnswersOnlyOnce, "called again"),
        (SwapsItsSequences, "called again|other sequences of the batch"),
        (KnowsItIsBroken, "a slot is held by nobody"),
        (FailsToObserve, "observe raised KeyError"),
        (MisstatesItsDraws, "not a distribution"),
    ],
)
def test_a_broken_contract_is_named(drafter: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_drafter(drafter, VOCAB_SIZE)


def test_text_alone_is_asked_for_separately() -> None:
    check_drafter(DependsOnWhenItWasMet, VOCAB_SIZE)
    with pytest.raises(AssertionError, match="more than the committed text"):
        check_drafter(DependsOnWhenItWasMet, VOCAB_SIZE, depends_on_text_only=True)


class OneForAllTenants(SuffixDrafter):
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        find = type(self.cache).index

        def index(tenant: str) -> Any:
            return find(self.cache, tenant) or next(
                (find(self.cache, other) for other in self.cache.tenants), None
            )

        self.cache.index = index  # type: ignore[method-assign]
        return super().propose(sequences, budgets)

    def integrity(self) -> list[str]:
        return []


class NeverResets(SuffixDrafter):
    def reset(self) -> None:
        pass


@pytest.mark.parametrize(
    ("cls", "complaint"), [(OneForAllTenants, "other tenants"), (NeverResets, "memory grows")]
)
def test_what_is_shared_is_shared_by_one_tenant_and_forgotten_at_reset(
    cls: type[SuffixDrafter], complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_drafter(lambda: cls(SuffixOptions(), CONTEXT), VOCAB_SIZE, shares_across_requests=True)


def test_sharing_must_be_admitted() -> None:
    with pytest.raises(AssertionError):
        check_drafter(lambda: SuffixDrafter(SuffixOptions(), CONTEXT), VOCAB_SIZE)


def test_only_the_coupled_verifier_takes_coupled_proposals() -> None:
    class Coupled(HidesItsKind):
        traits = DrafterTraits(kinds=frozenset({ProposalKind.COUPLED}))

    check_drafter(Coupled, VOCAB_SIZE)
    with pytest.raises(AssertionError, match="rejection verifier does not accept"):
        check_drafter(Coupled, VOCAB_SIZE, verifier="rejection")


# --- the oracle -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_the_oracle_is_right_as_often_as_it_says(accuracy: float) -> None:
    rng = random.Random(0)
    texts = [rng.choices(range(VOCAB_SIZE), k=500) for _ in range(4)]
    drafter: Drafter = OracleDrafter(OracleOptions(texts, accuracy, num_speculative_tokens=10), CONTEXT)
    right = []
    for text in texts:
        for length in range(1, 500, 10):
            asking = Sequence(0, "0", 0, text[:length], 1, SamplingParams(), 0)
            draft = drafter.propose([asking], [10])[0].token_ids
            assert len(draft) == min(10, 500 - length)
            right += [draft_token == token for draft_token, token in zip(draft, text[length:], strict=False)]
    assert abs(sum(right) / len(right) - accuracy) < 0.04
    assert accuracy not in (0.0, 1.0) or len(set(right)) == 1


def test_the_oracle_is_silent_about_other_texts() -> None:
    drafter = OracleDrafter(OracleOptions([[1, 2, 3]]), CONTEXT)
    unknown = Sequence(0, "0", 0, [1, 3], 1, SamplingParams(), 0)
    assert not drafter.propose([unknown], [4])[0].token_ids
