"""Finds what is still reachable from a drafter: references to released sequences, and the amount of memory."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from slipstream.core.sequence import Sequence
from slipstream.draft.base import Drafter

_OPAQUE = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, torch.dtype, torch.device)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_VALUES = (int, float, complex, str, bytes, bytearray, type(None), types.EllipsisType)


def remembered(drafter: Drafter, sequence_ids: Collection[int], apart: Collection[Any] = ()) -> str:
    """Return where a released sequence is still referenced, in words; empty if nowhere.

    Looks for any sequence, and for the ids `sequence_ids` and their requests' ids, so these must be numbers that mean
    nothing else.
    `apart` is what belongs to others.
    """
    names = {str(sequence_id) for sequence_id in sequence_ids}
    for found, holder in _reachable(drafter, apart):
        if isinstance(found, Sequence):
            return f"sequence {found.id} itself, in {holder}"
        if type(found) is int and found in sequence_ids:
            return f"the id {found}, in {holder}"
        if type(found) is str and found in names:
            return f"the request id {found!r}, in {holder}"
    return ""


def size(drafter: Drafter, apart: Collection[Any] = ()) -> int:
    """Size of everything reachable from the drafter: entries of all containers, bytes of texts and tensors."""
    total = 0
    for found, _ in _reachable(drafter, apart):
        if isinstance(found, (*_CONTAINERS, str, bytes, bytearray)):
            total += len(found)
        elif isinstance(found, (torch.Tensor, np.ndarray)):
            total += int(found.nbytes)
    return total


def _reachable(drafter: Drafter, apart: Collection[Any]) -> Iterator[tuple[Any, str]]:
    """Everything reachable from the drafter and its own classes, each with the name of its holder.

    Numbers come as often as they are held, all else once. Classes, modules and the globals of functions are no part of
    a drafter.
    """
    seen = {id(drafter.context), *map(id, apart)}
    kept: list[Any] = []  # so that no address is used twice
    own = [vars(cls) for cls in type(drafter).__mro__ if issubclass(cls, Drafter) and cls is not Drafter]
    shared = {f"{key} of its class": value for attributes in own for key, value in attributes.items()}
    shared = {key: value for key, value in shared.items() if isinstance(value, _CONTAINERS)}
    queue: deque[tuple[Any, str]] = deque([(drafter, "the drafter"), *((v, k) for k, v in shared.items())])
    while queue:
        holder, name = queue.popleft()
        if isinstance(holder, _VALUES):
            yield holder, name
            continue
        if isinstance(holder, _OPAQUE) or id(holder) in seen:
            continue
        seen.add(id(holder))
        kept.append(holder)
        yield holder, name
        queue.extend(_held(holder, name))


def _held(holder: Any, name: str) -> Iterator[tuple[Any, str]]:
    """The objects that `holder` refers to, with names."""
    if isinstance(holder, (torch.Tensor, np.ndarray)):
        return
    if isinstance(holder, dict):
        for key, value in holder.items():
            yield key, name
            yield value, f"{name}[{key!r}]" if isinstance(key, _VALUES) and len(name) < 200 else name
    elif isinstance(holder, _CONTAINERS):
        yield from ((value, name) for value in holder)
    elif isinstance(holder, types.FunctionType):
        yield from ((value, name) for value in (*(holder.__closure__ or ()), *(holder.__defaults__ or ())))
    elif hasattr(holder, "__dict__") and not isinstance(holder, types.MethodType):
        yield from ((value, key) for key, value in list(vars(holder).items()))
        yield from ((value, name) for value in gc.get_referents(holder) if value is not vars(holder))
    else:
        yield from ((value, name) for value in gc.get_referents(holder))
