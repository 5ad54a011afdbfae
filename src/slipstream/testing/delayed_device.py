"""A stand-in on a CPU for a device that computes later: what is launched is computed when the host waits for it.

Within `DelayedDevice` every operator is only noted, and its results are poisoned until it is computed. A `Download`
waits for what was launched before it, as an event of CUDA's does, and leaves what came later. Anything else that reads
a number waits for everything, and is counted. Load a model with
`attention_backend="slipstream.testing.recorded_graph:TritonOnCpu"` and
`executor="slipstream.testing.delayed_device:DelayedExecutor"`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from slipstream.kv.upload import Download
from slipstream.testing.recorded_graph import REFUSED, ComputedExecutor


class DelayedExecutor(ComputedExecutor):
    """For passes that are launched within a `DelayedDevice`."""

    @property
    def is_asynchronous(self) -> bool:
        return True


class DelayedDevice(TorchDispatchMode):
    """See above. To be entered in the thread that launches, once models are loaded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_behind: list[int] = []
        """For each download how much was launched behind it when it was read."""
        self.num_forced = 0
        """Reads of numbers that were not computed yet, without a download."""
        self._queue: deque[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = deque()
        self._num_launched = self._num_computed = 0
        self._copies: dict[int, tuple[Tensor, int]] = {}
        self._computes = False
        self._patches = contextlib.ExitStack()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if self._computes:
            return func(*args, **named)
        name = func.overloadpacket.__name__
        if name == "lift_fresh":  # an upload
            return func(*args, **named)
        if name in REFUSED:
            self._compute_all()
            return func(*args, **named)
        if func._schema.is_mutable:
            result, made = _of_mutating(func, args, named)
        else:
            result = func(*args, **named)  # of numbers that are not there yet, for its sizes
            given = {_memory(part) for part in tree_leaves((args, named)) if isinstance(part, Tensor)}
            parts = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
            made = [part for part in parts if _memory(part) not in given]
            if not made:
                return result  # a view
        for tensor in made:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        self._queue.append((func, args, named, made))
        self._num_launched += 1
        return result

    def _compute(self, until: int) -> None:
        """Compute what was launched before number `until`."""
        with self._computing(), torch.inference_mode():
            while self._num_computed < until:
                func, args, named, made = self._queue.popleft()
                result = func(*args, **named)
                for tensor, value in zip(made, _new(result, len(made)), strict=True):
                    tensor.copy_(value)
                self._num_computed += 1

    def _compute_all(self) -> None:
        self.num_forced += bool(self._queue)
        self._compute(self._num_launched)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        before, self._computes = self._computes, True
        try:
            yield
        finally:
            self._computes = before

    def __enter__(self) -> Any:
        device = self

        def begin(self: Download, numbers: Tensor) -> None:
            device._copies[id(self)] = (numbers.clone(), device._num_launched)

        def read(self: Download) -> list[int]:
            numbers, until = device._copies.pop(id(self))
            device.num_behind.append(device._num_launched - until)
            device._compute(until)
            with device._computing():
                return numbers.tolist()

        for method in (begin, read):
            name = "__init__" if method is begin else "read"
            self._patches.enter_context(mock.patch.object(Download, name, method))
        for name in ("tolist", "numpy"):
            self._patches.enter_context(mock.patch.object(Tensor, name, self._reading(getattr(Tensor, name))))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._compute(self._num_launched)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _reading(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *arguments: Any) -> Any:
            if not self._computes:
                self._compute_all()
            with self._computing():
                return method(tensor, *arguments)

        return read


def _of_mutating(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """What an operator that writes to its arguments returns before it is computed, and what of that is new."""
    schema = func._schema
    if not schema.returns:
        return None, []
    if all(each.alias_info is not None for each in schema.returns):
        written = [
            args[place] if place < len(args) else named[argument.name]
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return written[0] if len(schema.returns) == 1 else tuple(written), []
    shaped = func(*tree_map(_on_meta, args), **tree_map(_on_meta, named))
    result = tree_map(lambda each: torch.empty(each.shape, dtype=each.dtype), shaped)
    return result, tree_leaves(result)


def _on_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _new(result: Any, number: int) -> list[Tensor]:
    """The results that are memory of their own: all, or none."""
    return [part for part in tree_leaves(result) if isinstance(part, Tensor)] if number else []


def _memory(tensor: Tensor) -> object:
    return tensor if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()
