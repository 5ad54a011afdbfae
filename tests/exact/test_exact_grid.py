"""Every verifier, on every kind of proposal and shape of tree, leaves every processed distribution as it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from exact_cases import CLASSICAL_KINDS, DRAFTS, EXACT, SHAPES, TARGETS, VERIFIERS, Overflowing

from slipstream.core.proposal import Proposal, ProposalKind, Verdict
from slipstream.sampling.noise import Noise
from slipstream.testing.enumeration import (
    Target,
    all_runs,
    exactness_gap,
    output_distribution,
    plain_distribution,
)
from slipstream.testing.table_model import TableDrafter, TableModel, Text
from slipstream.verify import Judgement, Verifier, create_verifier

TREES = [shape for shape, parents in SHAPES.items() if not Proposal((0,) * len(parents), parents).is_chain]
DRAWN = (ProposalKind.SAMPLED_IID, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT)


def gap(verifier: str, kind: ProposalKind, shape: str, target: Target, draft: str = "far") -> float:
    proposal = Proposal((0,) * len(SHAPES[shape]), SHAPES[shape])
    is_bushy = len(proposal.depths) > 2 and not proposal.is_chain
    num_tokens = max(2, *proposal.depths) if is_bushy else 3  # bushy trees: enough to reach their leaves
    drafter = TableDrafter(DRAFTS[draft](target), SHAPES[shape], kind)
    return exactness_gap(target, drafter, create_verifier(verifier), num_tokens)


def grid() -> Iterator[Any]:
    """Every verifier, kind, shape and target. Repetitions and the costliest cells are long."""
    for verifier, kind, shape, target in itertools.product(VERIFIERS, CLASSICAL_KINDS, SHAPES, TARGETS):
        # `block` judges trees by the code of `rejection`.
        is_repeated = verifier == "block" and shape in TREES and target not in ("plain", "combined")
        many = (
            shape in ("two_levels", "unbalanced") and kind in DRAWN and TARGETS[target].model.vocab_size > 3
        )
        is_costly = verifier != "coupled" and many and (shape, target) != ("two_levels", "grammar_forced")
        marks = [pytest.mark.long] if is_repeated or is_costly else []
        yield pytest.param(
            verifier, kind, shape, target, marks=marks, id=f"{verifier}-{kind}-{shape}-{target}"
        )


@pytest.mark.parametrize(("verifier", "kind", "shape", "target"), [*grid()])
def test_every_processor_and_shape(verifier: str, kind: ProposalKind, shape: str, target: str) -> None:
    assert gap(verifier, kind, shape, TARGETS[target]) < EXACT


@pytest.mark.parametrize("target", ["wide", "top_k", "sharp"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("kind", CLASSICAL_KINDS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_draft_distribution(verifier: str, kind: ProposalKind, draft: str, target: str) -> None:
    for shape in ("chain_2", "siblings_2"):
        assert gap(verifier, kind, shape, TARGETS[target], draft) < EXACT, shape


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("shape", ["chain_1", "chain_2", "chain_3", "siblings_2", "two_levels"])
@pytest.mark.parametrize("kind", [ProposalKind.SAMPLED_IID, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_draft_probabilities_that_are_not_finite(
    verifier: str, kind: ProposalKind, shape: str, value: float
) -> None:
    """A draft model that overflowed has no say: its tokens are rejected, and p is left as it is."""
    target = TARGETS["plain"]
    drafter = Overflowing(TableDrafter(DRAFTS["far"](target), SHAPES[shape], kind), value)
    assert exactness_gap(target, drafter, create_verifier(verifier), 3) < EXACT


@pytest.mark.parametrize("kind", CLASSICAL_KINDS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_draft_is_made_once_and_judged_in_every_way(verifier: str, kind: ProposalKind) -> None:
    """The numbers are those of runs that each make their draft anew."""
    target = TARGETS["plain"]
    drafter = TableDrafter(DRAFTS["far"](target), SHAPES["two_levels"], kind)
    num_drafts = 0

    def counted(text: Text, noise: Noise, max_depth: int) -> Proposal:
        nonlocal num_drafts
        num_drafts += 1
        return drafter(text, noise, max_depth)

    def run(noise: Noise) -> Text:
        proposal = drafter((), noise, 1)
        (verdict,) = create_verifier(verifier).verify([target.judgement((), proposal, noise)])
        return target.cut((), verdict.token_ids(proposal), 1)

    runs = list(all_runs(run))
    expected: dict[Text, float] = {}
    for weight, text in runs:
        expected[text] = expected.get(text, 0.0) + weight
    assert output_distribution(target, counted, create_verifier(verifier), 1) == expected
    drafts = [proposal.token_ids for _, proposal in all_runs(lambda noise: drafter((), noise, 1))]
    assert num_drafts == len(drafts) < len(runs)


@pytest.mark.parametrize("name", TARGETS)
def test_the_targets_differ_from_the_plain_one(name: str) -> None:
    """Else the grid would prove nothing about processors."""
    distribution = plain_distribution(TARGETS[name], 3)
    assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
    if name != "plain":
        assert distribution != plain_distribution(TARGETS["plain"], 3)


def test_min_p_leaves_what_top_p_counts() -> None:
    """Worked out from the table itself, since both sides of the grid ask the same processor."""
    target = TARGETS["min_p_top_p"]
    differing = 0
    for text, probability in plain_distribution(target, 1).items():
        weights = target.model.logits(()).exp()
        in_order = sorted(weights.tolist(), reverse=True)
        kept = [weight for weight in in_order if weight >= 0.4 * in_order[0]]
        while sum(kept[:-1]) >= 0.8 * sum(kept):
            kept.pop()
        late = [weight for at, weight in enumerate(in_order) if sum(in_order[:at]) < 0.8 * sum(in_order)]
        differing += len([weight for weight in late if weight >= 0.4 * in_order[0]]) != len(kept)
        assert probability == pytest.approx(weights[text[0]].item() / sum(kept), abs=EXACT)
    assert differing, "the two orders agree on this table, so that it proves nothing"


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_drafts_are_accepted(verifier: str) -> None:
    """A verifier that rejects everything is exact too; a draft equal to the target must mostly be accepted."""
    target = TARGETS["sharp"]
    drafter = TableDrafter(DRAFTS["equal"](target), SHAPES["chain_2"], ProposalKind.ONE_HOT)
    steps: list[int] = []

    class Counting(Verifier):
        name = "counting"
        kinds = frozenset(ProposalKind)

        def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
            verdicts = create_verifier(verifier).verify(judgements)
            steps.extend(len(verdict.accepted) for verdict in verdicts)
            return verdicts

    output_distribution(target, drafter, Counting(), 3)
    assert max(steps) == 2


def test_block_accepts_more_than_token_by_token_as_in_the_paper() -> None:
    """The paper's example: p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 11/9 accepted tokens against 10/9."""
    rows = [math.log(1 / 3), math.log(2 / 3)]
    texts = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    target = Target(TableModel(2, rows=dict.fromkeys(texts, rows)))
    drafter = TableDrafter(lambda text: torch.tensor(rows[::-1]).double(), (-1, 0), ProposalKind.SAMPLED_IID)

    def mean_accepted(verifier: str) -> float:
        def run(noise: Noise) -> int:
            proposal = drafter((), noise, 2)
            (verdict,) = create_verifier(verifier).verify([target.judgement((), proposal, noise)])
            return len(verdict.accepted)

        return sum(weight * accepted for weight, accepted in all_runs(run))

    assert mean_accepted("block") == pytest.approx(11 / 9, abs=1e-6)
    assert mean_accepted("rejection") == pytest.approx(10 / 9, abs=1e-6)
