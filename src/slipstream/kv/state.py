"""The states of recurrent layers: one committed state a sequence, and the inputs of rows that may be dropped yet.

Other layers keep an entry for each token, so that a rejected draft is forgotten by not reading its entries. A recurrent
layer adds every token to one state, which cannot be undone. Here the state is that of tokens which are certain; of each
row behind them the *inputs* are kept, what the row puts into the state, some 1/40 of its size. Keeping drafted tokens
means to say which inputs count (`gather`), and copies nothing. The next pass puts them into the state before its own
rows (`Walk`).

Token by token, in one order: no split of a text into passes, no draft and no other sequence of a pass changes a bit of
what is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kv.walk import OWN_STATE, SequenceRows, Walk


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one recurrent layer keeps of a sequence."""

    tensors: tuple[tuple[int, ...], ...]
    """Sizes of the float32 tensors of its state: a convolution's last inputs, a matrix for each head."""
    num_inputs: int
    """Numbers that one row puts into the state."""

    def elements(self) -> int:
        """Numbers of the state."""
        return sum(prod(size) for size in self.tensors)


SPARE_ROWS = 2
"""Rows of a sequence that are logged beside its draft: the last of its text, before and behind a step."""


class StateRoom(NamedTuple):
    """How much a `StatePool` holds."""

    num_owners: int
    """Sequences that run at once."""
    num_copies: int
    """States of their texts' beginnings, for other sequences."""
    num_logged: int
    """Rows of each sequence whose inputs are kept; more are where a pass has more that are not certain."""

    def num_bytes(self, shapes: Sequence[StateShape]) -> int:
        """What the states and logs take of a model whose recurrent layers keep `shapes`."""
        states = (self.num_owners + self.num_copies) * state_bytes(shapes)
        return states + self.num_owners * self.num_logged * input_bytes(shapes)


def state_bytes(shapes: Sequence[StateShape]) -> int:
    """Bytes of the states of one sequence."""
    return sum(shape.elements() for shape in shapes) * torch.float32.itemsize


def input_bytes(shapes: Sequence[StateShape]) -> int:
    """Bytes of the inputs of one row."""
    return sum(shape.num_inputs for shape in shapes) * torch.float32.itemsize


@dataclass(slots=True)
class _HeldState:
    """The state of one sequence."""

    slot: int
    length: int = 0
    """Tokens that the state has seen."""
    log: list[int] = field(default_factory=list)
    """Of each entry behind them, the place of its inputs in the log."""
    is_sound: bool = True
    """False while a pass changes the state: one that fails leaves some layers ahead of others."""


class Copies(Protocol):
    """Who keeps copies of states, see `StateAccounting`."""

    def begin(self, owner: int) -> None:
        """A pass of this owner begins: copies of one that has not come to its end hold nothing."""

    def slot_for(self, owner: int, length: int) -> int | None:
        """The slot for a copy of the state that has seen this many of the owner's tokens; None for no copy."""


class StatePool:
    """States of the recurrent layers of one model, in a bounded number of slots, and the log of running sequences.

    An *owner* is the id of a running sequence, as for `SlotAccounting`. Slots that no owner has are for copies, see
    `StateAccounting`.
    """

    def __init__(self, shapes: Sequence[StateShape], room: StateRoom, device: torch.device) -> None:
        """`shapes` says what each recurrent layer keeps, or each of the recurrences in it."""
        self.shapes = list(shapes)
        self.device = device
        num_owners, num_copies, num_logged = room
        self.num_owners, self.num_copies = num_owners, num_copies
        width = sum(shape.elements() for shape in shapes)
        self._states = torch.empty(num_owners + num_copies, width, device=device)
        self._firsts = self._columns(StateShape.elements)
        self._first_inputs = self._columns(lambda shape: shape.num_inputs)
        self._log = torch.empty(num_owners * num_logged, self._num_inputs, device=device)
        self._free_places = list(range(len(self._log)))
        self.free_slots = list(range(num_owners + num_copies))
        self._held: dict[int, _HeldState] = {}
        self.copies: Copies | None = None

    def _columns(self, size: Callable[[StateShape], int]) -> list[int]:
        """Where each layer's numbers begin among those of all layers."""
        return list(accumulate(map(size, self.shapes), initial=0))

    @property
    def _num_inputs(self) -> int:
        return sum(shape.num_inputs for shape in self.shapes)

    @property
    def num_held(self) -> int:
        """Owners with a state."""
        return len(self._held)

    def __contains__(self, owner: int) -> bool:
        return owner in self._held

    # --- what is held -----------------------------------------------------------------------------------------

    def open(self, owner: int) -> bool:
        """Give `owner` a slot; what is in it counts only once `restore` has put a state there. False where all owners'
        places are taken."""
        if len(self._held) == self.num_owners or not self.free_slots:
            return False
        self._held[owner] = _HeldState(self.free_slots.pop())
        return True

    def restore(self, owner: int, slot: int, length: int) -> None:
        """Begin `owner`'s state with a copy of the one in `slot`, which has seen `length` tokens."""
        self.reset(owner)
        held = self._held[owner]
        self._states[held.slot] = self._states[slot]
        held.length = length

    def length(self, owner: int) -> int:
        """How many tokens `owner`'s state has seen; entries behind them are in its log. 0 where a pass that failed has
        left no state."""
        held = self._held[owner]
        return held.length if held.is_sound else 0

    def num_known(self, owner: int) -> int:
        """How many entries a pass can go on from: those that the state has seen and those in the log."""
        held = self._held[owner]
        return held.length + len(held.log) if held.is_sound else 0

    def assume(self, owner: int, length: int) -> None:
        """Let `owner`'s states, all zeros, have seen `length` tokens: for passes of which only the time counts."""
        if owner not in self._held:
            self.open(owner)
        self._states[self._held[owner].slot] = 0
        self.reset(owner)
        self._held[owner].length = length

    def reset(self, owner: int) -> None:
        """Forget what `owner`'s state has seen."""
        held = self._held[owner]
        self._relog(held, [])
        held.length, held.is_sound = 0, True

    def _relog(self, held: _HeldState, places: list[int]) -> None:
        """The entries behind a state are in these places now; others that it had are free."""
        kept = set(places)
        self._free_places += [place for place in held.log if place not in kept]
        held.log = places

    def gather(self, owner: int, first: int, kept: Sequence[int]) -> None:
        """As `KVPool.gather`: row `kept[i]` of those behind the entry `first` becomes entry `first + i`."""
        held = self._held[owner]
        final = max(held.length - first, 0)  # rows that the state has seen: they stay where they are
        begin = first + final - held.length
        behind = held.log[begin:]
        self._relog(held, [*held.log[:begin], *(behind[row - final] for row in kept[final:])])

    def close(self, owner: int) -> tuple[int, int]:
        """End `owner`'s claim; returns its slot, which is not free yet, and how many tokens the state has seen."""
        length = self.length(owner)
        held = self._held.pop(owner)
        self._relog(held, [])
        return held.slot, length

    def fill(self, number: float) -> None:
        """As `KVPool.fill`."""
        self._states.fill_(number)
        self._log.fill_(number)

    def memory_bytes(self) -> int:
        """Bytes of states and log, used or not."""
        return int(self._states.nbytes + self._log.nbytes)

    def integrity(self) -> list[str]:
        """Violated invariants; empty when there are none."""
        slots = [held.slot for held in self._held.values()] + self.free_slots
        faults = []
        if len(set(slots)) != len(slots):
            faults.append("two owners hold one state, or a state that is free")
        places = [place for held in self._held.values() for place in held.log] + self._free_places
        if sorted(places) != list(range(len(self._log))):
            faults.append("places of the log are held twice, or lost")
        return faults

    # --- a pass -----------------------------------------------------------------------------------------------

    def begin(self, groups: Sequence[SequenceRows]) -> StatePass:
        """The walk of a pass over these rows; each layer then goes it once, before `StatePass.finish`."""
        walk = Walk()
        owners: list[int] = []
        first_row = 0
        for group in groups:
            owner = group.owner
            if owner is None:
                raise ValueError(
                    "rows of a model with recurrent layers need an owner, whose state they continue"
                )
            if owner not in self._held and (group.num_past or not self.open(owner)):
                raise ValueError(f"there is no state of sequence {owner} for its {group.num_past} entries")
            if self.copies is not None:
                self.copies.begin(owner)
            self._add_steps(walk, owner, group, first_row)
            owners.append(owner)
            first_row += len(group.token_ids)
        return StatePass(self, walk, owners, first_row)

    def _add_steps(self, walk: Walk, owner: int, group: SequenceRows, first_row: int) -> None:
        held = self._held[owner]
        if group.num_past == 0:
            self.reset(owner)
            self._states[held.slot] = 0
        past, num_stored = group.num_past - held.length, len(group.stored_positions)
        if not held.is_sound or past < 0 or len(held.log) < past + num_stored:
            raise ValueError(
                f"the state of sequence {owner} has seen {held.length} tokens and {len(held.log)} are in its log: it "
                f"cannot go on behind {group.num_past} entries and {num_stored} stored ones"
            )
        committed, stored = held.log[:past], held.log[past : past + num_stored]
        num_rows = len(group.token_ids)
        num_chain = num_rows if group.tail_seen is None else group.num_chain
        # The last certain entry stays in the log: drafters feed it again.
        num_final = min(max(group.num_certain - 1 - held.length, 0), past + num_chain)
        entries = [*(-1 - place for place in committed), *range(first_row, first_row + num_chain)]
        last = -1
        for place, given in enumerate(entries[:num_final]):
            last = walk.step(given, last, OWN_STATE, OWN_STATE)
            slot = None if self.copies is None else self.copies.slot_for(owner, held.length + place + 1)
            if slot is not None:
                walk.copies[last] = slot
        last = walk.chain(entries[num_final:], last, OWN_STATE, OWN_STATE + 1)
        if group.tail_seen is not None:
            tail = [-1 - place for place in stored]
            tail += range(first_row + num_chain, first_row + num_rows)
            walk.tree(tail, group.tail_seen, last, min(len(entries) - num_final, 1))
        walk.end(held.slot)
        rows = range(first_row + max(num_final - past, 0), first_row + num_rows)
        self._relog(held, [*committed[num_final:], *stored])
        places = self._take_places(len(rows))
        walk.logged.update(zip(rows, places, strict=True))
        held.log = [*held.log, *places]
        held.length += num_final
        held.is_sound = False

    def _take_places(self, number: int) -> list[int]:
        """Free places of the log. Those that this pass still reads may be among them: a layer reads before it writes.

        A prediction or a drafted step may have more rows than were planned for; the log then grows by these.
        """
        missing = number - len(self._free_places)
        if missing > 0:
            self._free_places += range(len(self._log), len(self._log) + missing)
            self._log = torch.cat([self._log, self._log.new_empty(missing, self._num_inputs)])
        return [self._free_places.pop() for _ in range(number)]

    def states(self, layer: int) -> list[Tensor]:
        """The tensors of a layer's states, each [slots, ...]: views."""
        first = self._firsts[layer]
        views = []
        for size in self.shapes[layer].tensors:
            views.append(self._states[:, first : first + prod(size)].view(-1, *size))
            first += prod(size)
        return views

    def log(self, layer: int) -> Tensor:
        """[places, inputs]: a view of a layer's part of the log."""
        first = self._first_inputs[layer]
        return self._log[:, first : first + self.shapes[layer].num_inputs]

    def finish(self, owners: Sequence[int]) -> None:
        """A pass has changed the states of these owners in all layers."""
        for owner in owners:
            self._held[owner].is_sound = True


class StatePass:
    """One pass over states: what its layers read and write, in the order of its walk."""

    def __init__(self, pool: StatePool, walk: Walk, owners: Sequence[int], num_rows: int) -> None:
        self.walk = walk
        self._pool, self._owners = pool, owners
        given = np.array(walk.inputs, np.int64)
        is_row = given >= 0
        row_steps = np.zeros(num_rows, np.int64)
        row_steps[given[is_row]] = np.flatnonzero(is_row)
        logged = np.array([*walk.logged.items()], np.int64).reshape(-1, 2)
        # Of each step its row, or its place among those of the log behind all rows; or the place behind the rows.
        order = np.where(is_row, given, num_rows - 1 + np.cumsum(~is_row))
        or_none = np.where(is_row, given, num_rows)
        self._is_plain = len(given) == num_rows and bool((given == np.arange(num_rows)).all())
        self._row_steps, self._order, self._or_none = map(self._index, (row_steps, order, or_none))
        self._replayed = self._index(-1 - given[~is_row])
        self._logged_rows, self._logged_places = (
            self._index(logged[:, 0]),
            self._index(logged[:, 1]),
        )
        self._taps: dict[int, NDArray[np.int64]] = {}

    def _index(self, numbers: NDArray[np.int64]) -> Tensor:
        """For many uses: PyTorch copies what is no tensor of its own with every one."""
        return torch.from_numpy(numbers).to(self._pool.device)

    @property
    def num_steps(self) -> int:
        return len(self.walk.inputs)

    def states(self, layer: int) -> list[Tensor]:
        """As `StatePool.states`."""
        return self._pool.states(layer)

    def inputs(self, layer: int, rows: Tensor) -> Tensor:
        """Log the inputs [rows, inputs] of a layer; returns those of all steps, [steps, inputs]."""
        log, rows = self._pool.log(layer), rows.float()
        steps = rows
        if not self._is_plain:
            steps = torch.cat([rows, log.index_select(0, self._replayed)]).index_select(0, self._order)
        log.index_copy_(0, self._logged_places, rows.index_select(0, self._logged_rows))
        return steps

    def steps(self, rows: Tensor) -> Tensor:
        """[rows, ...] -> [steps, ...]: those of the steps that are rows, and zeros."""
        if self._is_plain:
            return rows
        return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]).index_select(0, self._or_none)

    def of_rows(self, steps: Tensor) -> Tensor:
        """[steps, ...] -> [rows, ...]: what the steps made of the rows."""
        return steps if self._is_plain else steps.index_select(0, self._row_steps)

    def finish(self) -> None:
        """All layers have gone the walk."""
        self._pool.finish(self._owners)

    # --- convolutions -----------------------------------------------------------------------------------------

    def convolve(self, window: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A causal depthwise convolution along the walk; moves the windows on.

        `window` [slots, taps - 1, channels] are the inputs before the walk, a state of the layer; inputs
        [steps, channels], weight [channels, taps], bias [channels] -> [steps, channels].
        """
        taps = weight.shape[1]
        read = self.taps(taps)
        slots = self.walk.slots
        all_inputs = torch.cat([inputs, window[slots].reshape(-1, inputs.shape[1])])
        output = torch.zeros_like(inputs) if bias is None else bias.float().expand_as(inputs)
        for tap in range(taps):
            output = output + all_inputs[read[:, tap]] * weight[:, tap].float()
        for step, slot in self.kept_windows():
            window[slot] = all_inputs[read[step, 1:]]
        return output

    def kept_windows(self) -> Iterator[tuple[int, int]]:
        """The steps behind which a window is kept, and the slot of each."""
        walk = self.walk
        yield from walk.copies.items()
        for number, slot in enumerate(walk.slots):
            targets = walk.targets[walk.first_steps[number] : walk.first_steps[number + 1]]
            num_final = targets.count(OWN_STATE)
            if num_final:
                yield walk.first_steps[number] + num_final - 1, slot

    def taps(self, taps: int) -> NDArray[np.int64]:
        """[steps, taps]: the inputs that each step convolves, its own last. Behind the inputs of the steps are those
        of the sequences' windows."""
        if taps not in self._taps:
            steps, counts = self.num_steps, np.diff(self.walk.first_steps)
            firsts = np.arange(len(counts)) * (taps - 1) + steps
            parents = np.array(self.walk.parents, np.int64)
            newest = np.repeat(firsts + taps - 2, counts)
            before = np.concatenate(
                [np.where(parents < 0, newest, parents), np.arange(len(counts) * (taps - 1)) + steps - 1]
            )
            read = np.empty((steps, taps), np.int64)
            read[:, -1] = np.arange(steps)
            for tap in range(taps - 2, -1, -1):
                read[:, tap] = before[read[:, tap + 1]]
            self._taps[taps] = read
        return self._taps[taps]
