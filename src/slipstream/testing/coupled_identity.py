"""Proof that under `coupled` no draft changes the text, not even one made with the target's own noise.

A coupled drafter knows the noise, so its tokens and the target's are not independent, and enumerating outcomes
(`slipstream.testing.enumeration`) would need their joint distribution. There is a stronger argument. Fix the noise and
try *all* trees up to a number of nodes with *all* assignments of tokens, which covers any drafter. Each time, the
committed text must be a prefix of plain decoding's text with the same noise. Then the text is a function of the noise
alone, and by induction over steps it is plain decoding's text, whose distribution the enumerator checks with the empty
proposal. The noise is taken from a finite alphabet in which every token wins at every row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch

from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal, ProposalKind
from slipstream.sampling.noise import Noise
from slipstream.testing.enumeration import Target
from slipstream.verify.base import Verifier


class FixedNoise(Noise):
    """`Noise` with given Gumbel vectors: one float64 [V] for each position."""

    def __init__(self, vectors: Seq[torch.Tensor], root_position: int) -> None:
        super().__init__(seed=0, root_position=root_position)
        self.vectors = vectors

    def perturb(self, log_probs: torch.Tensor, positions: Seq[int]) -> torch.Tensor:
        return log_probs + torch.stack([self.vectors[position] for position in positions])

    def choose(self, log_probs: torch.Tensor, positions: Seq[int]) -> torch.Tensor:
        return self.perturb(log_probs, positions).argmax(-1)

    @classmethod
    def choose_all(cls, steps: Seq[tuple[Noise, torch.Tensor, Seq[int]]]) -> list[Seq[int]]:
        return [noise.choose(log_probs, positions).tolist() for noise, log_probs, positions in steps]


def noise_alphabet(vocab_size: int, num_mild: int = 2, seed: int = 0) -> list[torch.Tensor]:
    """Noise vectors [V]: for each token one that makes it win, and small ones with which the row's logits decide."""
    generator = torch.Generator().manual_seed(seed)
    return [
        *(100.0 * torch.eye(vocab_size, dtype=torch.float64)),
        *torch.randn(num_mild, vocab_size, dtype=torch.float64, generator=generator),
    ]


def all_trees(vocab_size: int, max_nodes: int) -> Iterator[Proposal]:
    """Every tree of at most `max_nodes` nodes with every assignment of tokens, equal siblings included."""
    for num_nodes in range(max_nodes + 1):
        for parents in itertools.product(*(range(-1, node) for node in range(num_nodes))):
            for tokens in itertools.product(range(vocab_size), repeat=num_nodes):
                yield Proposal(tokens, parents, ProposalKind.COUPLED)


def coupled_mismatches(
    target: Target, verifier: Verifier, alphabet: Seq[torch.Tensor], max_nodes: int
) -> list[tuple[Proposal, list[int], list[int]]]:
    """All (proposal, committed tokens, plain decoding's tokens) that differ; empty for a coupled verifier.

    One step is enough: every text is the root of some step. Each assignment of `alphabet` to the positions
    that a step can reach is tried.
    """
    mismatches = []
    trees = list(all_trees(target.model.vocab_size, max_nodes))
    start = len(target.prompt)
    for vectors in itertools.product(alphabet, repeat=max_nodes + 1):
        noise = FixedNoise([vectors[0]] * start + list(vectors), start)
        plain: list[int] = []
        for position in range(start, start + max_nodes + 1):
            here = FixedNoise(noise.vectors, position)
            (verdict,) = verifier.verify([target.judgement(tuple(plain), EMPTY_PROPOSAL, here)])
            plain.append(verdict.next_token)
        verdicts = verifier.verify([target.judgement((), tree, noise) for tree in trees])
        for tree, verdict in zip(trees, verdicts, strict=True):
            committed = verdict.token_ids(tree)
            if committed != plain[: len(committed)]:
                mismatches.append((tree, committed, plain))
    return mismatches
