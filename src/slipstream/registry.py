"""Classes by name: built in, registered by code, or found among the entry points of installed packages."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Generic, TypeVar

from slipstream.config import reject_unknown
from slipstream.errors import ConfigError

T = TypeVar("T")


def entry_points(group: str) -> metadata.EntryPoints:
    """Those of installed packages in a group."""
    return _installed(group, tuple(sys.path))


@functools.lru_cache(maxsize=32)
def _installed(group: str, _: tuple[str, ...]) -> metadata.EntryPoints:
    """Those on a search path, read once: it takes some 10 ms, and loading a model looks up a dozen names."""
    return metadata.entry_points(group=group)


class Registry(Generic[T]):
    """Finds the classes of one kind by name. A class is imported when it is first looked up.

    A name is one of `built_in`, one that was registered, or an entry point of `group`; the first of them that has it
    wins, so that a built-in name cannot be taken over. A name with a colon is the place of a class itself,
    "module:Class".
    """

    def __init__(self, kind: str, base: type[T], group: str, built_in: Mapping[str, str]) -> None:
        """`kind` is what messages call it, `base` the class that all extend; `built_in` is name to "module:Class"."""
        self._kind = kind
        self._base = base
        self._group = group
        self._built_in = dict(built_in)
        self._registered: dict[str, str | type[T]] = {}

    def names(self) -> list[str]:
        """Every name that there is, sorted. Imports nothing."""
        installed = (entry.name for entry in entry_points(group=self._group))
        return sorted({*self._built_in, *self._registered, *installed})

    def register(self, name: str, place: str | type[T]) -> None:
        """Add a class, or its place "module:Class", for this process. Raises `ConfigError` where the name is taken."""
        if ":" in name:
            raise ConfigError(f"a {self._kind}'s name has no colon, got {name!r}")
        taken = self._built_in.get(name, self._registered.get(name, place))
        if taken != place:
            raise ConfigError(f"{self._kind} {name!r} exists already; register it under another name")
        self._registered[name] = place

    def unregister(self, name: str) -> None:
        """Take back what `register` added; a name that was not registered is ignored."""
        self._registered.pop(name, None)

    def load(self, name: str) -> type[T]:
        """The class called `name`.

        Raises `ConfigError` with the nearest valid name for an unknown one, and where the class cannot be imported or
        is of another kind.
        """
        place = name if ":" in name else self._place(name)
        found = self._import(name, place) if isinstance(place, str) else place
        if not (isinstance(found, type) and issubclass(found, self._base)):
            base = f"{self._base.__module__}.{self._base.__qualname__}"
            raise ConfigError(f"{self._kind} {name!r} is not a subclass of {base}")
        return found

    def _place(self, name: str) -> str | type[T]:
        if name in self._built_in:
            return self._built_in[name]
        if name in self._registered:
            return self._registered[name]
        for entry in entry_points(group=self._group):
            if entry.name == name:
                return entry.value
        reject_unknown([name], self.names(), self._kind)
        raise AssertionError  # an unknown name is refused

    def _import(self, name: str, place: str) -> object:
        module, _, attribute = place.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except Exception as error:  # a package may raise anything while it is imported
            source = "" if place == name else f" from {place!r}"
            reason = str(error) if isinstance(error, ImportError | AttributeError) else repr(error)
            missing = place == name and isinstance(error, ModuleNotFoundError)
            hint = (
                "; modules are searched on Python's path, to which PYTHONPATH adds folders" if missing else ""
            )
            raise ConfigError(f"{self._kind} {name!r} cannot be loaded{source}: {reason}{hint}") from error
