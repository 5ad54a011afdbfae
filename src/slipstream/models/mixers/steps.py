"""Going a walk over states in PyTorch, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from slipstream.kv.walk import OWN_STATE, Walk


def states_behind(
    walk: Walk, states: Tensor, step: Callable[[int, Tensor], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """The number of each step and the state behind it, which `step` makes of its number and the state before it.

    `states` [slots, ...] are moved on to those of the tokens that are certain.
    """
    for number, slot in enumerate(walk.slots):
        buffers = {OWN_STATE: states[slot]}
        for place in range(walk.first_steps[number], walk.first_steps[number + 1]):
            made = buffers[walk.targets[place]] = step(place, buffers[walk.sources[place]])
            if place in walk.copies:
                states[walk.copies[place]] = made
            yield place, made
        states[slot] = buffers[OWN_STATE]
