"""The way into Transformers' recurrent layers: the functions that carry a state from token to token.

A layer's forward computes projections, calls such functions over all rows, [1, N, ...], as if they were one text, and
computes gates, norms and a projection of what they return. In a pass of ours its calls lead here, where each row is
computed from the state behind its parent (`Walk`). Without a pass the layers compute what Transformers does.

Nothing of Transformers is changed: a module gets a copy of its class's forward that finds other functions under their
names. Where a layer computes its recurrence in a method, the module gets one of ours in its place.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from slipstream.errors import UnsupportedModelError
from slipstream.kv.state import StatePass, StateShape
from slipstream.models.mixers.native import NativeWalk
from slipstream.models.mixers.outer_products import OuterProducts
from slipstream.models.support import unsupported


class CellPass:
    """One pass over the states of one cell."""

    def __init__(self, states: StatePass, number: int, native: NativeWalk | None = None) -> None:
        """`native`: the CPU kernels compute what they can."""
        self.walk, self._states, self._number, self._native = states.walk, states, number, native

    def inputs(self, rows: Tensor) -> Tensor:
        """Log what the rows put into the state, [rows, inputs]; returns the inputs of all steps, [steps, inputs]."""
        return self._states.inputs(self._number, rows)

    def states(self) -> list[Tensor]:
        """The tensors of the states, [slots, ...] each."""
        return self._states.states(self._number)

    def steps(self, rows: Tensor) -> Tensor:
        """[rows, ...] -> [steps, ...], zeros for steps that are no rows: what no state depends on."""
        return self._states.steps(rows)

    def rows(self, steps: Tensor) -> Tensor:
        """[steps, ...] -> [rows, ...]: what the steps made of the rows."""
        return self._states.of_rows(steps)

    def convolve(self, window: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `StatePass.convolve`."""
        by = self._native or self._states
        return by.convolve(window, inputs, weight, bias)

    def outer_products(self, products: OuterProducts, states: Tensor) -> Tensor:
        """See `OuterProducts.run`."""
        if self._native is None:
            return products.run(self.walk, states)
        return self._native.outer_products(products, states)


class Recurrence(ABC):
    """A function of Transformers' that carries a state from token to token. It has no data of its own.

    The methods take the arguments of that function, for one text [1, N, ...]; `others` are those that say nothing here.
    """

    @abstractmethod
    def shape(self, *given: Any, **others: Any) -> StateShape:
        """What it keeps of a sequence."""

    @abstractmethod
    def compute(self, cell: CellPass, *given: Any, **others: Any) -> Any:
        """What the function returns, with each row computed from the state behind its parent."""


class RecurrentCell:
    """A recurrence in one layer of a model."""

    def __init__(self, mixers: Mixers, layer: int, name: str, recurrence: Recurrence, stock: Any) -> None:
        """`stock` is Transformers' function, which bears this name."""
        self.layer, self.name, self.recurrence, self.stock = layer, name, recurrence, stock
        self._mixers = mixers

    def __call__(self, *given: Any, **others: Any) -> Any:
        states = self._mixers.states
        if states is not None:
            cell = CellPass(states, self._mixers.next_number(self), self._mixers.native_walk)
            return self.recurrence.compute(cell, *given, **others)
        if self._mixers.probes:
            self._mixers.add(self, self.recurrence.shape(*given, **others))
        return self.stock(*given, **others)


class Mixers:
    """The recurrent layers of one model."""

    def __init__(self, model: Any, recurrences: dict[str, Recurrence], native: bool = False) -> None:
        """Has the functions and methods of all layers of `model` that bear these names lead here. With `native` the
        CPU kernels go the walks."""
        self.config = model.config
        self.shapes: list[StateShape] = []
        """What the cells keep of a sequence, one for each of their calls in a pass."""
        self.numbers: dict[RecurrentCell, list[int]] = {}
        """Where the shapes of each cell are, in the order of its calls: Zamba's layers have one for each head."""
        self._num_calls: Counter[RecurrentCell] = Counter()
        """How often each was called in the pass that runs now."""
        self.states: StatePass | None = None
        """The pass that runs now."""
        self.native_walk: NativeWalk | None = None
        """Its walk for the CPU kernels, where they go it."""
        self._native = native
        self.probes = False
        for name, module in model.named_modules():
            layer = _layer_of(name, module)
            if layer is not None:
                _lead_functions_here(module, layer, self, recurrences)
                _lead_methods_here(module, layer, self, recurrences)

    @property
    def layers(self) -> set[int]:
        """The layers that keep states."""
        return {cell.layer for cell in self.numbers}

    def add(self, cell: RecurrentCell, shape: StateShape) -> None:
        """A cell was called while the model was tried out."""
        self.numbers.setdefault(cell, []).append(len(self.shapes))
        self.shapes.append(shape)

    def next_number(self, cell: RecurrentCell) -> int:
        """Where the shape of a cell's next call is. Raises `UnsupportedModelError` where there were fewer before."""
        place = self._num_calls[cell]
        self._num_calls[cell] += 1
        if place == len(self.numbers[cell]):
            raise self._miscounted(cell)
        return self.numbers[cell][place]

    def _miscounted(self, cell: RecurrentCell) -> UnsupportedModelError:
        return unsupported(
            self.config,
            f"its layer {cell.layer} called {cell.name} {len(self.numbers[cell])} times when it was tried out, and "
            f"{self._num_calls[cell]} times in a later pass: it must call it as often in every pass",
        )

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        """Find out what cells there are and what they keep, while the model runs without a pass of ours."""
        self.shapes, self.numbers, self.probes = [], {}, True
        try:
            yield
        finally:
            self.probes = False

    @contextlib.contextmanager
    def over(self, states: StatePass, num_threads: int = 1) -> Iterator[None]:
        """Let the layers compute a pass over these states within the body."""
        self.states = states
        self._num_calls.clear()
        self.native_walk = NativeWalk(states, num_threads) if self._native else None
        try:
            yield
        finally:
            self.states = self.native_walk = None
        for cell, numbers in self.numbers.items():
            if self._num_calls[cell] != len(numbers):
                raise self._miscounted(cell)
        states.finish()


def _layer_of(name: str, module: nn.Module) -> int | None:
    """The layer that a module is, or is in, by what it says or by its name; None for one that is in no layer."""
    said = getattr(module, "layer_idx", None)
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return said if isinstance(said, int) else numbers[0] if numbers else None


def _lead_methods_here(
    module: nn.Module, layer: int, mixers: Mixers, recurrences: dict[str, Recurrence]
) -> None:
    """Put cells in the place of such methods of a module, or of a part of it."""
    for name, recurrence in recurrences.items():
        kind, *path = name.split(".")
        if not path or kind != type(module).__name__:
            continue
        *parts, method = path
        holder = module.get_submodule(".".join(parts))
        cell = RecurrentCell(mixers, layer, name, recurrence, getattr(type(holder), method))
        setattr(holder, method, MethodType(cell, holder))  # so that it gets the module first


def _lead_functions_here(
    module: nn.Module, layer: int, mixers: Mixers, recurrences: dict[str, Recurrence]
) -> None:
    """Give a module whose class calls such functions a forward that calls cells in their place."""
    stock = inspect.unwrap(type(module).forward)
    if not isinstance(stock, FunctionType):
        return
    names = [name for name in stock.__code__.co_names if name in recurrences and name in stock.__globals__]
    if not names:
        return
    cells = {
        name: RecurrentCell(mixers, layer, name, recurrences[name], stock.__globals__[name]) for name in names
    }
    own = FunctionType(
        stock.__code__, {**stock.__globals__, **cells}, stock.__name__, stock.__defaults__, stock.__closure__
    )
    own.__kwdefaults__ = stock.__kwdefaults__
    module.forward = MethodType(own, module)
