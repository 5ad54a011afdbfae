"""Checks of keyword arguments with helpful errors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from slipstream.config import reject_unknown
from slipstream.errors import ConfigError, RequestError
from slipstream.vllm_names import Foreign, split_off

T = TypeVar("T")


def strict_keywords(what: str, foreign: Mapping[str, Foreign] | None = None) -> Callable[[type[T]], type[T]]:
    """Make a dataclass raise `RequestError` with the nearest valid name for an unknown keyword, not a bare TypeError.

    `what` is what messages call a keyword. `foreign` names are accepted at their neutral values and ignored.
    """

    def decorate(cls: type[T]) -> type[T]:
        names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        init: Callable[..., None] = cls.__init__

        @functools.wraps(init)
        def checked(self: T, **values: Any) -> None:
            if foreign and not foreign.keys().isdisjoint(values):
                values, _ = split_off(values, foreign, what, RequestError)
            try:
                reject_unknown(values, names, what)
            except ConfigError as error:
                raise RequestError(str(error)) from None
            init(self, **values)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate
