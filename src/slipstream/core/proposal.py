"""What a drafter proposes and what a verifier decides.

Nothing here imports torch, so that scheduling, accounting and control can be read, tested and reasoned about alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from slipstream.core.pending import PendingNumbers

if TYPE_CHECKING:
    import torch


ROOT = -1
"""The parent of a node that hangs directly below the last committed token."""


class ProposalKind(StrEnum):
    """How the draft tokens came about; the verifier must know, or the output distribution changes."""

    ONE_HOT = "one_hot"
    """Chosen deterministically (look-up, greedy, top-k): they come from no distribution."""
    SAMPLED_IID = "sampled_iid"
    """Each node was drawn from its row of `draft_probs`, independently of its siblings."""
    SAMPLED_WITHOUT_REPLACEMENT = "sampled_without_replacement"
    """Siblings were drawn in order from the same row of `draft_probs`, renormalised without the earlier ones."""
    COUPLED = "coupled"
    """Drawn with the target's own position-keyed noise; only a verifier that accepts them may judge them."""


@dataclass(frozen=True)
class Proposal:
    """A tree of draft tokens below the last committed token. The empty proposal is ordinary decoding.

    `token_ids[i]` is node i's token and `parents[i]` its parent's index (`ROOT` below the committed text); parents
    come before children. `draft_probs`, where the kind needs it, has shape [n, vocab]: row i is the full
    distribution node i was drawn from, before any sibling was removed (siblings share equal rows).
    """

    token_ids: tuple[int, ...] | PendingNumbers = ()
    parents: tuple[int, ...] | PendingNumbers = ()
    kind: ProposalKind = ProposalKind.ONE_HOT
    draft_probs: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} draft tokens have {len(self.parents)} parents")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"parents must come before their children, got {self.parents}")
        sampled = self.kind in (ProposalKind.SAMPLED_IID, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT)
        if sampled and len(self) and (self.draft_probs is None or len(self.draft_probs) != len(self)):
            raise ValueError(f"a {self.kind} proposal needs one row of draft_probs a node")

    @classmethod
    def chain(
        cls,
        token_ids: Seq[int],
        kind: ProposalKind = ProposalKind.ONE_HOT,
        draft_probs: torch.Tensor | None = None,
    ) -> Proposal:
        """A proposal in which every token follows the one before it."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), kind, draft_probs)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_pending(self) -> bool:
        """Whether a device has drawn it and the host has not read it."""
        return isinstance(self.token_ids, PendingNumbers)

    def known(self) -> Proposal:
        """The same without pending numbers; waits for the device where they are not resolved."""
        if not self.is_pending:
            return self
        return Proposal(tuple(self.token_ids), tuple(self.parents), self.kind, self.draft_probs)

    @property
    def is_chain(self) -> bool:
        """True when no node has a sibling (the empty proposal included)."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Node (or `ROOT`) to its children, in the order in which they were proposed; leaves are absent."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 1 directly below the committed text."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Levels of the tree; 0 for the empty proposal."""
        return max(self.depths, default=0)

    def path(self, node: int) -> list[int]:
        """Nodes from the top of the tree down to `node`, itself included; `ROOT` has the empty path."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


EMPTY_PROPOSAL = Proposal()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a proposal: the accepted nodes, top down, and the target's own next token.

    `next_token` is the *recovered* token when a draft token was rejected and the *bonus* token when a whole path
    was accepted.
    """

    accepted: tuple[int, ...]
    next_token: int

    def token_ids(self, proposal: Proposal) -> list[int]:
        """The tokens that this verdict commits, in order."""
        return [*(proposal.token_ids[node] for node in self.accepted), self.next_token]


@dataclass(frozen=True, slots=True)
class VerifierTraits:
    """What a verifier can do. Drafters and the engine go by this, never by a verifier's name."""

    name: str
    """For messages only."""
    kinds: frozenset[ProposalKind]
    """The proposal kinds that it judges exactly."""
    needs_distributions: bool
    """False where it only looks at the argmax of a greedy row."""
    reproducible: bool
    """True where a seed gives the same text whatever was drafted."""

    @property
    def accepts_coupled(self) -> bool:
        """True where drafters may draw with the target's own position-keyed noise."""
        return ProposalKind.COUPLED in self.kinds
