"""Checks of keyword arguments with helpful errors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from slipstream.config import reject_unknown
from slipstream.errors import ConfigError, RequestError
from slipstream.vllm_names import Unsupported, split_off

T = TypeVar("T")


def strict_keywords(
    what: str,
    unsupported: Mapping[str, Unsupported] | None = None,
    elsewhere: Callable[[str], str | None] = lambda name: None,
) -> Callable[[type[T]], type[T]]:
    """Make a dataclass raise `RequestError` with the nearest valid name for an unknown keyword, not a bare TypeError.

    `what` is what messages call a keyword. `unsupported` names are accepted at their neutral values and ignored.
    `elsewhere` says where a name belongs that is not one of these keywords; None where it does not know the name.
    """

    def decorate(cls: type[T]) -> type[T]:
        names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        init: Callable[..., None] = cls.__init__

        @functools.wraps(init)
        def checked(self: T, **values: Any) -> None:
            if unsupported and not unsupported.keys().isdisjoint(values):
                values, _ = split_off(values, unsupported, what, RequestError)
            check_names(values, names, what, elsewhere)
            init(self, **values)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate


def check_names(
    given: Iterable[str], valid: Iterable[str], what: str, elsewhere: Callable[[str], str | None]
) -> None:
    """Raise `RequestError` for the first name that is not valid; it says where that belongs, or a near one."""
    valid = list(valid)
    for name in given:
        place = None if name in valid else elsewhere(name)
        if place is not None:
            raise RequestError(f"{name} is no {what}: {place}")
    try:
        reject_unknown(given, valid, what)
    except ConfigError as error:
        raise RequestError(str(error)) from None
