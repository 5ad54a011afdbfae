"""Token Recycling: drafts each token's successors as the target last ranked them.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling" (ACL
2025). Verification computes logits behind every draft token. The top tokens of each row are kept in a table, by the
token that they follow, and a tree of fixed shape is read from that table.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.config import check_at_least, check_types
from slipstream.core.bounded import BoundedDict
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.top_tokens import top_tokens
from slipstream.draft.traits import DrafterTraits, TableGrowth

RANK_PROBS = (0.5, 0.1, 0.055, 0.035, 0.03, 0.02, 0.015, 0.012)
"""How often the successor of each rank is the target's next token; determines the shape of the tree."""
RANK_DECAY = 0.8
"""Ratio of each further rank's probability to the one before."""
UNKNOWN = -1
"""Marks a token whose successors are not known yet."""


@dataclass(frozen=True, kw_only=True)
class TokenRecyclingOptions:
    """Keys of `speculative_config` for `token_recycling`."""

    num_draft_nodes: int = 11
    """Nodes of the tree. With the last committed token they make twelve rows, which a CPU computes in one pass over the
    weights. A GPU has room for many more (the paper has 80)."""
    num_speculative_tokens: int = 6
    """Levels of the tree."""
    num_successors: int = 8
    """Successors kept for each token, and the most children of a node."""
    max_tenants: int = 16
    """Tenants whose tables are kept, the most recently served ones; each takes `4 * num_successors` bytes for each
    token of the vocabulary."""

    def __post_init__(self) -> None:
        check_types(self, "token_recycling")
        check_at_least(
            "token_recycling",
            1,
            num_draft_nodes=self.num_draft_nodes,
            num_speculative_tokens=self.num_speculative_tokens,
            num_successors=self.num_successors,
            max_tenants=self.max_tenants,
        )


def best_shape(num_nodes: int, depth: int, num_ranks: int) -> list[tuple[int, int]]:
    """The tree with the most expected accepted tokens, as (parent, rank among siblings), most probable node first.

    A node's probability is the product of `RANK_PROBS` along its path. Its parent and earlier siblings are more
    probable, so every prefix of the list is the best tree of its size.
    """
    probs = list(RANK_PROBS[:num_ranks])
    while len(probs) < num_ranks:
        probs.append(probs[-1] * RANK_DECAY)
    shape: list[tuple[int, int]] = []
    frontier = [(-probs[0], 1, ROOT, 0)]  # minus the probability, level, parent, rank
    above = {ROOT: 1.0}
    while frontier and len(shape) < num_nodes:
        negative_prob, level, parent, rank = heapq.heappop(frontier)
        node = len(shape)
        shape.append((parent, rank))
        above[node] = -negative_prob
        if rank + 1 < num_ranks:
            heapq.heappush(frontier, (-above[parent] * probs[rank + 1], level, parent, rank + 1))
        if level < depth:
            heapq.heappush(frontier, (negative_prob * probs[0], level + 1, node, 0))
    return shape


class TokenRecyclingDrafter(Drafter):
    """Proposes a static tree over each token's last known successors.

    All requests of a tenant share one table; nothing crosses tenants. It is filled from verified rows only, never
    from logits of prompts. The least recently served tenant is dropped when there are too many. A tree ends where a
    token has no known successors.
    """

    Options = TokenRecyclingOptions
    traits = DrafterTraits(remembers=True)

    def __init__(self, options: TokenRecyclingOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._num_successors = min(options.num_successors, context.vocab_size)
        self._shape = best_shape(
            options.num_draft_nodes, options.num_speculative_tokens, self._num_successors
        )
        self._by_tenant: BoundedDict[str, npt.NDArray[np.int32]] = BoundedDict(options.max_tenants)
        """Tenant to [vocab, successors], the last one served at the end."""

    @classmethod
    def configured(cls, options: Any, context: DraftContext) -> DrafterTraits:
        num_successors = min(options.num_successors, context.vocab_size)
        bytes_per_table = 4 * context.vocab_size * num_successors
        tables = TableGrowth(
            what="a table of that size for each further user",
            fixed_bytes=bytes_per_table * options.max_tenants,
            first_bytes=bytes_per_table,
        )
        # Levels and successors may allow fewer nodes.
        shape = best_shape(options.num_draft_nodes, options.num_speculative_tokens, num_successors)
        return replace(super().configured(options, context), max_nodes=len(shape), tables=(tables,))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One tree a sequence; the empty proposal where the last token's successors are unknown."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        table = self._by_tenant.get(sequence.tenant)
        if table is None or budget <= 0:
            return EMPTY_PROPOSAL
        token_ids: list[int] = []
        parents: list[int] = []
        # Node of the shape to its node in the proposal and its token's successors; absent where unknown.
        placed: dict[int, tuple[int, list[int]]] = {ROOT: (ROOT, table[sequence.token_ids[-1]].tolist())}
        for node, (above, rank) in enumerate(self._shape):
            if len(token_ids) == budget:
                break
            if above not in placed:
                continue
            parent, successors = placed[above]
            token = successors[rank]
            if token == UNKNOWN:
                continue
            placed[node] = (len(token_ids), table[token].tolist())
            token_ids.append(token)
            parents.append(parent)
        return Proposal(tuple(token_ids), tuple(parents))

    def observe(self, observations: Seq[Observation]) -> None:
        """Store the successors of every verified token.

        Where a token occurs in several rows the first one counts: it is the shallowest and most probable.
        """
        firsts = [_first_rows(seen) for seen in observations]
        if not any(firsts):
            return
        # All rows: copying out the distinct ones would take longer than computing the others too.
        tops = [
            top_tokens(seen.logits, self._num_successors)[list(rows.values())]
            for seen, rows in zip(observations, firsts, strict=True)
        ]
        successors = torch.cat(tops).cpu().numpy()  # one transfer for all
        end = 0
        for seen, rows in zip(observations, firsts, strict=True):
            begin, end = end, end + len(rows)
            self._table(seen.sequence.tenant)[list(rows)] = successors[begin:end]

    def _table(self, tenant: str) -> npt.NDArray[np.int32]:
        shape = (self.context.vocab_size, self._num_successors)
        return self._by_tenant.touch(tenant, lambda: np.full(shape, UNKNOWN, dtype=np.int32))

    def reset(self) -> None:
        """Drop all tenants' tables."""
        self._by_tenant.clear()

    def memory_bytes(self) -> int:
        """Bytes of all tenants' tables."""
        return sum(table.nbytes for table in self._by_tenant.values())


def _first_rows(seen: Observation) -> dict[int, int]:
    """Token to the first row of the step's logits that follows it."""
    rows = {seen.sequence.token_ids[seen.length_before - 1]: 0}
    for node, token in enumerate(seen.proposal.token_ids):
        rows.setdefault(token, node + 1)
    return rows
