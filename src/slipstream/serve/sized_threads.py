"""Threads for work of different sizes, so that small work never waits for large work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel

T = TypeVar("T")

BOUNDS = (4 * 2**10, 128 * 2**10)
"""Most characters of work in the first and in the second thread; larger work is in a third. A tokenizer
reads about a million characters a second."""


class SizedThreads:
    """One thread for each class of sizes; within a class, first come, first served."""

    def __init__(self, name: str) -> None:
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{number}") for number in range(len(BOUNDS) + 1)
        ]

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on `size` characters. Cancelled before it begins, it does not run."""
        number = sum(size > bound for bound in BOUNDS)
        return await asyncio.get_running_loop().run_in_executor(self._threads[number], work)


def size_of(*values: Any) -> int:
    """The approximate number of characters in decoded JSON; counts no further than the last bound."""
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
