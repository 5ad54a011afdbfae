"""A mapping of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """At most `max_entries`; the one that was set or touched the longest time ago makes room for a new one.

    Reading (`[]`, `get`) does not count as use, `touch` does.
    """

    def __init__(self, max_entries: int, on_drop: Callable[[K, V], object] | None = None) -> None:
        """`on_drop` is called with each entry that has made room, after it is gone."""
        super().__init__()
        self.max_entries = max_entries
        self._on_drop = on_drop

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self:
            self._make_room()
        super().__setitem__(key, value)
        self.move_to_end(key)

    def touch(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, made where there is none; it is the last to make room now."""
        if key not in self:
            self._make_room()
            super().__setitem__(key, make())
        self.move_to_end(key)
        return self[key]

    def drop_oldest(self) -> None:
        """Drop the entry that would make room next. Raises `KeyError` where there is none."""
        key, value = self.popitem(last=False)
        if self._on_drop is not None:
            self._on_drop(key, value)

    def _make_room(self) -> None:
        """Drop what is too much once an entry is added."""
        while self and len(self) >= self.max_entries:
            self.drop_oldest()
