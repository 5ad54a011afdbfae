"""Keyword arguments as users write them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from slipstream.config import reject_unknown
from slipstream.errors import ConfigError, RequestError

T = TypeVar("T")


def strict_keywords(what: str) -> Callable[[type[T]], type[T]]:
    """Make a dataclass answer an unknown keyword with the nearest valid one, not with a bare TypeError.

    `what` is what a keyword is called in the message.
    """

    def decorate(cls: type[T]) -> type[T]:
        names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        init: Callable[..., None] = cls.__init__

        @functools.wraps(init)
        def checked(self: T, **values: Any) -> None:
            try:
                reject_unknown(values, names, what)
            except ConfigError as error:
                raise RequestError(str(error)) from None
            init(self, **values)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate
