"""Under `coupled` the text is a function of the noise alone: all trees, all tokens, one answer."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from exact_cases import PROMPT, TARGETS

from slipstream.core.proposal import ProposalKind, Verdict
from slipstream.sampling.params import SamplingParams
from slipstream.testing.coupled_identity import all_trees, coupled_mismatches, noise_alphabet
from slipstream.testing.enumeration import Target
from slipstream.testing.table_model import TableModel
from slipstream.verify import Judgement, Verifier, coupled, create_verifier


@pytest.mark.parametrize("name", TARGETS)
def test_no_tree_changes_the_text(name: str) -> None:
    target = TARGETS[name]
    alphabet = noise_alphabet(target.model.vocab_size, 2)
    assert coupled_mismatches(target, create_verifier("coupled"), alphabet, max_nodes=2) == []


def test_no_tree_of_three_nodes_changes_the_text() -> None:
    target = Target(TableModel(2, seed=3), SamplingParams(presence_penalty=0.8), prompt=(1,))
    assert coupled_mismatches(target, create_verifier("coupled"), noise_alphabet(2, 1), max_nodes=3) == []


def test_all_trees_are_there() -> None:
    trees = list(all_trees(2, 3))
    assert len(trees) == 1 + 2 + 2 * 4 + 6 * 8
    assert len({(tree.token_ids, tree.parents) for tree in trees}) == len(trees)


class Generous(Verifier):
    """Descends into the first child whatever it holds, as if a draft token of high rank were good enough."""

    name = "generous"
    kinds = frozenset(ProposalKind)

    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        verdicts = create_verifier("coupled").verify(judgements)
        return [
            Verdict((0,), verdict.next_token) if len(judgement.proposal) and not verdict.accepted else verdict
            for judgement, verdict in zip(judgements, verdicts, strict=True)
        ]


def test_a_generous_verifier_is_found() -> None:
    assert coupled_mismatches(TARGETS["plain"], Generous(), noise_alphabet(3, 1), max_nodes=1)


def test_noise_at_the_wrong_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node index taken for depth: right for chains, wrong for siblings."""

    def by_index(judgement: Judgement) -> list[int]:
        root = judgement.noise.root_position
        return [root + row for row in range(1 + len(judgement.proposal))]

    monkeypatch.setattr(coupled, "_positions", by_index)
    target = Target(TableModel(seed=1), prompt=PROMPT)
    mismatches = coupled_mismatches(target, create_verifier("coupled"), noise_alphabet(3, 1), max_nodes=2)
    assert mismatches
    assert not any(tree.is_chain for tree, _, _ in mismatches)
