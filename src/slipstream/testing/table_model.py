"""Table-driven models small enough for exact enumeration, and drafters that read a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from slipstream.core.proposal import ROOT, Proposal, ProposalKind
from slipstream.sampling.noise import Noise, Stream

Text = tuple[int, ...]


@dataclass(frozen=True)
class TableModel:
    """A next-token distribution for every text: explicit rows where given, else seeded normal logits.

    `spread` is the standard deviation of the logits: 0 is uniform, 3 is sharp. A row depends on the whole
    text, so that a cache, a path or a position taken wrongly cannot go unseen.
    """

    vocab_size: int = 3
    seed: int = 0
    spread: float = 1.0
    rows: Mapping[Text, Seq[float]] = field(default_factory=dict)
    """Text to its logits; -inf makes a token impossible."""

    def logits(self, text: Seq[int]) -> torch.Tensor:
        """Logits after `text`, float64 [V]."""
        row = self.rows.get(tuple(text)) or _seeded_row(self.vocab_size, self.seed, self.spread, tuple(text))
        return torch.tensor(row, dtype=torch.float64)

    def log_probs(self, text: Seq[int]) -> torch.Tensor:
        """Log-probabilities after `text`, float64 [V]."""
        return self.logits(text).log_softmax(-1)


@lru_cache(maxsize=10_000)
def _seeded_row(vocab_size: int, seed: int, spread: float, text: Text) -> list[float]:
    generator = random.Random(f"{seed}:{','.join(map(str, text))}")
    return [generator.gauss(0.0, spread) for _ in range(vocab_size)]


CHAIN_3 = (ROOT, 0, 1)
SIBLINGS_2 = (ROOT, ROOT)
TWO_LEVELS = (ROOT, ROOT, 0, 0, 1)
UNBALANCED = (ROOT, 0, 0, ROOT, 1)
"""Tree shapes, as the parents of the nodes."""


@dataclass(frozen=True)
class TableDrafter:
    """Proposes trees of one shape, filled from a given distribution according to `kind`.

    `log_probs` maps a text to the draft distribution after it, [V] or narrower than the target's. `shape`
    holds the parents of the nodes. A `ONE_HOT` proposal takes the most probable tokens for siblings, in
    order; with `SAMPLED_WITHOUT_REPLACEMENT`, siblings for which no token is left are not proposed, nor is
    what hangs below them.
    """

    log_probs: Callable[[Text], torch.Tensor]
    shape: tuple[int, ...]
    kind: ProposalKind

    def __call__(self, text: Text, noise: Noise, max_depth: int) -> Proposal:
        """A proposal after `text`, at most `max_depth` deep; all randomness comes from `noise`."""
        plan = Proposal((0,) * len(self.shape), self.shape)
        built: dict[int, tuple[int, Text]] = {
            ROOT: (ROOT, ())
        }  # the shape's node: (the proposal's, its path)
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[torch.Tensor] = []
        for parent in (ROOT, *range(len(self.shape))):
            children = plan.children.get(parent, [])
            if parent not in built or not children or len(built[parent][1]) >= max_depth:
                continue
            node, path = built[parent]
            row = self.log_probs((*text, *path))  # [V]
            picked = self._pick(row, len(children), noise.root_position + len(path), parent, noise)
            for child, token in zip(children, picked, strict=False):
                built[child] = len(tokens), (*path, token)
                tokens.append(token)
                parents.append(node)
                rows.append(row.exp())
        probs = torch.stack(rows) if rows and self.kind is not ProposalKind.ONE_HOT else None  # [n, V]
        return Proposal(tuple(tokens), tuple(parents), self.kind, probs)

    def _pick(self, row: torch.Tensor, k: int, position: int, parent: int, noise: Noise) -> list[int]:
        """Tokens for k siblings. The index gives cousins at one position different random numbers."""
        if self.kind is ProposalKind.ONE_HOT:
            return row.topk(min(k, len(row))).indices.tolist()
        if self.kind is ProposalKind.SAMPLED_WITHOUT_REPLACEMENT:
            return noise.draw_without_replacement(row, k, position, index=parent + 1)
        first = (parent + 1) * len(self.shape)
        return [noise.draw(row, position, Stream.DRAFT, index=first + rank) for rank in range(k)]
