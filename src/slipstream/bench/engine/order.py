"""What runs together and what runs when: batches, and the order in which configurations take their turns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch of prompts under one configuration, once."""

    repeat: int
    batch: int
    configuration: int


def cut(num_prompts: int, concurrency: int) -> list[range]:
    """Indices of prompts, batch by batch, as even as can be.

    One prompt a batch at a concurrency of 1, so that runs are paired prompt by prompt. Beyond, at least two waves
    of requests a batch where there are as many prompts, so that the engine is full for most of the time.
    """
    size = 1 if concurrency == 1 else 2 * concurrency
    num_batches = max(1, num_prompts // size)
    ends = [num_prompts * number // num_batches for number in range(num_batches + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def turns(num_batches: int, num_configurations: int, repeats: int, side_by_side: bool) -> Iterator[Turn]:
    """Every batch under every configuration, `repeats` times, interleaved.

    `side_by_side`: a batch runs under all configurations, one after another, before the next batch does. Else, where
    memory holds one engine, all batches run under one configuration before the next configuration does, once a
    repeat. Either way the order rotates, so that each configuration has each place equally often and a machine that
    grows slower or faster harms none.
    """
    for repeat in range(repeats):
        if side_by_side:
            for batch in range(num_batches):
                for configuration in _rotated(num_configurations, repeat + batch):
                    yield Turn(repeat, batch, configuration)
        else:
            for configuration in _rotated(num_configurations, repeat):
                for batch in range(num_batches):
                    yield Turn(repeat, batch, configuration)


def _rotated(length: int, by: int) -> list[int]:
    return [(by + number) % length for number in range(length)]
