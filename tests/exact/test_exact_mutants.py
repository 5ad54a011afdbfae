"""The check has teeth: each classical mistake, put in on purpose, is found by the very check that the grid passes."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import pytest
import torch
from exact_cases import BIASED, EXACT, SHAPES, Overflowing, far, under_grammar

from slipstream.core.proposal import ROOT, Proposal, ProposalKind, Verdict
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.sampling.noise import Noise, Stream
from slipstream.sampling.params import SamplingParams
from slipstream.testing.enumeration import Target, exactness_gap
from slipstream.testing.table_model import TableDrafter, TableModel, Text
from slipstream.verify import Judgement, Verifier, block, create_verifier, rejection

MODEL = TableModel(seed=2)
PLAIN = Target(MODEL)


def sampled(target: Target, shape: str, kind: ProposalKind = ProposalKind.SAMPLED_IID) -> TableDrafter:
    return TableDrafter(far(target), SHAPES[shape], kind)


# ---- drafters that say something untrue about their drafts


@dataclass(frozen=True)
class Mislabelled:
    """Drafts made in one way and declared as made in another."""

    drafter: TableDrafter
    kind: ProposalKind

    def __call__(self, text: Text, noise: Noise, max_depth: int) -> Proposal:
        proposal = self.drafter(text, noise, max_depth)
        paths = [proposal.path(node)[:-1] for node in range(len(proposal))]
        texts = [(*text, *(proposal.token_ids[node] for node in path)) for path in paths]
        rows = [self.drafter.log_probs(before).exp() for before in texts]
        return replace(proposal, kind=self.kind, draft_probs=torch.stack(rows) if rows else None)


MISLABELLED = {
    "top-k selected, called samples": (ProposalKind.ONE_HOT, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT),
    "argmax, called a sample": (ProposalKind.ONE_HOT, ProposalKind.SAMPLED_IID),
    "independent, called without replacement": (
        ProposalKind.SAMPLED_IID,
        ProposalKind.SAMPLED_WITHOUT_REPLACEMENT,
    ),
    "without replacement, called independent": (
        ProposalKind.SAMPLED_WITHOUT_REPLACEMENT,
        ProposalKind.SAMPLED_IID,
    ),
}
WIDE = Target(TableModel(vocab_size=4, seed=2))


@pytest.mark.parametrize("case", MISLABELLED)
def test_mislabelled_drafts(case: str) -> None:
    made, declared = MISLABELLED[case]
    drafter = Mislabelled(sampled(WIDE, "siblings_2", made), declared)
    assert exactness_gap(WIDE, drafter, create_verifier("rejection"), 2) > BIASED
    assert exactness_gap(WIDE, drafter, create_verifier("coupled"), 2) < EXACT


def test_samples_may_be_called_chosen() -> None:
    """The rule for chosen tokens is exact for every fixed tree, hence for random ones."""
    drafter = Mislabelled(sampled(WIDE, "siblings_2"), ProposalKind.ONE_HOT)
    assert exactness_gap(WIDE, drafter, create_verifier("rejection"), 2) < EXACT


@dataclass(frozen=True)
class DropsUnlikely:
    """Cuts a sampled chain where the token drawn has a low probability of its own: it anticipates."""

    drafter: TableDrafter

    def __call__(self, text: Text, noise: Noise, max_depth: int) -> Proposal:
        proposal = self.drafter(text, noise, max_depth)
        kept = len(proposal)
        for node, token in enumerate(proposal.token_ids):
            if proposal.draft_probs is not None and proposal.draft_probs[node, token] < 0.4:
                kept = node
                break
        probs = proposal.draft_probs[:kept] if proposal.draft_probs is not None else None
        return Proposal.chain(proposal.token_ids[:kept], proposal.kind, probs)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_sampled_draft_dropped_by_its_own_probability(verifier: str) -> None:
    drafter = DropsUnlikely(sampled(PLAIN, "chain_2"))
    assert exactness_gap(PLAIN, drafter, create_verifier(verifier), 3) > BIASED


def test_coupled_allows_dropping_what_was_drawn() -> None:
    assert (
        exactness_gap(PLAIN, DropsUnlikely(sampled(PLAIN, "chain_2")), create_verifier("coupled"), 3) < EXACT
    )


# ---- verifiers with a wrong rule


def test_unrenormalised_draft_without_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection.draft_row

    def faulty(proposal: Proposal, node: int, tried: Seq[int], like: torch.Tensor) -> torch.Tensor:
        draft = right(proposal, node, (), like)
        draft[list(tried)] = 0.0
        return draft

    monkeypatch.setattr(rejection, "draft_row", faulty)
    drafter = sampled(PLAIN, "siblings_2", ProposalKind.SAMPLED_WITHOUT_REPLACEMENT)
    assert exactness_gap(PLAIN, drafter, create_verifier("rejection"), 2) > BIASED


def test_siblings_judged_without_taking_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "residual", lambda target, draft: target)
    drafter = sampled(PLAIN, "siblings_2")
    assert exactness_gap(PLAIN, drafter, create_verifier("rejection"), 2) > BIASED


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_ratio_that_is_no_number_taken_for_certain(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`min(1.0, nan)` is 1.0, so a draft model that overflows would write the text."""
    drafter = Overflowing(sampled(PLAIN, "chain_2"), math.nan)
    assert exactness_gap(PLAIN, drafter, create_verifier(verifier), 3) < EXACT
    for module in (rejection, block):
        monkeypatch.setattr(module, "is_finite", lambda draft: True)
        monkeypatch.setattr(module, "likelihood_ratio", lambda p, q, token: float(p[token] / q[token]))
    assert exactness_gap(PLAIN, drafter, create_verifier(verifier), 3) > BIASED


class FirstFailureEnds(Noise):
    """Coins of which none is tossed after the first that said no."""

    def __init__(self, noise: Noise) -> None:
        super().__init__(noise.seed, noise.root_position)
        self.noise = noise
        self.failed = False

    def accepts(self, probability: float, position: int, candidate: int) -> bool:
        self.failed = self.failed or not self.noise.accepts(probability, position, candidate)
        return not self.failed

    def draw(self, log_probs: torch.Tensor, position: int, stream: Stream, index: int = 0) -> int:
        return self.noise.draw(log_probs, position, stream, index)


class StopsAtFirstFailure(Verifier):
    name = "block, stopping at the first failure"
    kinds = frozenset({ProposalKind.SAMPLED_IID})

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        return create_verifier("block").verify(
            [replace(j, noise=FirstFailureEnds(j.noise)) for j in judgements]
        )


def test_block_verification_that_stops_at_the_first_failure() -> None:
    assert exactness_gap(PLAIN, sampled(PLAIN, "chain_2"), StopsAtFirstFailure(), 3) > BIASED
    assert exactness_gap(PLAIN, sampled(PLAIN, "chain_2"), create_verifier("block"), 3) < EXACT


def test_block_verification_with_the_token_level_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection.residual
    monkeypatch.setattr(block, "residual", lambda target, draft: right(target / target.sum(), draft))
    assert exactness_gap(PLAIN, sampled(PLAIN, "chain_3"), create_verifier("block"), 3) > BIASED


# ---- targets that are processed wrongly


@dataclass
class BonusRowUnprocessed(Target):
    def judgement(self, output: Text, proposal: Proposal, noise: Noise) -> Judgement:
        judgement = super().judgement(output, proposal, noise)
        rows = judgement.log_probs.clone()
        for node in range(len(proposal)):
            if node not in proposal.children:
                path = [proposal.token_ids[step] for step in proposal.path(node)]
                rows[node + 1] = self.model.log_probs((*self.prompt, *output, *path))
        return replace(judgement, log_probs=rows)


@dataclass
class PenaltiesOfTheRoot(Target):
    """Every node gets the penalties of the committed text, as with one vector accumulated for each request."""

    def log_probs(self, output: Text, paths: tuple[Text, ...] = ((),)) -> torch.Tensor:
        logits = torch.stack([self.model.logits((*self.prompt, *output, *path)) for path in paths])
        return self._processor.log_probs(logits, output, [()] * len(paths))


@pytest.mark.parametrize("verifier", ["coupled", "rejection", "block"])
@pytest.mark.parametrize(
    ("faulty", "params"),
    [
        (BonusRowUnprocessed, SamplingParams(top_k=2)),
        (BonusRowUnprocessed, SamplingParams(temperature=0.5)),
        (PenaltiesOfTheRoot, SamplingParams(presence_penalty=0.9)),
        (PenaltiesOfTheRoot, SamplingParams(repetition_penalty=1.8)),
    ],
)
def test_wrongly_processed_rows(faulty: type[Target], params: SamplingParams, verifier: str) -> None:
    drafter = sampled(PLAIN, "chain_1")
    assert exactness_gap(faulty(MODEL, params), drafter, create_verifier(verifier), 2) > BIASED
    assert exactness_gap(Target(MODEL, params), drafter, create_verifier(verifier), 2) < EXACT


def test_cousins_that_share_their_randomness_are_not_judged() -> None:
    def drafter(text: Text, noise: Noise, max_depth: int) -> Proposal:
        row = MODEL.log_probs(text)
        tokens = tuple(noise.draw(row, noise.root_position, Stream.DRAFT) for _ in range(2))
        return Proposal(tokens, (ROOT, ROOT), ProposalKind.SAMPLED_IID, row.exp().expand(2, -1))

    with pytest.raises(ValueError, match="used twice"):
        exactness_gap(PLAIN, drafter, create_verifier("rejection"), 2)


def test_verifier_that_reads_two_rows_of_one_position_is_not_judged() -> None:
    class Peeking(Verifier):
        name = "peeking"
        kinds = frozenset(ProposalKind)

        def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
            (judgement,) = judgements
            noise, start = judgement.noise, judgement.noise.root_position
            depths = [0, *judgement.proposal.depths]
            (chosen,) = noise.choose_all([(noise, judgement.log_probs, [start + d for d in depths])])
            return [Verdict((), max(chosen))]

    drafter = TableDrafter(MODEL.log_probs, (ROOT, ROOT), ProposalKind.ONE_HOT)
    with pytest.raises(NotImplementedError, match="share the noise"):
        exactness_gap(PLAIN, drafter, Peeking(), 2)


# ---- grammars that are not applied to every row


ROWS = {
    "the bonus row": lambda path, paths: len(path) == max(map(len, paths)) > 0,
    "rows at inner nodes": lambda path, paths: 0 < len(path) < max(map(len, paths)),
    "every row but the root's": lambda path, paths: len(path) > 0,
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("verifier", ["coupled", "rejection", "block"])
def test_grammar_not_applied_to(rows: str, verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Grammar.allowed

    def faulty(self: Grammar, output: Seq[int], paths: Seq[Seq[int]], width: int) -> torch.Tensor:
        allowed = right(self, output, paths, width)
        allowed[[ROWS[rows](path, paths) for path in paths]] = True
        return allowed

    target = under_grammar("b?(a|ab)b*a?")
    drafter = sampled(target, "chain_2")
    assert exactness_gap(target, drafter, create_verifier(verifier), 3) < EXACT
    monkeypatch.setattr(Grammar, "allowed", faulty)
    faulty_target = under_grammar("b?(a|ab)b*a?")
    assert exactness_gap(faulty_target, drafter, create_verifier(verifier), 3) > BIASED


def test_grammar_that_does_not_follow_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node gets the mask of the committed text."""
    right = Grammar.mask
    monkeypatch.setattr(Grammar, "mask", lambda self, output, path=(): right(self, output))
    target = under_grammar("b?(a|ab)b*a?")
    assert exactness_gap(target, sampled(target, "chain_2"), create_verifier("rejection"), 3) > BIASED
