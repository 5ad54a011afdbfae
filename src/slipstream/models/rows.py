"""One sequence's rows of a pass: which tokens, at which positions, and what they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.core.pending import PendingNumbers
from slipstream.core.pending_tree import PendingTree
from slipstream.core.proposal import Proposal
from slipstream.kv.slots import SharedPrefix, SlotMap


@dataclass(slots=True)
class RowGroup:
    """One sequence's rows in a forward pass.

    Entries 0 .. num_past - 1 of the sequence are those of its positions 0 .. num_past - 1. Behind them may lie
    `len(stored_positions)` entries of earlier passes over the same draft tree. This pass's rows are stored
    after those. Without `tail_seen` the rows are a chain: each sees all before it. With it, only the first
    `num_chain` rows are, which have no stored entries before them. The *tail* is what lies behind the past and the
    chain: the stored entries, then the rows behind the chain. Each of these rows sees the past, the chain, and those
    entries of the tail that `tail_seen` lists.
    """

    slots: SlotMap
    """The slot of each entry, the first one's first; at least as many as there are entries."""
    num_past: int
    token_ids: Sequence[int]
    logit_rows: Sequence[int]
    """Indices into this group's rows: those whose logits are wanted."""
    positions: Sequence[int] | None = None
    """Absolute position of each row; None for a chain."""
    stored_positions: Sequence[int] = ()
    tail_seen: Sequence[Sequence[int]] | None = None
    """For each row behind the chain the entries of the tail that it sees, itself included, ascending."""
    num_chain: int = 0
    """Leading rows that see all before them, though others do not; counted where `tail_seen` is given."""
    num_fast: int = 0
    """Leading rows that are computed in the arithmetic of `fast_prompts`, all of the chain; 0 where the model has
    none."""
    shared: SharedPrefix | None = None
    """Entries that others of the pass may hold too, all of the past; None where no other does."""
    drafted: PendingNumbers | None = None
    """The tokens of the last rows, where the host has not read them: `token_ids` says nothing of these rows."""
    shift: Tensor | None = None
    """int64 [1]: what is to be added to the positions and slots of a chain, where the host does not know how long the
    text is; only where the slots are consecutive."""
    ranks: Tensor | None = None
    """int64, one for each entry of `tail_seen`: what is to be added to it, where the host does not know that."""
    num_certain: int = 0
    """Leading entries, of the past and of this pass's chain, that will be kept: states of recurrent layers take them in
    for good."""
    owner: int | None = None
    """The sequence's id, for state that is kept by sequence; None in trials."""

    @property
    def num_before(self) -> int:
        """Entries that were there before this pass."""
        return self.num_past + len(self.stored_positions)

    @property
    def num_entries(self) -> int:
        """Entries after this pass."""
        return self.num_past + len(self.stored_positions) + len(self.token_ids)

    def check(self) -> None:
        """Raise `ValueError` where what is said of the rows contradicts itself, or there are too few slots."""
        n, before = len(self.token_ids), self.num_past + len(self.stored_positions)
        if not 0 <= self.num_fast <= (n if self.tail_seen is None else self.num_chain):
            raise ValueError(f"num_fast of {self.num_fast} in a group whose rows are not so many")
        if len(self.slots) < before + n:
            raise ValueError(f"{len(self.slots)} slots for {before + n} entries")
        if self.stored_positions and (self.tail_seen is None or self.num_chain):
            raise ValueError("a chain has no stored entries before it: they are past entries")
        if self.tail_seen is not None and len(self.tail_seen) != n - self.num_chain:
            raise ValueError(
                f"tail_seen of {len(self.tail_seen)} rows for {n - self.num_chain} behind the chain"
            )

    def row_positions(self) -> Sequence[int]:
        """Absolute position of each row."""
        if self.positions is None:
            return range(self.num_past, self.num_past + len(self.token_ids))
        return self.positions


def tree_rows(
    slots: SlotMap,
    past: int,
    token_ids: Sequence[int],
    proposal: Proposal,
    first_logit: int,
    num_fast_tokens: int = 0,
    shared: SharedPrefix | None = None,
) -> RowGroup:
    """The rows of `token_ids`, behind `past` entries, and of the tree below the last of them.

    Logits are wanted from row `first_logit` on. The text's first `num_fast_tokens` are computed as `fast_prompts` says.
    `shared` is what the slots' accounting says of them.
    """
    total = len(token_ids) + len(proposal)
    root = past + len(token_ids) - 1  # position of the last token
    is_chain = proposal.is_chain
    ids = proposal.token_ids
    drafted = ids if isinstance(ids, PendingNumbers) and ids.is_pending else None
    pending = proposal if isinstance(proposal, PendingTree) else None
    return RowGroup(
        slots,
        past,
        [*token_ids, *([0] * len(ids) if drafted else ids)],
        range(first_logit, total),
        positions=None if is_chain else [*range(past, root + 1), *(root + d for d in proposal.depths)],
        tail_seen=None if is_chain else pending.first_paths() if pending else paths(proposal),
        num_chain=0 if is_chain else len(token_ids),
        num_fast=min(max(num_fast_tokens - past, 0), len(token_ids)),
        shared=shared,
        drafted=drafted,
        ranks=None if is_chain or pending is None else pending.ranks,
        num_certain=past + len(token_ids),
    )


def paths(proposal: Proposal) -> list[list[int]]:
    """For each node its ancestors and itself, from the top down."""
    seen: list[list[int]] = []
    for node, parent in enumerate(proposal.parents):
        seen.append([*seen[parent], node] if parent >= 0 else [node])
    return seen
