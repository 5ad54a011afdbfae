"""The passes that try a loaded model out: a dozen tokens as a chain and as a tree, and where arithmetic may change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from slipstream.kv.slots import SlotMap
from slipstream.models.rows import RowGroup

NUM_TRIAL_ROWS = 12
"""Tokens of the text that tries a model out."""

NUM_SIGN_ROWS = 8


@dataclass(frozen=True, slots=True)
class TrialPass:
    """One pass over rows of the trial text."""

    groups: list[RowGroup]
    places: list[int]
    """Token of the text that each wanted row belongs to, near tokens before far ones."""


def far_positions(
    context_length: int, numbers: Iterable[int], reaches: Iterable[int], counts_tokens: bool = False
) -> list[int]:
    """The positions at which the text is repeated, ascending; none where the context holds it only once.

    They are those of the `numbers` of the configuration, at which a family may change its arithmetic, and the last ones
    of the context, which lie behind all of them. Where a layer does not see all of a text (`reaches`, see `Variant`),
    or adds a bias for which Transformers `counts_tokens`, they follow each other, because it counts what a row sees
    token by token; chunks begin where they do.
    """
    if context_length < 2 * NUM_TRIAL_ROWS:
        return []
    reaches = set(reaches)
    if any(reaches) or counts_tokens:
        first = context_length - NUM_TRIAL_ROWS
        first -= first % max(1, -min(reaches, default=0))
        return list(range(first, first + NUM_TRIAL_ROWS)) if first else []
    edges = sorted({number for number in numbers if NUM_TRIAL_ROWS <= number < context_length - 1})
    most = NUM_TRIAL_ROWS - 1
    chosen = {edges[place * len(edges) // most] for place in range(most)} if edges else set()
    last = (position for position in range(context_length - 1, 0, -1) if position not in chosen)
    return sorted(chosen | set(islice(last, NUM_TRIAL_ROWS - len(chosen))))


def num_trial_slots(unit: int = 1) -> int:
    """Slots of the three sequences of `trial_passes`, of a cache that gives them out in multiples of `unit`."""
    return 3 * _room(unit)


def trial_passes(
    tokens: Sequence[int], wrong: int, slots: SlotMap, far: Sequence[int], unit: int = 1
) -> list[TrialPass]:
    """Passes as an engine makes them over the text `tokens`; the far text, at the positions `far`, follows it.

    Two sequences of the near text share every pass. One is a chain. The other one goes on as a tree,
    and then as a tree below entries of that one; each has the token `wrong` too, so the two hold different entries. The
    far text has a pass of its own.
    """
    room, ids = _room(unit), list(tokens)
    others = [
        RowGroup(slots[room : 2 * room], begin, ids[begin:end], range(end - begin), num_certain=end, owner=1)
        for begin, end in ((0, 6), (6, 9), (9, 12))
    ]
    own = slots[:room]
    tree = RowGroup(
        own,
        6,
        [ids[6], wrong, wrong, ids[7]],
        [0, 3],
        positions=[6, 6, 7, 7],
        tail_seen=[[0], [1], [0, 2], [0, 3]],
        num_certain=6,
        owner=0,
    )
    below = RowGroup(
        own,
        6,
        [wrong, *ids[8:NUM_TRIAL_ROWS]],
        [1, 2, 3, 4],
        positions=[8, 8, 9, 10, 11],
        stored_positions=[6, 6, 7, 7],
        tail_seen=[[0, 3, 4], [0, 3, 5], [0, 3, 5, 6], [0, 3, 5, 6, 7], [0, 3, 5, 6, 7, 8]],
        num_certain=6,
        owner=0,
    )
    passes = [
        TrialPass([RowGroup(own, 0, ids[:6], range(6), owner=0), others[0]], [*range(6), *range(6)]),
        TrialPass([tree, others[1]], [6, 7, 6, 7, 8]),
        TrialPass([below, others[2]], [8, 9, 10, 11, 9, 10, 11]),
    ]
    return [*passes, _far_pass(ids, slots[2 * room :], far)] if far else passes


def _far_pass(ids: list[int], slots: SlotMap, far: Sequence[int]) -> TrialPass:
    text = ids[NUM_TRIAL_ROWS : 2 * NUM_TRIAL_ROWS]
    # Not a chain: entry i of a chain is at position i, and these are the only entries of their sequence.
    group = RowGroup(
        slots,
        0,
        text,
        range(len(text)),
        positions=far,
        tail_seen=[list(range(row + 1)) for row in range(len(text))],
        owner=2,
    )
    return TrialPass([group], list(range(NUM_TRIAL_ROWS, 2 * NUM_TRIAL_ROWS)))


def sign_rows(width: int) -> Tensor:
    """float32 [NUM_SIGN_ROWS, width] of 1 and -1: rows that rounding to 8 bits leaves as they are, in any groups.

    So what a kernel makes of them is the product of its weights, and differs from that of a checkpoint's only by what
    the weights were rounded. The signs are the same in every process.
    """
    made = torch.Generator().manual_seed(width)
    return torch.randint(0, 2, (NUM_SIGN_ROWS, width), generator=made).float() * 2 - 1


def _room(unit: int) -> int:
    """Slots of one sequence."""
    return -(-2 * NUM_TRIAL_ROWS // unit) * unit
