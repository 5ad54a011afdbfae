"""The rows of one forward pass: which tokens, at which positions, what they see, where they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kv.slots import SlotMap
from slipstream.kv.upload import upload
from slipstream.models.rows import RowGroup


class BatchTensors(NamedTuple):
    """The arrays of a `ForwardBatch` on a device: int64, views of one tensor."""

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

    def fill_in(
        self, drafted: Tensor | None, ranks: Tensor | None, shifts: Tensor | None = None
    ) -> BatchTensors:
        """Write what `ForwardBatch.drafted`, `ranks` and `shifts` say into the arrays."""
        for own, filled in zip(self, self.filled(drafted, ranks, shifts), strict=True):
            if filled is not own:
                own.copy_(filled)
        return self

    def filled(
        self, drafted: Tensor | None, ranks: Tensor | None, shifts: Tensor | None = None
    ) -> BatchTensors:
        """As `fill_in`, in new arrays: a recording reads the old ones again."""
        ids, tails, device = self.token_ids, (self.tail_slots, self.tail_entries), self.token_ids.device
        moved = (self.positions, self.slots, self.run_length)
        if drafted is not None:
            own = drafted.to(device)[(-1 - ids).clamp(min=0)].clamp(min=0)
            ids = torch.where(ids < 0, own, ids)
        if ranks is not None:
            added = torch.nn.functional.pad(ranks.to(device), (0, len(tails[0]) - len(ranks)))
            tails = (tails[0] + added, tails[1] + added)
        if shifts is not None:
            by = torch.nn.functional.pad(shifts.to(device), (0, len(ids) - len(shifts)))
            moved = (moved[0] + by, moved[1] + by, moved[2] + by)
        return self._replace(
            token_ids=ids, positions=moved[0], slots=moved[1], run_length=moved[2],
            tail_slots=tails[0], tail_entries=tails[1],
        )  # fmt: skip


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ranks(groups: Sequence[RowGroup]) -> Tensor | None:
    """Those of all groups, zeros where a group has none; None where none has."""
    device = next((group.ranks.device for group in groups if group.ranks is not None), None)
    if device is None:
        return None
    counts = [sum(map(len, group.tail_seen or ())) for group in groups]
    return _joined(
        [
            torch.zeros(count, dtype=torch.int64, device=device) if group.ranks is None else group.ranks
            for group, count in zip(groups, counts, strict=True)
            if count
        ]
    )


def _steps(num_rows: int) -> NDArray[np.int64]:
    """[4, num_rows]: what is added to a group's offsets for position, slot, first slot and run length of its rows.

    Entry i of a chain is at position i, in slot `run_begin` + i, and sees itself and the i before it.
    """
    steps: NDArray[np.int64] = np.arange(num_rows) * np.array([[1], [1], [0], [1]])
    return steps


_STEPS = _steps(1024)


class Bucket(NamedTuple):
    """A size that many passes share, so that what was recorded for one of them serves the others."""

    num_rows: int
    num_wanted: int
    """Rows whose logits are wanted."""
    num_seen: int
    """Single entries, T of `ForwardBatch`."""


class ForwardBatch:
    """The rows of all groups of a pass, N of them, in flat int64 arrays that lie one after another in `buffer`.

    Made once a pass and read by every executor and attention backend. The arrays, in this order (`BatchTensors` has
    their names):

    - `token_ids`, `positions` and `slots`: what each row is, and where its keys and values are stored;
    - `run_begin` and `run_length`: each row sees the first so many entries of its sequence, a *run*. They lie in
      consecutive slots from `run_begin` on if the slots are `contiguous`, else where the group's slot map says;
    - `tail_begin`: the tree mask. Row i also sees the single entries `tail_begin[i]` to `tail_begin[i + 1]`, which lie
      behind its run;
    - `tail_slots` and `tail_positions` of these T single entries;
    - `logit_rows`: the rows whose logits are wanted, group after group;
    - `tail_entries`: which entries of their sequence the T single entries are;
    - `shared_begin` and `shared_length`: the first so many entries of the row's run lie, with the same bits, from slot
      `shared_begin` on too, where another sequence of the pass has them. Empty if no two groups share entries.
    """

    def __init__(
        self, groups: Sequence[RowGroup], bucket: Bucket | None = None, scratch: SlotMap = ()
    ) -> None:
        """With a `bucket` the arrays have its sizes, and the rows that are missing are stored in the slots `scratch`.

        These rows are padding, in groups of as many rows as there are such slots; the other arrays end with zeros.
        Raises `ValueError` for groups that contradict themselves or do not fit the bucket.
        """
        if bucket is not None:
            missing = bucket.num_rows - sum(len(group.token_ids) for group in groups)
            if missing < 0:
                raise ValueError(f"{bucket.num_rows - missing} rows in a bucket of {bucket.num_rows}")
            # Groups of padding share slots, and overwrite each other's entries, which no text reads.
            sizes = [min(len(scratch), missing - row) for row in range(0, missing, len(scratch) or 1)]
            groups = [*groups, *(RowGroup(scratch, 0, [0] * size, []) for size in sizes)]
        self.groups = groups
        self.first_rows = [0]
        """[groups + 1]: where each group's rows begin, and N."""
        self.contiguous = True
        """Whether every group's slots are consecutive."""
        token_ids: list[int] = []
        wanted: list[int] = []
        offsets: list[tuple[int, int, int, int]] = []  # of each group, see `_STEPS`
        seen: list[int] = []  # the tails of all groups: entries behind their runs
        trees: list[int] = []
        drafted: list[Tensor] = []
        num_shared = num_fast = num_drafted = 0
        for number, group in enumerate(groups):
            own, rows, stored, first = group.slots, group.token_ids, group.stored_positions, len(token_ids)
            before = group.num_past + len(stored)
            if group.tail_seen is not None or stored or group.num_fast or len(own) < before + len(rows):
                group.check()
                num_fast += group.num_fast
                if group.tail_seen is not None:
                    trees.append(number)
                    seen += chain.from_iterable(group.tail_seen)
            token_ids += rows
            if group.drafted is not None:
                drafted.append(group.drafted.tensor)
                token_ids[-len(group.drafted) :] = range(
                    -1 - num_drafted, -1 - num_drafted - len(group.drafted), -1
                )
                num_drafted += len(group.drafted)
            wanted += [first + row for row in group.logit_rows] if first else group.logit_rows
            begin, shift = own[0], before - first
            offsets.append((shift, shift + begin, begin, shift + 1))
            self.first_rows.append(len(token_ids))
            num_shared += group.shared is not None
            if type(own) is not range or own.step != 1:
                self.contiguous = False
        self.num_rows = len(token_ids)
        self.num_logit_rows = len(wanted)
        self.num_fast = num_fast
        """How many rows the arithmetic of `fast_prompts` computes."""
        # A bucket's arrays have one size, shared entries or not: a recorded pass reads each sequence's own.
        shared = _shared(groups) if num_shared > 1 and bucket is None else None
        self.shares = shared is not None
        """Whether groups share entries."""
        self.buffer = self._buffer(len(seen), bucket)
        of_groups = np.array(offsets, np.int64).T  # [4, groups]
        if len(groups) != self.num_rows:
            of_groups = of_groups.repeat(np.diff(self.first_rows), axis=1)
        self._fill(token_ids, wanted, of_groups)
        if shared is not None:
            self._part(10, 12).reshape(2, -1)[:] = np.array(shared).repeat(np.diff(self.first_rows), axis=1)
        if not self.contiguous:
            slots = self._part(2)
            for group, first in zip(groups, self.first_rows, strict=False):
                slots[first : first + len(group.token_ids)] = group.slots[
                    group.num_before : group.num_entries
                ]
        if trees:
            self._fill_trees(trees, seen)
        self._tensors: dict[torch.device, BatchTensors] = {}
        self.drafted: Tensor | None = _joined(drafted) if drafted else None
        """int64: tokens that a device has drawn. Where `token_ids` of a row is -1 - i, the row's is number i of them,
        or 0 if that is negative."""
        self.ranks = _ranks(groups)
        """int64 [T], on a device: what is added to `tail_slots` and `tail_entries`; None: nothing."""
        self.added: Tensor | None = None
        """[N, hidden]: what is added to the rows' embeddings, if anything is."""

    def _buffer(self, num_seen: int, bucket: Bucket | None) -> NDArray[np.int64]:
        """Room for all arrays; zeros where a bucket has more than the groups do."""
        n, wanted = self.num_rows, self.num_logit_rows
        if bucket is not None:
            if wanted > bucket.num_wanted or num_seen > bucket.num_seen:
                raise ValueError(f"{wanted} wanted rows and {num_seen} single entries do not fit {bucket}")
            wanted, num_seen = bucket.num_wanted, bucket.num_seen
        shared = n if self.shares else 0
        self._sizes = [n, n, n, n, n, n + 1, num_seen, num_seen, wanted, num_seen, shared, shared]
        size = sum(self._sizes)
        return np.empty(size, np.int64) if bucket is None else np.zeros(size, np.int64)

    def _part(self, first: int, end: int | None = None) -> NDArray[np.int64]:
        """The array of this number, or those from one number to another, in `buffer`."""
        begin = sum(self._sizes[:first])
        return self.buffer[begin : begin + sum(self._sizes[first : first + 1 if end is None else end])]

    def _fill(self, token_ids: list[int], wanted: list[int], of_groups: NDArray[np.int64]) -> None:
        """The arrays of rows, as if every group were a chain in consecutive slots."""
        n, numbers = self.num_rows, self.buffer
        steps = _STEPS[:, :n] if n <= _STEPS.shape[1] else _steps(n)
        numbers[:n] = token_ids
        np.add(of_groups, steps, out=numbers[n : 5 * n].reshape(4, n))
        numbers[5 * n : 6 * n + 1] = 0
        begin = 6 * n + 1 + 2 * self._sizes[6]
        numbers[begin : begin + len(wanted)] = wanted

    def _fill_trees(self, trees: list[int], seen: list[int]) -> None:
        """The rows of trees: other positions, a run that ends before the tail, and the tail's entries."""
        n, size, num_seen, end = self.num_rows, self._sizes[6], len(seen), 0
        rows = self.buffer[: 5 * n].reshape(5, n)
        positions, run_length = rows[1], rows[4]
        first_tail = 6 * n + 1
        tail_slots, tail_positions, tail_entries = (
            self.buffer[begin : begin + num_seen]
            for begin in (first_tail, first_tail + size, first_tail + 2 * size + self._sizes[8])
        )
        behind = np.array(seen, np.int64)
        counts = [0] * n
        for number in trees:
            group, first, stop = self.groups[number], self.first_rows[number], self.first_rows[number + 1]
            assert group.tail_seen is not None
            own, at = first + group.num_chain, group.row_positions()
            positions[first:stop] = at
            run_length[own:stop] = group.num_past + group.num_chain
            counts[own:stop] = lengths = list(map(len, group.tail_seen))
            begin, end = end, end + sum(lengths)
            held = np.array([*group.stored_positions, *at[group.num_chain :]], np.int64)
            tail_positions[begin:end] = held[behind[begin:end]]
        self.tail_begin[1:] = list(accumulate(counts))
        if len(self.groups) == 1:
            run_begin, runs = rows[3, 0], run_length[-1]
        else:
            run_begin, runs = rows[3:].repeat(counts, axis=1)
        np.add(behind, runs, out=tail_entries)
        np.add(tail_entries, run_begin, out=tail_slots)
        if not self.contiguous:
            for number in trees:
                begin, end = self.tail_begin[self.first_rows[number : number + 2]]
                tail_slots[begin:end] = np.array(self.groups[number].slots)[tail_entries[begin:end]]

    @property
    def tail_begin(self) -> NDArray[np.int64]:
        """[N + 1]: of each row's single entries, as in the buffer."""
        return self.buffer[5 * self.num_rows : 6 * self.num_rows + 1]

    @cached_property
    def shifts(self) -> Tensor | None:
        """int64, of the first rows: what is added to where they are, see `RowGroup.shift`; None: nothing."""
        device = next((group.shift.device for group in self.groups if group.shift is not None), None)
        if device is None:
            return None
        none = torch.zeros(1, dtype=torch.int64, device=device)
        return _joined(
            [
                (none if group.shift is None else group.shift).expand(len(group.token_ids))
                for group in self.groups
            ]
        )

    @cached_property
    def fast_rows(self) -> list[int]:
        """The rows that the arithmetic of `fast_prompts` computes, ascending."""
        if not self.num_fast:
            return []
        firsts = zip(self.groups, self.first_rows, strict=False)
        return [row for group, first in firsts for row in range(first, first + group.num_fast)]

    def addresses(self) -> list[int]:
        """Where each array begins in memory."""
        base: int = self.buffer.__array_interface__["data"][0]
        return [base + 8 * begin for begin in accumulate(self._sizes[:-1], initial=0)]

    def views(self, numbers: Tensor) -> BatchTensors:
        """The arrays in a tensor that holds what `buffer` does, such as the one that a recorded pass reads."""
        return BatchTensors(*torch.split(numbers, self._sizes))

    def on(self, device: torch.device) -> BatchTensors:
        """The arrays on `device`: one copy a pass, none on the CPU."""
        if device not in self._tensors:
            arrays = self.views(upload(self.buffer, device))
            self._tensors[device] = arrays.fill_in(self.drafted, self.ranks, self.shifts)
        return self._tensors[device]

    def read(self, device: torch.device, arrays: BatchTensors) -> None:
        """Have what runs on `device` read these arrays, such as those of a recorded pass."""
        self._tensors[device] = arrays

    def slots_on(self, device: torch.device) -> range | Tensor:
        """Where the rows are stored: a `range` for a single group whose slots are consecutive, else int64 [N]."""
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
        """The logits, [wanted, vocab], group after group; those that fill a bucket are left out."""
        logits = logits[: self.num_logit_rows]
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


def _shared(groups: Sequence[RowGroup]) -> tuple[list[int], list[int]] | None:
    """`shared_begin` and `shared_length` of each group's rows; None where no two groups share entries."""
    firsts: dict[int, RowGroup] = {}
    for group in groups:
        if group.shared is not None:
            firsts.setdefault(group.shared.family, group)
    if len(firsts) == sum(group.shared is not None for group in groups):
        return None
    begin: list[int] = []
    length: list[int] = []
    for group in groups:
        shared = group.shared
        first = group if shared is None else firsts[shared.family]
        both = 0 if shared is None or first.shared is None else min(shared.length, first.shared.length)
        begin.append(first.slots[0])
        length.append(min(both, group.num_past, first.num_past))
    return begin, length
