"""Batches of prompts, and the order in which configurations run them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a batch with a configuration."""

    repeat: int
    batch: int
    configuration: int


def cut(num_prompts: int, concurrency: int) -> list[range]:
    """Indices of prompts, batch by batch, of nearly equal size.

    One prompt a batch at a concurrency of 1, so that runs are paired prompt by prompt. Otherwise at least
    `2 * concurrency` prompts a batch, if there are as many, so that the engine is full most of the time.
    """
    size = 1 if concurrency == 1 else 2 * concurrency
    num_batches = max(1, num_prompts // size)
    ends = [num_prompts * number // num_batches for number in range(num_batches + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def turns(num_batches: int, num_configurations: int, repeats: int, side_by_side: bool) -> Iterator[Turn]:
    """Every batch with every configuration, `repeats` times, interleaved.

    With `side_by_side` a batch runs with all configurations before the next batch. Otherwise, where memory has room for
    one engine, all batches run with one configuration before the next configuration, once a repeat. The order of
    configurations rotates, so that a machine that becomes slower or faster favours none.
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
