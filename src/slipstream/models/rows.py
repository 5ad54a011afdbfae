"""The rows of one forward pass: which tokens, at which positions, what they see, where they are stored."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.types import Proposal
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
    """Entries that others of the pass may hold too, all of the past; None where nobody does."""

    @property
    def num_before(self) -> int:
        """Entries that were there before this pass."""
        return self.num_past + len(self.stored_positions)

    @property
    def num_entries(self) -> int:
        """Entries after this pass."""
        return self.num_past + len(self.stored_positions) + len(self.token_ids)

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
    return RowGroup(
        slots,
        past,
        [*token_ids, *proposal.token_ids],
        range(first_logit, total),
        positions=None if is_chain else [*range(past, root + 1), *(root + d for d in proposal.depths)],
        tail_seen=None if is_chain else paths(proposal),
        num_chain=0 if is_chain else len(token_ids),
        num_fast=min(max(num_fast_tokens - past, 0), len(token_ids)),
        shared=shared,
    )


def paths(proposal: Proposal) -> list[list[int]]:
    """For each node its ancestors and itself, from the top down."""
    seen: list[list[int]] = []
    for node, parent in enumerate(proposal.parents):
        seen.append([*seen[parent], node] if parent >= 0 else [node])
    return seen


class RowTensors(NamedTuple):
    """The arrays of `Rows` on a device: int64, views of one tensor."""

    token_ids: Tensor
    """[N]"""
    positions: Tensor
    """[N]"""
    slots: Tensor
    """[N]"""
    run_begin: Tensor
    """[N]"""
    run_length: Tensor
    """[N]"""
    tail_begin: Tensor
    """[N + 1]"""
    tail_slots: Tensor
    """[T]"""
    tail_positions: Tensor
    """[T]"""
    logit_rows: Tensor
    """[wanted]"""
    tail_entries: Tensor
    """[T]"""
    shared_begin: Tensor
    """[N], or empty"""
    shared_length: Tensor
    """[N], or empty"""


class Rows:
    """The rows of all groups of a pass, N of them, in flat int64 arrays that lie one after another in `buffer`.

    Made once a pass and read by every attention backend. The arrays, in this order (`RowTensors` has their names):

    - `token_ids`, `positions` and `slots`: what each row is, and where its keys and values are stored;
    - `run_begin` and `run_length`: each row sees the first so many entries of its sequence, a *run*. They lie in
      consecutive slots from `run_begin` on if the slots are `contiguous`, else where the group's slot map says;
    - `tail_begin`: row i also sees the single entries `tail_begin[i]` to `tail_begin[i + 1]`, which lie behind its run;
    - `tail_slots` and `tail_positions` of these T single entries;
    - `logit_rows`: the rows whose logits are wanted, group after group;
    - `tail_entries`: which entries of their sequence the T single entries are;
    - `shared_begin` and `shared_length`: the first so many entries of the row's run lie, with the same bits, from slot
      `shared_begin` on too, where another sequence of the pass has them. Empty if no two groups share entries.
    """

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self.groups = groups
        self.tail_begin: Sequence[int]
        """[N + 1]: of each row's single entries, as in the buffer."""
        self.first_rows = [0]
        """[groups + 1]: where each group's rows begin, and N."""
        self.contiguous = True
        """Whether every group's slots are consecutive."""
        self.fast_rows: list[int] = []
        """The rows that the arithmetic of `fast_prompts` computes, ascending."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        run_begin: list[int] = []
        run_length: list[int] = []
        tail_begin = self.tail_begin = [0]
        tail_slots: list[int] = []
        tail_positions: list[int] = []
        tail_entries: list[int] = []
        logit_rows: list[int] = []
        shared_begin, shared_length = _shared(groups)
        for group in groups:
            n, own, first_row = len(group.token_ids), group.slots, len(token_ids)
            before = group.num_past + len(group.stored_positions)
            if not 0 <= group.num_fast <= (n if group.tail_seen is None else group.num_chain):
                raise ValueError(f"num_fast of {group.num_fast} in a group whose rows are not so many")
            if type(own) is not range or own.step != 1:
                self.contiguous = False
            logit_rows.extend([first_row + row for row in group.logit_rows])
            self.fast_rows.extend(range(first_row, first_row + group.num_fast))
            token_ids.extend(group.token_ids)
            positions.extend(group.row_positions())
            slots.extend(own[before : before + n])
            if len(slots) != first_row + n:
                raise ValueError(f"{len(own)} slots for {before + n} entries")
            self.first_rows.append(first_row + n)
            run_begin.extend([own[0]] * n)
            seen_of_tail = group.tail_seen
            if group.stored_positions and (seen_of_tail is None or group.num_chain):
                raise ValueError("a chain has no stored entries before it: they are past entries")
            if seen_of_tail is None:
                run_length.extend(range(before + 1, before + n + 1))
                tail_begin.extend([len(tail_entries)] * n)
                continue
            chain = group.num_chain
            if len(seen_of_tail) != n - chain:
                raise ValueError(f"tail_seen of {len(seen_of_tail)} rows for {n - chain} behind the chain")
            run = group.num_past + chain
            run_length.extend(range(before + 1, before + chain + 1))
            run_length.extend([run] * (n - chain))
            tail_begin.extend([len(tail_entries)] * chain)
            tail = own[run : before + n]
            held = [*group.stored_positions, *group.row_positions()[chain:]]
            for seen in seen_of_tail:
                tail_entries.extend([run + entry for entry in seen])
                tail_slots.extend([tail[entry] for entry in seen])
                tail_positions.extend([held[entry] for entry in seen])
                tail_begin.append(len(tail_entries))
        self.shares = bool(shared_begin)
        """Whether groups share entries."""
        self.num_rows = len(token_ids)
        self.num_logit_rows = len(logit_rows)
        parts = (
            token_ids,
            positions,
            slots,
            run_begin,
            run_length,
            tail_begin,
            tail_slots,
            tail_positions,
            logit_rows,
            tail_entries,
            shared_begin,
            shared_length,
        )
        self._sizes = [len(part) for part in parts]
        numbers = array("q")
        for part in parts:
            numbers.fromlist(part)
        self.buffer = np.frombuffer(numbers, dtype=np.int64)
        self._tensors: dict[torch.device, RowTensors] = {}

    def addresses(self) -> list[int]:
        """Return where each array begins in memory."""
        base: int = self.buffer.__array_interface__["data"][0]
        return [base + 8 * begin for begin in accumulate(self._sizes[:-1], initial=0)]

    def on(self, device: torch.device) -> RowTensors:
        """The arrays on `device`: one copy a pass, none on the CPU."""
        if device not in self._tensors:
            numbers = torch.from_numpy(self.buffer).to(device)
            self._tensors[device] = RowTensors(*torch.split(numbers, self._sizes))
        return self._tensors[device]

    def slots_on(self, device: torch.device) -> range | Tensor:
        """Return where rows are stored: a `range` for a single group whose slots are consecutive, else int64 [N]."""
        if len(self.groups) == 1:
            (group,) = self.groups
            own = group.slots[group.num_before : group.num_entries]
            if isinstance(own, range):
                return own
        return self.on(device).slots

    @cached_property
    def entry_slots(self) -> SlotMap:
        """The slots of all entries of all groups after this pass, group after group."""
        if len(self.groups) == 1:
            return self.groups[0].slots[: self.groups[0].num_entries]
        return [slot for group in self.groups for slot in group.slots[: group.num_entries]]

    def by_group(self, logits: Tensor) -> list[Tensor]:
        """The logits, [wanted, vocab], group after group."""
        if len(self.groups) == 1:
            return [logits]
        return list(logits.split_with_sizes([len(group.logit_rows) for group in self.groups]))


def side_by_side(groups: Sequence[RowGroup]) -> list[int]:
    """An order of the groups in which those that share entries are neighbours, as they must be to be read together."""
    places: dict[object, int] = {}
    for place, group in enumerate(groups):
        places.setdefault(_family(group, place), place)
    return sorted(range(len(groups)), key=lambda i: places[_family(groups[i], i)])


def _family(group: RowGroup, place: int) -> object:
    return (place,) if group.shared is None else group.shared.family


def _shared(groups: Sequence[RowGroup]) -> tuple[list[int], list[int]]:
    """`shared_begin` and `shared_length` of `Rows`."""
    firsts: dict[int, RowGroup] = {}
    for group in groups:
        if group.shared is not None:
            firsts.setdefault(group.shared.family, group)
    if len(firsts) == sum(group.shared is not None for group in groups):
        return [], []
    begin: list[int] = []
    length: list[int] = []
    for group in groups:
        n, shared = len(group.token_ids), group.shared
        first = group if shared is None else firsts[shared.family]
        both = 0 if shared is None or first.shared is None else min(shared.length, first.shared.length)
        begin.extend([first.slots[0]] * n)
        length.extend([min(both, group.num_past, first.num_past)] * n)
    return begin, length
