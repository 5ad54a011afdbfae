"""Threads for work of different sizes, so that what is small never waits for what is large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel

T = TypeVar("T")

BOUNDS = (4 * 2**10, 128 * 2**10)
"""Characters up to which work belongs into the first lane and into the second; the rest goes into a third. A tokenizer
reads about a million characters a second."""


class Lanes:
    """One thread for each class of sizes; within a class, first come, first served."""

    def __init__(self, name: str) -> None:
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{number}") for number in range(len(BOUNDS) + 1)
        ]

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` makes of `size` characters. Cancelled before its turn, it is not done at all."""
        lane = sum(size > bound for bound in BOUNDS)
        return await asyncio.get_running_loop().run_in_executor(self._threads[lane], work)


def size_of(*values: Any) -> int:
    """About how many characters there are in values as clients send them; counts no further than the last bound."""
    size, waiting = 0, list(values)
    while waiting and size <= BOUNDS[-1]:
        value = waiting.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            waiting += value
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            if len(value) > BOUNDS[-1]:
                return len(value)
            waiting += value
        elif isinstance(value, BaseModel):
            waiting += value.__dict__.values()
            waiting += (value.model_extra or {}).values()
    return size
