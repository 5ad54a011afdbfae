"""The order in which rows of a pass enter the states of recurrent layers. No tensors.

A recurrent layer has no entry for each token, but one state that every token changes. So each row of a pass needs the
state behind its parent: of a chain the row before it, of a tree the node above it. The steps of a *walk* go through the
rows depth first. Those of certain tokens change the sequence's own state, which is final; all others work on copies,
which are dropped with the pass. What is kept of such a row is its input (see `StatePool`): a later walk begins with the
inputs that were kept since, and so arrives at the same state by the same arithmetic, whatever was drafted in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

OWN_STATE = 0
"""The number of the buffer that is the sequence's state itself."""


class SequenceRows(Protocol):
    """What a walk reads of a `RowGroup`."""

    owner: int | None
    num_past: int
    num_chain: int
    num_certain: int

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def stored_positions(self) -> Sequence[int]: ...
    @property
    def tail_seen(self) -> Sequence[Sequence[int]] | None: ...


@dataclass(slots=True)
class Walk:
    """The steps of all sequences of a pass, sequence after sequence, a parent before its children."""

    inputs: list[int] = field(default_factory=list)
    """What each step puts into the state: row i of the pass as i, place i of the log as -1 - i."""
    parents: list[int] = field(default_factory=list)
    """The step before it; -1 where that is the state as the pass finds it."""
    sources: list[int] = field(default_factory=list)
    """The buffer of its sequence that holds the state before it."""
    targets: list[int] = field(default_factory=list)
    """The buffer that is to hold the state behind it; `OWN_STATE` for tokens that are certain."""
    copies: dict[int, int] = field(default_factory=dict)
    """Of some steps, the slot of the states that a copy of the state behind it goes to."""
    first_steps: list[int] = field(default_factory=lambda: [0])
    """[sequences + 1]: where each sequence's steps begin."""
    slots: list[int] = field(default_factory=list)
    """The slot of each sequence's state."""
    logged: dict[int, int] = field(default_factory=dict)
    """Rows whose inputs are kept, and the place of the log that each goes to."""
    num_buffers: int = 1
    """Buffers of the sequence that needs most."""

    def step(self, given: int, parent: int, source: int, target: int) -> int:
        """Add a step; returns its number."""
        self.inputs.append(given)
        self.parents.append(parent)
        self.sources.append(source)
        self.targets.append(target)
        self.num_buffers = max(self.num_buffers, target + 1)
        return len(self.inputs) - 1

    def chain(self, given: Sequence[int], parent: int, source: int, target: int) -> int:
        """Add steps one behind the other, of which the first begins in the buffer `source`; returns the last one, or
        `parent` where there are none."""
        for number in given:
            parent, source = self.step(number, parent, source, target), target
        return parent

    def end(self, slot: int) -> None:
        """The steps since the last call are those of the sequence whose state is in `slot`."""
        self.slots.append(slot)
        self.first_steps.append(len(self.inputs))

    def tree(self, given: Sequence[int], seen: Sequence[Sequence[int]], root: int, source: int) -> None:
        """Add the nodes of a tree, whose inputs are `given`, depth first below the step `root`.

        `seen` lists paths from the top down that are walked; a node that is on none of them is left out. `source` is
        the buffer of the state above the tree, which further steps no longer need.
        """
        children: dict[int, list[int]] = {}
        known: set[int] = set()
        for path in seen:
            above = -1
            for node in path:
                if node not in known:
                    known.add(node)
                    children.setdefault(above, []).append(node)
                above = node
        free: list[int] = []
        next_new = source + 1
        waiting = [
            (node, root, source, place == 0) for place, node in enumerate(reversed(children.get(-1, [])))
        ]
        while waiting:
            node, parent, before, is_last = waiting.pop()
            if is_last and before != OWN_STATE:
                target = before
            elif free:
                target = free.pop()
            else:
                target, next_new = next_new, next_new + 1
            step = self.step(given[node], parent, before, target)
            below = children.get(node, [])
            if not below:
                free.append(target)
            waiting += [(child, step, target, place == 0) for place, child in enumerate(reversed(below))]
